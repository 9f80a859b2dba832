"""A gather from an array that counts its positions against arithmetic on the index."""

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

from relower import assume_range, explain, optimize
from relower.passes import affine_gather, registry

NAME = "affine_gather"
ONE = {NAME: 1}
SCORES = np.random.RandomState(1).randint(-3, 3, (6, 5)).astype(np.float32)


def order_of(scores, k=2):
    return jnp.argsort(lax.top_k(scores, k)[1].reshape(-1))


def ends(n, dtype=np.int32):
    """Every position, both ends twice."""
    return np.array([0, n - 1, *range(n), n - 1, 0], dtype)


def known(i, n):
    return assume_range(i, 0, n - 1)


def plain(table, index):
    """By a promise, without the wrap-around."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


FORMS = {
    "repeat": lambda: jnp.repeat(jnp.arange(6), 2),
    "repeat of one": lambda: jnp.repeat(jnp.arange(12), 1),
    "tile": lambda: jnp.tile(jnp.arange(6), 2),
    "tile of a repeat": lambda: jnp.tile(jnp.repeat(jnp.arange(3), 2), 2),
    "iota": lambda: jnp.arange(12),
    "iota from 5 by 3": lambda: jnp.arange(5, 41, 3),
    "falling": lambda: jnp.arange(12)[::-1],
    "falling below zero": lambda: -3 - 2 * jnp.arange(12),
    "scaled after": lambda: 4 * jnp.repeat(jnp.arange(6), 2) - 7,
    "subtracted": lambda: jnp.tile(jnp.arange(4), 3) - 1,
    "broadcast and reshape": lambda: jnp.broadcast_to(jnp.arange(3)[:, None], (3, 4)).reshape(-1),
    "broadcast in front": lambda: jnp.broadcast_to(jnp.arange(3), (4, 3)).reshape(-1),
    "the middle digit": lambda: lax.broadcasted_iota(np.int32, (2, 3, 2), 1).reshape(-1),
    "repeat of a tile": lambda: jnp.repeat(jnp.tile(jnp.arange(3), 2), 2),
    "a repeat broadcast in front": lambda: jnp.broadcast_to(
        jnp.repeat(jnp.arange(3), 2), (2, 6)
    ).reshape(-1),
    "a run of two digits": lambda: jnp.broadcast_to(
        jnp.arange(6).reshape(2, 3)[:, :, None], (2, 3, 2)
    ).reshape(12),
    "narrowed": lambda: jnp.repeat(jnp.arange(6), 2).astype(np.int8),
    "unsigned": lambda: jnp.repeat(jnp.arange(6, dtype=np.uint8), 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(same, eqns_of, form):
    fn = lambda i: FORMS[form]().at[known(i, 12)].get(wrap_negative_indices=False)
    same(fn, ends(12), passes=[NAME], applied=ONE, eager=True)
    assert not eqns_of(optimize(fn), ends(12), name="gather")


@pytest.mark.parametrize("form", FORMS)
def test_the_ways_to_index(same, form):
    """Wrapped around, taken, of any shape, in any mode."""
    index = ends(12)[:12].reshape(3, 4)
    for fn in (
        lambda i: FORMS[form]()[known(i, 12)],
        lambda i: jnp.take(FORMS[form](), known(i, 12)),
        lambda i: jnp.take(FORMS[form](), known(i, 12), mode="clip"),
        lambda i: FORMS[form]().at[known(i, 12)].get(mode="fill", fill_value=77),
    ):
        same(fn, index, passes=[NAME], applied=ONE)
        same(fn, index, applied=explain(fn, index).counts())


def test_what_is_promised_needs_no_proof(same):
    table = lambda: jnp.repeat(jnp.arange(6), 2)
    promised = lambda i: table().at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)
    same(promised, ends(12), passes=[NAME], applied=ONE)
    # Negative indices are wrapped before the promise is made: the select has to stay.
    same(lambda i: table()[i], np.array([-1, -12, 0, 11], np.int32), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8, np.uint32])
def test_indices_out_of_bounds_are_clamped_as_the_gather_clamps_them(same, form, dtype):
    info = np.iinfo(dtype)
    index = np.array([0, 11, 12, info.max, info.min, 13 % info.max], dtype)
    for mode in ("clip", "promise_in_bounds"):
        fn = lambda i, mode=mode: FORMS[form]().at[i].get(mode=mode, wrap_negative_indices=False)
        same(fn, index, passes=[NAME], applied=ONE)
    # What indexing does by default: negative ones count from the end, and what is left is clamped.
    same(lambda i: FORMS[form]()[i], index, passes=[NAME], applied=ONE)


def test_a_table_longer_than_the_index_dtype_counts(same):
    fn = lambda i: jnp.arange(300).at[i].get(mode="clip", wrap_negative_indices=False)
    same(fn, np.array([0, 127, -128], np.int8), passes=[NAME], applied=ONE)


def test_scalars(same):
    fn = lambda i: jnp.take(jnp.repeat(jnp.arange(6), 2), known(i, 12))
    same(fn, np.int32(7), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("index", [np.int8, np.uint8, np.int16, np.uint32, np.int32])
@pytest.mark.parametrize("table", [np.int8, np.uint8, np.int16, np.uint32, np.int32])
def test_every_dtype(same, table, index):
    for make in (
        lambda: jnp.repeat(jnp.arange(60, dtype=table), 2),
        lambda: jnp.tile(jnp.arange(60, dtype=table), 2),
        lambda: jnp.arange(120, dtype=table),
    ):
        fn = lambda i, make=make: make().at[known(i, 120)].get(wrap_negative_indices=False)
        report = same(fn, ends(120, index), passes=[NAME], applied=ONE)
        assert not report.declined


@pytest.mark.parametrize(("lo", "hi"), [(-128, 127), (0, 127), (-128, -1)])
def test_a_table_that_spans_its_dtype(same, lo, hi):
    """The steps reach 255, which int8 doesn't hold: the arithmetic is done elsewhere."""
    make = lambda: (jnp.arange(hi - lo + 1) + lo).astype(np.int8)
    n = hi - lo + 1
    fn = lambda i: make().at[known(i, n)].get(wrap_negative_indices=False)
    same(fn, ends(n, np.uint8), passes=[NAME], applied=ONE)
    same(fn, ends(n, np.int32), passes=[NAME], applied=ONE)
    wide = lambda i: plain(jnp.repeat(make(), 300), known(i, 9))
    same(wide, ends(9, np.int8), passes=[NAME], applied=ONE)


