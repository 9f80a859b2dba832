"""A sort by a permutation against the unstable sort by one key."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.lowering.lower import lower
from relower.passes import inverse_permutation, registry

NAME = "inverse_permutation"
ONE = {NAME: 1}
DATA = np.random.RandomState(2).randint(-9, 9, 33).astype(np.float32)
SCORES = np.random.RandomState(0).randint(-4, 5, 33).astype(np.float32)


def ranks(x, axis=-1):
    return jnp.argsort(jnp.argsort(x, axis=axis), axis=axis)


def back(x, **how):
    """Sorted keys, inverse, and data brought back to where it came from."""
    how = {"dimension": 0, "num_keys": 1, **how}
    order = jnp.argsort(x, axis=how["dimension"])
    places = lax.broadcasted_iota(np.int32, x.shape, how["dimension"])
    return lax.sort((order, places, jnp.take_along_axis(x, order, how["dimension"])), **how)


def the_sort(eqns_of, fn, *args):
    """The one sort by a permutation that an optimized function is left with."""
    found = [e for e in eqns_of(optimize(fn, passes=[NAME]), *args, name="sort")
             if not e.params["is_stable"]]  # fmt: skip
    (sort,) = found
    return sort


@pytest.mark.parametrize("special", [np.nan, -0.0, np.inf])
def test_ranks_of_scores_with_ties(same, eqns_of, special):
    x = np.where(SCORES == 2, special, SCORES).astype(np.float32)
    same(ranks, x, passes=[NAME], applied=ONE, eager=True)
    sort = the_sort(eqns_of, ranks, x)
    assert len(sort.invars) == 2
    assert sort.params["num_keys"] == 1


def test_data_goes_along_and_the_keys_become_an_iota(same, eqns_of):
    x = SCORES.copy()
    x[::3] = np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    same(back, x, passes=[NAME], applied=ONE, eager=True)
    assert len(the_sort(eqns_of, back, x).invars) == 3
    jaxpr = jax.make_jaxpr(optimize(back))(x).jaxpr
    (made,) = [e for e in jaxpr.eqns if e.outvars[0] is jaxpr.outvars[0]]
    assert made.primitive.name == "iota"


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), 0), ((5, 6), 0), ((5, 6), 1), ((3, 4, 5), 1), ((0,), 0), ((3, 0), 1), ((1,), 0),
     ((3, 1), 1), ((1, 3), 1)],
)  # fmt: skip
def test_any_axis_and_length(same, shape, axis):
    x = np.random.RandomState(1).randint(-1, 3, shape).astype(np.float32)
    applied = ONE if shape[axis] > 1 else {}  # one position isn't called a permutation
    same(lambda x: ranks(x, axis), x, passes=[NAME], applied=applied)
    same(lambda x: back(x, dimension=axis), x, passes=[NAME], applied=applied)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_positions_of_any_dtype_and_repeated(same, eqns_of, dtype):
    def fn(x):
        order = lax.sort((x, lax.iota(dtype, x.size)), num_keys=1)[1]
        again = lax.iota(np.uint32, x.size)
        return lax.sort((order, lax.iota(np.int32, x.size), again), num_keys=1)

    same(fn, SCORES, passes=[NAME], applied=ONE)
    assert len(the_sort(eqns_of, fn, SCORES).invars) == 2


def test_wide_positions(same, x64):
    same(ranks, SCORES, passes=[NAME], applied=ONE)
    assert jax.jit(optimize(ranks))(SCORES).dtype == np.int64


def test_positions_that_fall_or_are_unknown_make_no_difference(same):
    falling = lambda x: lax.sort_key_val(jnp.argsort(x), lax.rev(lax.iota(np.int32, x.size), (0,)))
    same(falling, SCORES, passes=[NAME], applied=ONE)
    data = lambda x, d: lax.sort_key_val(jnp.argsort(x), d)
    same(data, SCORES, np.random.RandomState(1).rand(33), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("stable", [True, False])
def test_further_keys_decide_nothing(same, eqns_of, stable):
    def fn(x):
        places = lax.iota(np.int32, x.size)
        return lax.sort((jnp.argsort(x), places, x), num_keys=3, is_stable=stable)

    same(fn, SCORES, passes=[NAME], applied=ONE)
    assert the_sort(eqns_of, fn, SCORES).params["num_keys"] == 1


def test_a_permutation_by_another_road(same):
    reverse = lambda x: jnp.argsort(jnp.argsort(x)[::-1])
    same(reverse, SCORES, passes=[NAME], applied=ONE)
    composed = lambda x: jnp.argsort(jnp.argsort(x)[jnp.argsort(-x)])
    same(composed, SCORES, passes=[NAME], applied=ONE)
    whole = lambda x: jnp.argsort(lax.top_k(x, x.size)[1])
    same(whole, SCORES, passes=[NAME], applied=ONE)
    constant = lambda x: x[jnp.argsort(np.array([3, 1, 0, 2], np.int32))]
    same(constant, SCORES, passes=[NAME], applied=ONE)


def test_who_takes_an_inverse(same):
    """Two positions in one word are better; data beside them can't be packed."""
    same(ranks, SCORES, applied={"argsort_packed_key": 1, "argsort_unique_pairs": 1})
    data = lambda x, d: lax.sort_key_val(jnp.argsort(x), d)
    same(data, SCORES, DATA, applied={NAME: 1, "argsort_unique_pairs": 1})
    long = jax.ShapeDtypeStruct((1 << 16,), np.float32)
    assert explain(ranks, long).counts() == {"argsort_packed_key": 1, "argsort_unique_pairs": 1}
    longer = jax.ShapeDtypeStruct(((1 << 16) + 1,), np.float32)
    assert explain(ranks, longer).counts() == {NAME: 1, "argsort_unique_pairs": 1}


