"""Cotangents brought to the places of a top_k against one-hot sums."""

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

from relower import PassNotApplicable, explain, optimize
from relower.matchers import scattered
from relower.passes import registry, top_k_scatter

NAME = "top_k_scatter"
ONE = {NAME: 1}
T, E, K = 5, 7, 3
SCORES = np.random.RandomState(0).randint(-3, 4, (T, E)).astype(np.float32)  # many ties
CT = np.random.RandomState(1).randint(-8, 9, (T, K)).astype(np.float32)


def assert_numbers(got, want, what=""):
    """Equal types, and equal as numbers: NaN is NaN, subnormals are zero."""
    left, right = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(left) == len(right), what
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype, what
        floats = jnp.issubdtype(a.dtype, jnp.floating)
        a, b = (np.where(np.abs(v) < 2**-126, 0, v) if v.dtype == np.float32 else v
                for v in map(np.asarray, (a, b)))  # fmt: skip
        same = np.array_equal(a, b, equal_nan=bool(floats))
        assert same, f"{what}: differs as numbers"


def equal(fn, *args, passes=(NAME,), applied=None, eager=False):
    """``optimize(fn)`` gives the numbers of ``fn``; the report."""
    passes = passes and list(passes)
    contract = None if passes else "value"
    report = explain(fn, *args, passes=passes, contract=contract)
    if applied is not None:
        assert report.counts() == applied, str(report)
    optimized = optimize(fn, passes=passes, contract=contract)
    try:
        got = jax.jit(optimized)(*args)
    except PassNotApplicable:
        assert not applied, str(report)
        return report
    assert_numbers(got, jax.jit(fn)(*args), "jitted")
    if eager:
        assert_numbers(optimized(*args), fn(*args), "eager")
    return report


def transposed(choose):
    """The transpose of what chooses from the scores."""
    return lambda scores, ct: jax.vjp(choose, scores)[1](ct)[0]


top = lambda k: lambda s: lax.top_k(s, k)[0]
taken = lambda ids: lambda s: jnp.take_along_axis(s, ids(lax.stop_gradient(s)), -1)


@pytest.mark.parametrize("k", [1, 2, K, E])
def test_the_transpose_of_top_k(k, eqns_of):
    fn, ct = transposed(top(k)), np.resize(CT, (T, k))
    equal(fn, SCORES, ct, applied=ONE, eager=True)
    assert not eqns_of(optimize(fn, passes=[NAME]), SCORES, ct, name="scatter-add")


@pytest.mark.parametrize("shape", [(E,), (2, T, E), (1, E), (2, 1, 2, E)])
def test_shapes(shape):
    r = np.random.RandomState(0)
    scores = r.randint(-3, 4, shape).astype(np.float32)
    ct = r.randint(-8, 9, (*shape[:-1], 2)).astype(np.float32)
    equal(transposed(top(2)), scores, ct, applied=ONE)


def test_the_axis_of_top_k():
    fn = transposed(lambda s: lax.top_k(s, 2, axis=0)[0])
    equal(fn, SCORES, np.ones((2, E), np.float32) * 2, applied=ONE)


WAYS = {
    "top_k": lambda s: lax.top_k(s, K)[1],
    "argmax": lambda s: jnp.argmax(s, -1, keepdims=True),
    "argsort": lambda s: jnp.argsort(s, -1)[:, :K],
    "a whole argsort": lambda s: jnp.argsort(s, -1),
    "of other scores": lambda s: lax.top_k(jnp.sin(s), K)[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_choose(way):
    fn = transposed(taken(WAYS[way]))
    equal(fn, SCORES, np.resize(CT, WAYS[way](SCORES).shape), applied=ONE)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, jnp.bfloat16, np.float16])
def test_dtypes(dtype):
    def fn(scores, ct):
        ids = lax.top_k(scores, K)[1]
        dims = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
        return lax.scatter_add(jnp.zeros((T, E), ct.dtype), ids[..., None], ct, dims)

    equal(fn, SCORES, jnp.asarray(CT).astype(dtype), applied=ONE)