def test_indices_and_tables_of_64_bits(same, x64):
    fn = lambda i: (jnp.repeat(jnp.arange(6), 2) * 2**40)[known(i, 12)]
    same(fn, ends(12, np.int64), passes=[NAME], applied=ONE)
    same(fn, ends(12, np.int32), passes=[NAME], applied=ONE)
    narrow = lambda i: jnp.repeat(jnp.arange(6, dtype=np.int32), 2)[known(i, 12)]
    same(narrow, ends(12, np.uint64), passes=[NAME], applied=ONE)


def test_declines_steps_that_no_dtype_at_hand_holds_too_wide(same, why):
    wide = lambda: lax.iota(np.uint32, 3) * np.uint32(2**31 - 1)
    fn = lambda i: plain(wide(), known(i, 3))
    same(fn, ends(3), passes=[NAME], applied=ONE)  # uint32 holds them
    for turned in (lambda: wide()[::-1], lambda: np.uint32(2**32 - 2) - wide()):
        fn = lambda i, turned=turned: plain(turned(), known(i, 3))
        report = same(fn, ends(3), passes=[NAME], applied={})
        assert why(report, NAME) == [
            ["too-wide: no dtype at hand holds every step of the arithmetic "
             "(found Stepped(offset=4294967294, stride=-2147483647, div=1, mod=3), indices int32, "
             "table uint32; wanted one that does)"]
        ]  # fmt: skip