def test_what_was_made_unstable_can_still_be_packed(eqns_of, equal_bits):
    once = optimize(ranks, passes=[NAME])
    assert explain(once, SCORES, passes=["argsort_packed_key"]).counts() == {
        "argsort_packed_key": 1
    }
    packed = optimize(once, passes=["argsort_packed_key"])
    equal_bits(jax.jit(packed)(SCORES), jax.jit(ranks)(SCORES))
    assert sorted(len(e.invars) for e in eqns_of(packed, SCORES, name="sort")) == [1, 2]


# --- gradients and transforms --------------------------------------------------------------------


def loss_of(fn):
    def loss(x, d):
        return (fn(x, d) * jnp.arange(1.0, d.shape[-1] + 1)).sum()

    return loss


def carried(x, d):
    """Data sorted back by a permutation: its gradient goes through the sort."""
    return lax.sort((jnp.argsort(x), d), num_keys=1)[1]


def check_gradients(equal_bits, fn, args, sites=1):
    loss = loss_of(fn)
    want = jax.jit(jax.grad(loss, 1))(*args)
    assert np.any(want)
    equal_bits(jax.jit(jax.grad(loss_of(optimize(fn)), 1))(*args), want, "grad(loss of opt)")
    equal_bits(jax.jit(jax.grad(optimize(loss), 1))(*args), want, "grad(opt)")
    equal_bits(jax.jit(optimize(jax.grad(loss, 1)))(*args), want, "opt(grad)")
    assert explain(jax.grad(loss, 1), *args, passes=[NAME]).counts() == {NAME: sites}


def test_gradients(equal_bits):
    check_gradients(equal_bits, carried, (SCORES, DATA))
    gathered = lambda x, d: d[ranks(x)]
    check_gradients(equal_bits, gathered, (SCORES, DATA))


def test_gradients_eager(equal_bits):
    want = jax.grad(loss_of(carried), 1)(SCORES, DATA)
    equal_bits(jax.grad(loss_of(optimize(carried)), 1)(SCORES, DATA), want)


def test_vmap(equal_bits):
    x, d = np.stack([SCORES, SCORES[::-1]]), np.stack([DATA, -DATA])
    want = jax.jit(jax.vmap(carried))(x, d)
    equal_bits(jax.jit(jax.vmap(optimize(carried)))(x, d), want)
    equal_bits(jax.jit(optimize(jax.vmap(carried)))(x, d), want)
    check_gradients(equal_bits, jax.vmap(carried), (x, d))


def test_scan_and_remat(equal_bits):
    def scanned(x, d):
        step = jax.checkpoint(lambda h, row: (carried(row, h), None))
        return lax.scan(step, d, jnp.stack([x, x[::-1]]))[0]

    check_gradients(equal_bits, scanned, (SCORES, DATA), sites=2)  # and its recomputation