def raw(mode, change=lambda ids: ids, places=E):
    dims = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

    def fn(scores, ct):
        ids = change(lax.top_k(scores, K)[1])[..., None]
        return lax.scatter_add(jnp.zeros((T, places)), ids, ct, dims, mode=mode)

    return fn


@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
def test_modes(mode):
    equal(raw(mode), SCORES, CT, applied=ONE)


@pytest.mark.parametrize("outside", [-1, E, 2**31 - 1, -(2**31)])
def test_padding_is_dropped(outside):
    """A token that is routed nowhere; what its cotangents hold isn't seen."""
    real = np.arange(T)[:, None] != 2
    ct = np.where(real, CT, np.nan).astype(np.float32)
    fn = raw("drop", lambda ids: jnp.where(real, ids, outside))
    equal(fn, SCORES, ct, applied=ONE)
    assert np.isfinite(fn(SCORES, ct)).all()


SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 3e38, -3e38, 1e-40, -1e-40,
                    2**-126, 0.5, 7, -7], np.float32).reshape(T, K)  # fmt: skip


def test_special_values():
    equal(transposed(top(K)), SCORES, SPECIAL, applied=ONE, eager=True)
    equal(transposed(top(K)), np.resize(SPECIAL, (T, E)), SPECIAL, applied=ONE)
    equal(transposed(top(1)), SCORES, SPECIAL[:, :1], applied=ONE)


def test_only_the_sign_of_a_zero_may_differ():
    """And on a CPU not even that: both add it to a positive zero."""
    ct = np.full((T, K), -0.0, np.float32)
    got = jax.jit(optimize(transposed(top(K)), passes=[NAME]))(SCORES, ct)
    assert (np.asarray(got) == 0).all()


def test_it_runs_only_where_the_contract_allows_it():
    fn = transposed(top(K))
    assert NAME not in explain(fn, SCORES, CT).counts()
    assert explain(fn, SCORES, CT, contract="value").counts()[NAME] == 1


# --- gradients ------------------------------------------------------------------------------------


def router(x, w):
    """Normalised weights of the chosen experts, some tokens masked."""
    weights, ids = lax.top_k(jnp.tanh(x @ w), K)
    real = jnp.arange(x.shape[0])[:, None] != 1
    weights = jnp.where(real, weights, 0)
    return weights * jnp.where(real, ids, -1)


X = np.random.RandomState(2).rand(T, 4).astype(np.float32)
W = np.random.RandomState(3).rand(4, E).astype(np.float32)
scalar = lambda f: lambda *a: (f(*a) ** 2).sum()
grad = lambda f: jax.grad(scalar(f), argnums=(0, 1))