def test_weak_types_stay(same):
    weak = lambda i: jnp.where(i > 0, 3, 1)  # weakly typed
    assert jax.typeof(jax.jit(weak)(ends(4))).weak_type
    table = lambda: jnp.arange(12)
    fn = lambda i: table().at[weak(i)].get(wrap_negative_indices=False)
    same(fn, ends(12), passes=[NAME], applied=ONE)
    got, want = (jax.eval_shape(f, ends(12)) for f in (optimize(fn), fn))
    assert got.weak_type == want.weak_type
    typed = lambda i: (2 * lax.full((3,), 1) * 0 + jnp.arange(3)).at[known(i, 3)].get(mode="clip")
    got, want = (jax.eval_shape(f, ends(3)) for f in (optimize(typed), typed))
    assert got.weak_type == want.weak_type


# --- where the index comes from, and the table ----------------------------------------------------


def test_a_routed_layer(same, eqns_of):
    fn = lambda s: jnp.take(jnp.repeat(jnp.arange(6), 2), order_of(s))
    same(fn, SCORES, passes=[NAME], applied=ONE, eager=True)
    same(fn, SCORES, applied={NAME: 1, "argsort_packed_key": 1, "nonnegative_index": 1})
    assert not eqns_of(optimize(fn), SCORES, name="gather")


def test_a_table_from_an_outer_scope(same):
    def scanned(s):
        table = jnp.repeat(jnp.arange(6), 2)
        step = lambda c, _: (c + 1, table[order_of(s + c)])
        return lax.scan(step, 0.0, None, length=3)[1]

    def called(s):
        inner = jax.jit(lambda t, i: t[i])
        return inner(jnp.tile(jnp.arange(6), 2), order_of(s))

    same(scanned, SCORES, passes=[NAME], applied=ONE)
    same(called, SCORES, passes=[NAME], applied=ONE)
    same(jax.checkpoint(scanned), SCORES, passes=[NAME], applied=ONE)


def test_a_table_that_only_one_caller_counts(same):
    """One body, called with a table that counts and with one that doesn't."""
    inner = jax.jit(lambda t, i: t.at[i].get(mode="promise_in_bounds"))

    def fn(i, t):
        return inner(jnp.arange(12), i), inner(t, i)

    same(fn, ends(12), np.arange(12, dtype=np.int32) ** 2, passes=[NAME], applied=ONE)


def test_under_cond_and_while(same):
    def fn(i, p):
        table = lambda: jnp.repeat(jnp.arange(6), 2)
        i = known(i, 12)
        return lax.cond(p, lambda: table()[i], lambda: jnp.tile(jnp.arange(6), 2)[i])

    same(fn, ends(12), True, passes=[NAME], applied={NAME: 2})
    same(fn, ends(12), False, passes=[NAME], applied={NAME: 2})

    def loop(i):
        table = jnp.repeat(jnp.arange(6), 2)
        return lax.fori_loop(
            0, 12, lambda j, a: a + jnp.take(table, known((i + j) % 12, 12)), 0 * i
        )

    same(loop, ends(12), passes=[NAME], applied=ONE)


def test_gradients_in_either_order(equal_bits):
    def loss(s, x):
        token = jnp.repeat(jnp.arange(6), 2)[order_of(s)]
        return (jnp.sin(x[token]) * jnp.arange(12.0)[:, None]).sum() + (s * s).sum()

    x = np.random.RandomState(0).rand(6, 3).astype(np.float32)
    want = jax.jit(jax.grad(loss, argnums=(0, 1)))(SCORES, x)
    assert all(np.any(w) for w in want)
    for done in (
        jax.grad(optimize(loss), argnums=(0, 1)),
        optimize(jax.grad(loss, argnums=(0, 1))),
    ):
        equal_bits(jax.jit(done)(SCORES, x), want)
    assert explain(jax.grad(loss, argnums=(0, 1)), SCORES, x, passes=[NAME]).counts() == ONE