def test_an_order_that_a_scan_hands_on(same):
    """The order comes into the body from outside, the same in every iteration."""

    def fn(x, rows):
        order = jnp.argsort(x)
        step = lambda c, row: (c, lax.sort_key_val(order, row))
        return lax.scan(step, 0, rows)[1]

    rows = np.random.RandomState(2).rand(3, 33).astype(np.float32)
    same(fn, SCORES, rows, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("varying", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map(equal_bits, kind, varying, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    spec = P("d") if varying else P()
    x = np.random.RandomState(0).randint(-4, 5, 32).astype(np.float32)
    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
        part = jax.shard_map(lambda x, d: (back(x)[0] + 1) * carried(x, d), mesh=mesh,
                             in_specs=spec, out_specs=spec, check_vma=check_vma)  # fmt: skip
        args = place(x), place(DATA[:32])
        want = jax.jit(part)(*args)
        assert explain(part, *args, passes=[NAME]).counts() == {NAME: 2}
        equal_bits(jax.jit(optimize(part))(*args), want)
        loss = loss_of(part)
        wanted = jax.jit(jax.grad(loss, 1))(*args)
        assert np.any(wanted)
        equal_bits(jax.jit(jax.grad(optimize(loss), 1))(*args), wanted)
        equal_bits(jax.jit(optimize(jax.grad(loss, 1)))(*args), wanted)


def test_rows_sharded_over_an_explicit_mesh(equal_bits):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = np.random.RandomState(0).randint(-4, 5, (4, 9)).astype(np.float32)

    def fn(x):
        order = jnp.argsort(x, axis=1)
        return lax.sort((order, x), dimension=1, num_keys=1)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("d")))
        assert explain(fn, placed, passes=[NAME]).counts() == ONE
        got, want = jax.jit(optimize(fn))(placed), jax.jit(fn)(placed)
        equal_bits(got, want)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)


# --- near misses ---------------------------------------------------------------------------------


def declined(why, fn, *args):
    """The reasons at every sort, that of the order among them."""
    return [reason for site in why(explain(fn, *args, passes=[NAME]), NAME) for reason in site]


def test_declines_a_permutation_cut_short(same, why):
    """The first places of an order differ from each other, but are no permutation of 0 … 7."""
    fn = lambda x: jnp.argsort(jnp.argsort(x)[:8])
    assert (
        "not-a-permutation: the key is not known to be a permutation "
        "(found i32[8] with lo=0, hi=32; wanted a permutation of 0 … 7 along axis 0)"
    ) in declined(why, fn, SCORES)
    same(fn, SCORES, passes=[NAME], applied={})


def test_declines_keys_of_which_nothing_is_known(same, why):
    assert declined(why, jnp.argsort, SCORES) == [
        "not-a-permutation: the key is not known to be a permutation "
        "(found f32[33] of unknown range; wanted a permutation of 0 … 32 along axis 0)"
    ]
    keys = SCORES.astype(np.int32)
    assert declined(why, lambda k: jnp.argsort(jnp.maximum(k, 0)), keys) == [
        "not-a-permutation: the key is not known to be a permutation "
        "(found i32[33] with lo=0, hi=unknown; wanted a permutation of 0 … 32 along axis 0)"
    ]


def test_declines_a_permutation_along_another_axis(same, why):
    def fn(x):
        order = jnp.argsort(x, axis=0)
        places = lax.broadcasted_iota(np.int32, x.shape, 1)
        return lax.sort((order, places), dimension=1, num_keys=1)

    x = SCORES[:32].reshape(8, 4)
    assert (
        "not-a-permutation: the key is not known to be a permutation "
        "(found i32[8,4], a permutation along axis 0; wanted a permutation of 0 … 3 along axis 1)"
    ) in declined(why, fn, x)
    same(fn, x, passes=[NAME], applied={})


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o // 2,
        lambda o: o + 1,
        lambda o: jnp.where(o > 3, o, 0),
        lambda o: o.at[0].set(3),
        lambda o: jnp.concatenate([o[:4], o[:-4]]),
        lambda o: jnp.take(o, jnp.abs(o - 4), mode="clip"),
    ],
)
def test_declines_what_a_permutation_was_turned_into(same, why, change):
    fn = lambda x: jnp.argsort(change(jnp.argsort(x)))
    of_order, of_changed = declined(why, fn, SCORES)
    assert of_order.startswith("not-a-permutation: ")
    assert of_changed.startswith("not-a-permutation: ")
    same(fn, SCORES, passes=[NAME], applied={})