def close(got, want):
    """The one-hot sum is exact, but XLA may fuse what reads it, and round elsewhere."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_in_either_order():
    want = jax.jit(grad(router))(X, W)
    close(jax.jit(optimize(grad(router), passes=[NAME]))(X, W), want)
    close(jax.jit(grad(optimize(router, contract="value")))(X, W), want)
    second = jax.grad(lambda *a: sum((g * g).sum() for g in grad(router)(*a)), argnums=(0, 1))
    assert explain(second, X, W, passes=[NAME]).counts()
    close(jax.jit(optimize(second, passes=[NAME]))(X, W), jax.jit(second)(X, W))
    done = optimize(transposed(top(K)), passes=[NAME])
    inner = lambda fn: jax.grad(lambda s, c: (fn(s, c) ** 2).sum(), argnums=1)
    assert_numbers(jax.jit(inner(done))(SCORES, CT), jax.jit(inner(transposed(top(K))))(SCORES, CT))


def test_under_scan_and_remat():
    for wrap in (jax.checkpoint, lambda f: f):

        def fn(x, ws, wrap=wrap):
            step = wrap(lambda x, w: (x + router(x, w).sum(1, keepdims=True), None))
            return lax.scan(step, x, ws)[0].sum()

        g = jax.grad(fn, argnums=(0, 1))
        args = X, np.stack([W, W * 0.5])
        assert explain(g, *args, passes=[NAME]).counts() == ONE
        close(jax.jit(optimize(g, passes=[NAME]))(*args), jax.jit(g)(*args))


def test_under_vmap_in_either_order():
    fn, args = transposed(top(K)), (np.stack([SCORES, -SCORES]), np.stack([CT, CT * 2]))
    equal(jax.vmap(fn), *args, applied=ONE)
    inside = jax.vmap(optimize(fn, passes=[NAME]))
    assert_numbers(jax.jit(inside)(*args), jax.vmap(fn)(*args))
    moved = jax.vmap(fn, in_axes=(2, 2)), *(a.transpose(1, 2, 0) for a in args)
    assert codes(equal(*moved, applied={})) == [["not-chosen"]]  # the indices are transposed


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(kind, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    wrap = lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"),
                                    check_vma=check_vma)  # fmt: skip
    inside = wrap(transposed(top(K)))
    part = jax.shard_map(top(K), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    around = transposed(part)
    with jax.set_mesh(mesh):
        place = lambda a: jax.device_put(np.tile(a, (4, 1)), NamedSharding(mesh, P("d")))
        args = place(SCORES), place(CT)
        for fn in (inside, around):
            assert explain(fn, *args, passes=[NAME]).counts() == ONE
            want = jax.jit(fn)(*args)
            assert np.any(want)
            assert_numbers(jax.jit(optimize(fn, passes=[NAME]))(*args), want)


# --- near misses ----------------------------------------------------------------------------------


def codes(report):
    return [[r.code for r in s.reasons] for s in report.declined if s.pass_name == NAME]


def test_declines_labels(why):
    """The transpose of a cross-entropy's choice, which no router made."""
    fn = lambda s, labels: jax.grad(lambda s: jnp.take_along_axis(s, labels, 1).sum() ** 2)(s)
    labels = np.zeros((T, 1), np.int32)
    found = why(equal(fn, SCORES, labels, applied={}), NAME)
    assert found == [[
        "not-chosen: the indices are not those of a top_k or argmax (found a result of select_n "
        "of type int32[5,1]; wanted the indices of a top_k, an argmax or a sort)"
    ]]  # fmt: skip