def test_under_vmap_in_either_order(equal_bits):
    fn = lambda s: jnp.repeat(jnp.arange(6), 2)[order_of(s)]
    batch = np.stack([SCORES, -SCORES, SCORES[::-1]])
    want = jax.jit(jax.vmap(fn))(batch)
    equal_bits(jax.jit(jax.vmap(optimize(fn, passes=[NAME])))(batch), want)
    equal_bits(jax.jit(optimize(jax.vmap(fn), passes=[NAME]))(batch), want)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(equal_bits, kind, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))

    def local(s, x):
        token = jnp.repeat(jnp.arange(s.shape[0]), 2)[order_of(s)]
        return x[token] * jnp.arange(1.0, 1 + 2 * s.shape[0])[:, None]

    part = jax.shard_map(
        local, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=check_vma
    )
    loss = lambda fn: lambda s, x: (fn(s, x) ** 2).sum()
    scores = np.random.RandomState(1).randint(-3, 3, (16, 5)).astype(np.float32)
    x = np.random.RandomState(0).randint(-4, 5, (16, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        args = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (scores, x)]
        equal_bits(jax.jit(optimize(part, passes=[NAME]))(*args), jax.jit(part)(*args))
        want = jax.jit(jax.grad(loss(part), argnums=1))(*args)
        assert np.any(want)
        for done in (
            jax.grad(loss(optimize(part)), argnums=1),
            optimize(jax.grad(loss(part), argnums=1)),
        ):
            equal_bits(jax.jit(done)(*args), want)


@pytest.mark.parametrize("vary", ["table", "index"])
def test_where_only_one_of_table_and_index_varies_over_devices(equal_bits, vary):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def local(s, x):
        table, index = jnp.repeat(jnp.arange(4), 2), jnp.argmax(s, -1)
        if vary == "table":
            table, index = lax.pcast(table, "d", to="varying"), jnp.arange(8)[::-1]
        return table[index] + x[:, 0].astype(np.int32)

    part = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
    scores = np.random.RandomState(1).rand(32, 8).astype(np.float32)
    done = optimize(part, passes=[NAME])
    equal_bits(jax.jit(done)(scores, scores), jax.jit(part)(scores, scores))


def test_indices_sharded_on_an_explicit_mesh(same):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        index = jax.device_put(ends(12), NamedSharding(mesh, P("d")))
        fn = lambda i: jnp.repeat(jnp.arange(6), 2).at[known(i, 12)].get(out_sharding=P("d"))
        report = explain(fn, index, passes=[NAME])
        got, want = (jax.jit(f)(index) for f in (optimize(fn), fn))
        assert jax.typeof(got) == jax.typeof(want)
        np.testing.assert_array_equal(got, want)
        assert report.sites


# --- near misses ----------------------------------------------------------------------------------

TABLES_NOT_KNOWN = {
    "an input": lambda t: t,
    "its square": lambda t: jnp.arange(12) ** 2,
    "two digits": lambda t: (jnp.arange(3)[:, None] * 10 + jnp.arange(4)).reshape(-1),
    "repeats of different lengths": lambda t: jnp.repeat(
        jnp.arange(4), jnp.array([1, 2, 3, 6]), total_repeat_length=12
    ),
    "a total length": lambda t: jnp.repeat(jnp.arange(6), 2, total_repeat_length=12),
    "a tile of less than a period": lambda t: jnp.tile(jnp.tile(jnp.arange(4), 2)[:6], 2),
    "a tile cut short": lambda t: jnp.tile(jnp.arange(5), 3)[:12],
    "one that wraps around": lambda t: (jnp.repeat(jnp.arange(6), 2) * 100).astype(np.int8),
    "a sum that wraps around": lambda t: jnp.repeat(jnp.arange(6, dtype=np.int8), 2) + np.int8(125),
    "a scatter into an iota": lambda t: jnp.arange(12).at[3].set(7),
}


@pytest.mark.parametrize("table", TABLES_NOT_KNOWN)
def test_declines_tables_that_are_not_affine(same, why, table):
    make = TABLES_NOT_KNOWN[table]
    fn = lambda i, t: make(t).at[known(i, 12)].get(wrap_negative_indices=False)
    report = same(fn, ends(12), np.arange(12, dtype=np.int32) ** 2, passes=[NAME], applied={})
    assert why(report, NAME)[-1] == [
        "not-affine: the table is not known to count its positions (found values that are not "
        "known; wanted an iota, one repeated by element or as a whole)"
    ]  # fmt: skip


def test_declines_a_constant_table(same, why):
    fn = lambda i: jnp.full((12,), 7).at[known(i, 12)].get(mode="clip")
    assert why(same(fn, ends(12), passes=[NAME], applied={}), NAME) == [
        ["not-affine: the table is not known to count its positions (found the constant 7; "
         "wanted an iota, one repeated by element or as a whole)"]
    ]  # fmt: skip


def test_declines_an_offset_that_is_not_known(same, why):
    fn = lambda i, o: (jnp.arange(12) + known(o, 99)).at[known(i, 12)].get(mode="clip")
    report = same(fn, ends(12), np.int32(5), passes=[NAME], applied={})
    assert [r.split(":")[0] for r in why(report, NAME)[0]] == ["not-affine"]


def test_declines_indices_that_may_be_out_of_bounds(same, why):
    index = np.array([0, 11, 12, -1, -13, 99], np.int32)
    table = lambda: jnp.repeat(jnp.arange(6), 2)
    for lo, hi, bounds in ((None, None, "lo=unknown, hi=unknown"), (0, 12, "lo=0, hi=12"),
                           (-1, 11, "lo=-1, hi=11")):  # fmt: skip

        def fn(i, lo=lo, hi=hi):
            i = i if lo is None else jnp.clip(i, lo, hi)
            return table().at[i].get(mode="fill", wrap_negative_indices=False)

        report = same(fn, index, passes=[NAME], applied={})
        assert why(report, NAME) == [
            [f"out-of-bounds: an index may lie outside the table (found mode FILL_OR_DROP, "
             f"{bounds}; wanted indices known to lie in [0, 11], or clamped to it)"]
        ]  # fmt: skip


def test_declines_a_table_of_floats_or_bools(same, why):
    floats = lambda i: jnp.repeat(jnp.arange(6.0), 2).at[known(i, 12)].get(mode="clip")
    report = same(floats, ends(12), passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["table-dtype: the table holds no integers (found float32; wanted an integer dtype)"]
    ]
    bools = lambda i: jnp.arange(2).astype(bool).at[known(i, 2)].get(mode="clip")
    report = same(bools, ends(2), passes=[NAME], applied={})
    assert not explain(lambda t, i: t[i], np.ones(3), ends(3), passes=[NAME]).sites


def test_declines_a_table_of_two_dimensions_and_slices(same, why):
    rows = lambda i: jnp.arange(12).reshape(6, 2).at[known(i, 6)].get(mode="clip")
    report = same(rows, ends(6), passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["table-rank: the table has more than one dimension, or none "
         "(found (6, 2); wanted one dimension)",
         "slice-size: each index fetches a slice, not one element "
         "(found slice_sizes=(1, 2), offset_dims=(1,); wanted slices of size 1, collapsed)"]
    ]  # fmt: skip

    def windows(i):
        dims = lax.GatherDimensionNumbers((1,), (), (0,))
        return lax.gather(jnp.arange(12), known(i, 6)[:, None], dims, (3,))

    assert why(same(windows, ends(6), passes=[NAME], applied={}), NAME) == [
        ["slice-size: each index fetches a slice, not one element "
         "(found slice_sizes=(3,), offset_dims=(1,); wanted slices of size 1, collapsed)"]
    ]  # fmt: skip


def test_declines_paired_dimensions_batch_dims(same, why):
    def fn(i):
        table = lax.broadcasted_iota(np.int32, (3, 12), 1)
        one = lambda t, i: t.at[known(i, 12)].get(mode="clip")
        return jax.vmap(one)(table, i)

    report = same(fn, np.stack([ends(12)] * 3), passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["table-rank: the table has more than one dimension, or none "
         "(found (3, 12); wanted one dimension)",
         "batch-dims: the gather pairs dimensions of table and indices "
         "(found operand_batching_dims=(0,); wanted none)"]
    ]  # fmt: skip


# --- mutants --------------------------------------------------------------------------------------


def battery(same):
    for form in ("repeat", "tile of a repeat", "falling below zero", "iota from 5 by 3"):
        fn = lambda i, form=form: FORMS[form]()[known(i, 12)]
        same(fn, ends(12))
    small = lambda i: (jnp.arange(256) - 128).astype(np.int8).at[known(i, 256)].get(mode="clip")
    same(small, ends(256, np.uint8))
    fill = lambda i: jnp.arange(12).at[i].get(mode="fill", fill_value=-5)
    same(fill, np.array([0, 12, 99], np.int32))
    same(lambda i, t: t[known(i, 12)], ends(12), np.arange(12, dtype=np.int32)[::-1] ** 2)
    same(lambda i: jnp.tile(jnp.arange(5), 3)[:12][known(i, 12)], ends(12))
    wraps = lambda: (jnp.repeat(jnp.arange(6), 2) * 100).astype(np.int8).astype(np.int32)
    same(lambda i: wraps()[known(i, 12)], ends(12))
    twice = lambda i: plain(jnp.repeat(jnp.arange(100, dtype=np.int8), 2), known(i, 200))
    same(twice, ends(200, np.uint8))


def form_of(**changes):
    def mutate(monkeypatch):
        find = affine_gather.find_stepped

        def changed(scope, atom):
            form = find(scope, atom)
            return form and dataclasses.replace(form, **{n: c(form) for n, c in changes.items()})

        monkeypatch.setattr(affine_gather, "find_stepped", changed)

    return mutate


def without(*codes):
    def mutate(monkeypatch):
        def kept(p):
            left = tuple(r for r in p.requirements if r.code not in codes)
            return dataclasses.replace(p, requirements=left) if p.name == NAME else p

        mutated = tuple(kept(p) for p in registry.all_passes())
        monkeypatch.setattr(registry, "all_passes", lambda: mutated)

    return mutate


MUTANTS = {
    "shifted by one": form_of(offset=lambda f: f.offset + 1),
    "divided by too little": form_of(div=lambda f: max(1, f.div - 1)),
    "a period too long": form_of(mod=lambda f: f.mod * 2),
    "the other direction": form_of(stride=lambda f: -f.stride),
    "bounds not asked for": without("out-of-bounds"),
    "steps that wrap around": lambda m: m.setattr(
        affine_gather, "_work_dtype", lambda match, form: np.dtype(np.int8)
    ),
    "conversions that wrap around": lambda m: m.setattr(
        "relower.matchers.stepped._representable", lambda form, eqn: form
    ),
}


def test_the_battery_passes_unmutated(same):
    battery(same)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError, match="differs in its bits"):
        battery(same)


# --- anything -------------------------------------------------------------------------------------

DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


@st.composite
def tables(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    stride, offset = draw(st.integers(-40, 40)), draw(st.integers(-90, 90))
    reps = draw(st.integers(1, 3))
    table, index = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    return tuple(shape), axis, stride, offset, reps, table, index, draw(st.booleans())


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(tables())
def test_any_table(drawn):
    shape, axis, stride, offset, reps, dtype, index_dtype, late = drawn

    def table():
        count = lax.broadcasted_iota(np.int32, shape, axis)
        if late:
            return jnp.tile(count.reshape(-1).astype(dtype), reps) * dtype(stride % 120)
        return jnp.tile((count * stride + offset).reshape(-1).astype(dtype), reps)

    n = int(np.prod(shape)) * reps
    fn = lambda i: table().at[known(i, n)].get(mode="clip", wrap_negative_indices=False)
    index = ends(n, index_dtype)
    # Op by op: compiling whole programs would take most of the test's time.
    got, want = optimize(fn)(index), fn(index)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