def test_what_is_no_candidate():
    one = lambda x: lax.sort((jnp.argsort(x, stable=False), x), num_keys=1, is_stable=False)
    assert not explain(one, SCORES, passes=[NAME]).sites
    assert not explain(jnp.sort, SCORES, passes=[NAME]).sites
    assert not explain(optimize(ranks, passes=[NAME]), SCORES, passes=[NAME]).applied


# --- mutants -------------------------------------------------------------------------------------


def battery(same):
    same(back, SCORES)
    same(lambda x: lax.sort((jnp.argsort(x) // 2, x), num_keys=2), SCORES)
    repeats = lambda x: lax.sort((jnp.argsort(x), lax.iota(np.int32, 33), lax.iota(np.uint32, 33),
                                  x, x + 1), num_keys=1)  # fmt: skip
    same(repeats, SCORES)


def test_the_battery_passes_unmutated(same):
    battery(same)


def of_replacement(change):
    def replace(match):
        r = inverse_permutation.PASS.replace(match)
        return dataclasses.replace(r, fn=lambda *ops: change(list(r.fn(*ops)), ops))

    return {"replace": replace}


MUTANTS = {
    "any key is a permutation": {"requirements": ()},
    "keys left unsorted": of_replacement(lambda outs, ops: [ops[0], *outs[1:]]),
    "keys counted from one": of_replacement(lambda outs, ops: [outs[0] + 1, *outs[1:]]),
    "positions left unsorted": of_replacement(lambda outs, ops: [outs[0], ops[1], *outs[2:]]),
    "the permutation for its inverse": of_replacement(lambda outs, ops: [outs[0], ops[0],
                                                                         *outs[2:]]),
    "data left unsorted": of_replacement(lambda outs, ops: [*outs[:-1], ops[-1]]),
    "repeats left unsorted": of_replacement(lambda outs, ops: [*outs[:2], ops[2], *outs[3:]]),
    "positions off by one": of_replacement(lambda outs, ops: [outs[0], outs[1] + 1, *outs[2:]]),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    mutated = tuple(
        dataclasses.replace(p, **MUTANTS[mutant]) if p.name == NAME else p
        for p in registry.all_passes()
    )
    monkeypatch.setattr(registry, "all_passes", lambda: mutated)
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same)


def test_a_sort_that_stays_stable_is_caught_by_identity(monkeypatch):
    """Values don't tell; the lowered program does."""

    def replace(match):
        r = inverse_permutation.PASS.replace(match)
        return dataclasses.replace(r, fn=lambda *ops: list(lax.sort(ops, num_keys=1)))

    mutant = dataclasses.replace(inverse_permutation.PASS, replace=replace)
    monkeypatch.setattr(registry, "all_passes", lambda: (mutant,))
    (args,) = (e.args for e in mutant.examples())
    got = lower(optimize(mutant.before, passes=None), *args, levels=("inlined",))
    want = lower(mutant.after, *args, levels=("inlined",))
    assert got.forms["inlined"].digest != want.forms["inlined"].digest


# --- anything ------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(
    st.permutations(range(12)),
    st.sampled_from([(12,), (3, 4), (4, 3), (2, 2, 3)]),
    st.integers(-3, 2),
    st.integers(1, 2),
    st.booleans(),
)
def test_any_permutation(values, shape, axis, num_keys, stable):
    x = np.array(values, np.float32).reshape(shape) // 2
    axis = axis % len(shape)
    how = {"dimension": axis, "num_keys": num_keys, "is_stable": stable or num_keys == 1}
    fn = lambda x: back(x, **how)
    if shape[axis] > 1:
        assert explain(fn, x, passes=[NAME]).counts() == ONE
    # Op by op: compiling whole programs would take most of the test's time.
    for got, want in zip(optimize(fn)(x), fn(x), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