def test_declines_indices_that_may_be_equal():
    halved = raw("drop", lambda ids: ids // 2)
    assert codes(equal(halved, SCORES, CT, applied={})) == [["not-chosen"]]
    wrapped = raw("drop", lambda ids: jnp.where(ids > 3, ids, E - 1))
    assert codes(equal(wrapped, SCORES, CT, applied={})) == [["not-chosen"]]

    def along_the_other_axis(scores, ct):  # the choices of a column are distinct, not of a row
        ids = lax.top_k(scores, K, axis=0)[1].T
        dims = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
        ids = jnp.swapaxes(lax.top_k(scores.T, K)[1], 0, 1)
        return lax.scatter_add(jnp.zeros((K, T)), ids[..., None], ct, dims)

    report = equal(along_the_other_axis, SCORES, np.ones((K, E), np.float32), applied={})
    assert codes(report) == [["not-chosen"]]

    def by_rows(scores, ct):  # all choices of a group of tokens into one row
        ids = lax.top_k(scores, K)[1]
        dims = lax.ScatterDimensionNumbers((), (0,), (0,))
        return lax.scatter_add(jnp.zeros(E), ids[..., None], ct, dims)

    assert codes(equal(by_rows, SCORES, CT, applied={})) == [["not-distinct"]]


def test_declines_choices_that_clipping_brings_together():
    assert codes(equal(raw("clip", places=4), SCORES, CT, applied={})) == [["clipped"]]
    masked = raw("clip", lambda ids: jnp.where(ids > 3, ids, -1))
    assert codes(equal(masked, SCORES, CT, applied={})) == [["clipped"]]
    equal(raw("drop", places=4), SCORES, CT, applied=ONE)


def test_declines_what_is_added_to_something():
    def fn(scores, ct):
        ids = lax.top_k(scores, K)[1]
        dims = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
        return lax.scatter_add(scores, ids[..., None], ct, dims)

    assert codes(equal(fn, SCORES, CT, applied={})) == [["not-zeros"]]


def test_declines_where_there_are_too_many_places():
    args = jax.ShapeDtypeStruct((2, 4097), np.float32), jax.ShapeDtypeStruct((2, K), np.float32)
    assert codes(explain(transposed(top(K)), *args, passes=[NAME])) == [["too-many-places"]]


def test_rows_and_other_scatters_are_no_candidates():
    def fn(scores, ct):
        ids = lax.top_k(scores, K)[1]
        zeros = jnp.zeros((E, K))
        return zeros.at[ids[:, 0]].add(ct), zeros.at[ids[:, 0]].set(ct)

    assert not explain(fn, SCORES, CT, passes=[NAME]).sites


# --- mutants --------------------------------------------------------------------------------------


def battery():
    equal(transposed(top(K)), SCORES, SPECIAL)
    equal(transposed(lambda s: lax.top_k(s, 2, axis=0)[0]), SCORES, np.ones((2, E), np.float32) * 2)
    equal(transposed(taken(WAYS["argmax"])), SCORES, CT[:, :1])
    for fn in (raw("clip", places=4), raw("drop", places=4)):
        equal(fn, SCORES, CT, passes=None)
    equal(lambda s, c: s + raw("drop")(s, c), SCORES, CT)

    def onto(scores, ct):
        dims = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
        return lax.scatter_add(scores, lax.top_k(scores, K)[1][..., None], ct, dims)

    equal(onto, SCORES, CT, passes=None)


def without(code):
    kept = tuple(r for r in top_k_scatter.PASS.requirements if r.code != code)

    def mutate(monkeypatch):
        mutated = tuple(
            dataclasses.replace(p, requirements=kept) if p.name == NAME else p
            for p in registry.all_passes()
        )
        monkeypatch.setattr(registry, "all_passes", lambda: mutated)

    return mutate


def instead(change):
    original = top_k_scatter.placed
    return lambda m: m.setattr(top_k_scatter, "placed", lambda *a: change(original, *a))


MUTANTS = {
    "a choice dropped": instead(
        lambda f, i, v, n: f(i[1:], v[1:], n) if len(i) > 1 else f(i, v, n)
    ),
    "places shifted by one": instead(lambda f, i, v, n: f(i + 1, v, n)),
    "choices reversed": instead(lambda f, i, v, n: f(i[::-1], v, n)),
    "shrunk by half a percent": instead(lambda f, i, v, n: f(i, v * 0.995, n)),
    "NaN lost": instead(lambda f, i, v, n: jnp.nan_to_num(f(i, v, n), posinf=jnp.inf)),
    "clipping lost": without("clipped"),
    "what it is added to lost": without("not-zeros"),
}


def test_the_battery_passes_unmutated():
    battery()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs as numbers"):
        battery()


# --- anything -------------------------------------------------------------------------------------


# Few sizes, as each is compiled, and many values for each: rows, columns, how many are chosen.
SIZES = [
    ((), 1, 1),
    ((), 6, 3),
    ((1,), 5, 2),
    ((3,), 4, 4),
    ((2,), 6, 1),
    ((2, 3), 3, 2),
    ((1, 1), 2, 2),
    ((3, 2), 6, 5),
]


@st.composite
def cases(draw):
    shape, size, k = draw(st.sampled_from(SIZES))
    pool = st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5, -2.0, 1e-40])
    arrays = []
    for last in (size, k):
        n = int(np.prod((*shape, last)))
        drawn = draw(st.lists(pool, min_size=n, max_size=n))
        arrays.append(np.array(drawn, np.float32).reshape(*shape, last))
    return arrays


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_any_choice(drawn):
    scores, ct = drawn
    fn = transposed(top(ct.shape[-1]))
    # Op by op: compiling whole programs would take most of the test's time.
    assert_numbers(optimize(fn, contract="value")(scores, ct), fn(scores, ct))


# --- rows named by an index -----------------------------------------------------------------------

ROWS = np.arange(T)[:, None]


def named(rows=lambda: jnp.arange(T)[:, None], shape=(T, E), mode=None, change=lambda ids: ids):
    """``zeros.at[rows, ids].add(values)``."""

    def fn(scores, ct):
        ids = change(lax.top_k(scores, K)[1])
        return jnp.zeros(shape).at[rows(), ids].add(ct, mode=mode)

    return fn


def turned(scores, ct):
    ids = lax.top_k(scores, K)[1]
    return jnp.zeros((E, T)).at[ids, jnp.arange(T)[:, None]].add(ct)


def one_of_a_row(scores, ct):
    return jnp.zeros((T, E)).at[jnp.arange(T), jnp.argmax(scores, -1)].add(ct[:, 0])


def stacked(scores, ct):
    pair = jnp.stack([scores, -scores])
    ids = lax.top_k(pair, K)[1]
    two, rows = jnp.arange(2)[:, None, None], jnp.arange(T)[:, None]
    return jnp.zeros((2, T, E)).at[two, rows, ids].add(jnp.stack([ct, 2 * ct]))


NAMED = {
    "rows first": named(),
    "a constant": named(lambda: ROWS),
    "ids first": turned,
    "one choice": one_of_a_row,
    "two axes of rows": stacked,
    "dropped": named(mode="drop", change=lambda ids: jnp.where(ids == 2, E, ids)),
    "batched too": lambda s, ct: jax.vmap(named())(jnp.stack([s, -s]), jnp.stack([ct, ct + 1])),
    "in a call": lambda s, ct: jax.jit(named())(s, ct) + 1,
}


@pytest.mark.parametrize("name", NAMED)
def test_rows_named_by_an_index(name):
    equal(NAMED[name], SCORES, CT, applied=ONE)
    assert not count(optimize(NAMED[name], passes=[NAME]), SCORES, CT)


def count(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("scatter-add[")


OTHER_ROWS = {
    "backwards": named(lambda: jnp.arange(T)[::-1, None]),
    "shifted": named(lambda: jnp.arange(T)[:, None] + 1, (T + 1, E)),
    "not all": named(shape=(T + 1, E)),
    "too many": named(shape=(T - 1, E)),
    "in pairs": named(lambda: jnp.arange(T)[:, None] // 2),
    "of choices": named(lambda: jnp.arange(K)[None], (K, E)),
    "unknown": lambda s, ct: named(lambda: (s[:, :1] * 0).astype(int))(s, ct),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_declines_other_rows(name):
    """Rows not known to be counted up: some are named twice, or not at all."""
    equal(OTHER_ROWS[name], SCORES, CT, applied={})


def test_declines_choices_of_rows_named_by_an_index():
    ids = lambda ids: ids // 2
    assert codes(equal(named(change=ids), SCORES, CT, applied={})) == [["not-chosen"]]
    clipped = named(shape=(T, 4), mode="clip")
    assert codes(equal(clipped, SCORES, CT, applied={})) == [["clipped"]]


def test_many_choices():
    """More than are selected one after another."""
    scores = np.random.RandomState(2).randint(-3, 4, (T, 40)).astype(np.float32)
    ct = np.random.RandomState(3).randint(-8, 9, (T, 17)).astype(np.float32)
    equal(transposed(top(17)), scores, ct, applied=ONE)


def test_rows_taken_for_counted_are_caught(monkeypatch):
    monkeypatch.setattr(scattered, "_counts_up", lambda scope, column, size, paired: (
        0 if column.aval.shape[0] == size and 0 not in paired.values() else None))  # fmt: skip
    with pytest.raises(AssertionError, match="differs as numbers"):
        equal(OTHER_ROWS["backwards"], SCORES, CT)
