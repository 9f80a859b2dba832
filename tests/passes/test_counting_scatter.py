"""Ids counted by a scatter-add against products of one-hot matrices."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import explain, optimize
from relower.passes import counting_scatter, registry
from relower.passes.parts import one_hot

NAME = "counting_scatter"
ONE = {NAME: 1}
IDS = np.random.RandomState(0).randint(-2, 12, 33).astype(np.int32)
MODES = ["drop", "clip", "promise_in_bounds"]


def added(places, dtype=np.int32, each=1, **options):
    return lambda ids: jnp.zeros(places, dtype).at[ids].add(np.array(each, dtype), **options)


WAYS = {
    "bincount": lambda ids: jnp.bincount(ids, length=9),
    "at-add": added(9),
    "segment_sum": lambda ids: jax.ops.segment_sum(jnp.ones_like(ids), ids, 9),
    "padding first": lambda ids: jnp.bincount(ids + 1, length=10),
    "several axes": lambda ids: added(9)(ids.reshape(3, 11)),
    "threes": added(9, each=3),
    "minus one": added(9, each=-1),
    "weak": lambda ids: jnp.full(9, 0).at[ids].add(1),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_count(same, eqns_of, way):
    same(WAYS[way], IDS, passes=[NAME], applied=ONE, eager=True)
    assert not eqns_of(optimize(WAYS[way], passes=[NAME]), IDS, name="scatter-add")


@pytest.mark.parametrize("places", [1, 2, 3, 8, 9, 128, 129, 512, 1000])
def test_numbers_of_experts(same, places):
    r = np.random.RandomState(places)
    ids = r.randint(-1, places + 2, 257).astype(np.int32)
    same(functools.partial(jnp.bincount, length=places), ids, passes=[NAME], applied=ONE)
    same(added(places, wrap_negative_indices=False), ids, passes=[NAME], applied=ONE)


def test_empty_experts_one_expert_and_padding(same):
    for ids in (np.zeros(40), np.full(40, 7), np.full(40, -1), np.full(40, 9), np.arange(40)):
        for way in ("bincount", "padding first"):
            same(WAYS[way], ids.astype(np.int32), passes=[NAME], applied=ONE)


def test_no_ids_and_one():
    for n in (0, 1):
        ids = np.zeros(n, np.int32)
        done = optimize(WAYS["at-add"], contract="bitwise")
        assert done(ids).tolist() == [n] + [0] * 8


EXTREMES = {
    np.int8: [-128, -1, 0, 1, 4, 5, 127],
    np.uint8: [0, 1, 4, 5, 255],
    np.int16: [-(2**15), -1, 0, 4, 5, 2**15 - 1],
    np.int32: [-(2**31), -1, 0, 4, 5, 2**31 - 1],
    np.uint32: [0, 4, 5, 2**31, 2**32 - 1],
}
WIDE = {
    np.int64: [-(2**63), -1, 0, 4, 5, 2**32, 2**32 + 1, 2**63 - 1],
    np.uint64: [0, 4, 5, 2**32, 2**63, 2**64 - 1],
}


def raw(places, mode):
    """A scatter of jax.lax itself, whose indices nobody wraps around."""
    dims = lax.ScatterDimensionNumbers((), (0,), (0,))
    return lambda ids: lax.scatter_add(
        jnp.zeros(places, np.int32), ids[:, None], jnp.ones(ids.shape, np.int32), dims, mode=mode
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_ids_of_any_dtype_in_any_mode(same, dtype, mode):
    ids = np.array(EXTREMES[dtype], dtype)
    same(raw(5, mode), ids, passes=[NAME], applied=ONE)
    same(raw(300, mode), ids, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_ids(same, x64, dtype):
    for mode in MODES:
        same(raw(5, mode), np.array(WIDE[dtype], dtype), passes=[NAME], applied=ONE)
    same(
        functools.partial(jnp.bincount, length=9), IDS.astype(np.int64), passes=[NAME], applied=ONE
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int16])
def test_counts_that_wrap_around(same, dtype):
    ids = np.zeros(300, np.int32)
    same(added(9, dtype), ids, passes=[NAME], applied=ONE)
    same(added(9, dtype, each=100), ids, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_counts_in_floats(same, dtype):
    same(added(9, dtype), IDS, passes=[NAME], applied=ONE)
    same(added(9, dtype, each=3.0), IDS, passes=[NAME], applied=ONE)


# --- transforms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 200])
def test_under_vmap_in_either_order(same, equal_bits, n):
    ids = np.random.RandomState(0).randint(-2, 12, (3, n)).astype(np.int32)
    for way in ("bincount", "at-add"):
        same(jax.vmap(WAYS[way]), ids, passes=[NAME], applied=ONE)
        inside = jax.vmap(optimize(WAYS[way], passes=[NAME]))
        equal_bits(jax.jit(inside)(ids), jax.vmap(WAYS[way])(ids))
    over_columns = jax.vmap(WAYS["bincount"], in_axes=1, out_axes=1)
    same(over_columns, ids.T.copy(), passes=[NAME], applied=ONE)
    twice = jax.vmap(jax.vmap(WAYS["bincount"]))
    same(twice, np.stack([ids, ids[::-1]]), passes=[NAME], applied=ONE)


def weighted(x, ids):
    """Group sizes as a layer reads them."""
    sizes = jnp.bincount(ids, length=9)
    return (x * sizes.astype(x.dtype)).sum() * x[0]


X = np.arange(9, dtype=np.float32)


def test_gradients_in_either_order(equal_bits):
    grad = jax.grad(weighted)
    want = jax.jit(grad)(X, IDS)
    assert np.any(want)
    equal_bits(jax.jit(optimize(grad, passes=[NAME]))(X, IDS), want)
    equal_bits(jax.jit(jax.grad(optimize(weighted, passes=[NAME])))(X, IDS), want)


def test_under_scan_and_remat(same):
    def fn(x, ids):
        step = jax.checkpoint(lambda x, i: (jnp.sin(weighted(x, i)) * x, None))
        return lax.scan(step, x, ids)[0].sum()

    same(jax.grad(fn), X, np.stack([IDS, IDS[::-1]]), passes=[NAME], applied={NAME: 2})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_shard_map(equal_bits, kind, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    fn = jax.shard_map(WAYS["bincount"], mesh=mesh, in_specs=P("d"), out_specs=P("d"),
                       check_vma=check_vma)  # fmt: skip
    with jax.set_mesh(mesh):
        ids = jax.device_put(np.tile(IDS, 4), jax.NamedSharding(mesh, P("d")))
        assert explain(fn, ids, passes=[NAME]).counts() == ONE
        equal_bits(jax.jit(optimize(fn, passes=[NAME]))(ids), jax.jit(fn)(ids))


# --- near misses ----------------------------------------------------------------------------------


def codes(report):
    return [[r.code for r in s.reasons] for s in report.declined if s.pass_name == NAME]


def test_declines_counts_added_to_something(same):
    total = np.arange(9, dtype=np.int32)
    fn = lambda total, ids: total.at[ids].add(1)
    assert codes(same(fn, total, IDS, passes=[NAME], applied={})) == [["not-zeros"]]
    below = lambda ids: jnp.full(9, -0.0).at[ids].add(1.0)
    assert codes(same(below, IDS, passes=[NAME], applied={})) == [["not-zeros"]]


def test_declines_counting_down_in_floats(same):
    """No ids there: the scatter leaves +0, and a product with a negative number would be -0."""
    fn = added(9, np.float32, each=-1.0)
    assert codes(same(fn, IDS, passes=[NAME], applied={})) == [["negative"]]
    same(added(9, np.int32, each=-1), IDS, passes=[NAME], applied=ONE)


def test_declines_counts_that_may_not_be_exact(same):
    """A bfloat16 count stops at 256; a half three times sums exactly, but is not looked into."""
    many = np.zeros(300, np.int32)
    for fn in (added(9, jnp.bfloat16), added(9, np.float32, each=0.1), added(9, np.float16, 8.0)):
        assert codes(same(fn, many, passes=[NAME], applied={})) == [["inexact"]]
    assert jax.jit(added(9, jnp.bfloat16))(many)[0] == 256
    ids = jax.ShapeDtypeStruct((2**24 + 1,), np.int32)
    assert codes(explain(added(9), ids, passes=[NAME])) == [["inexact"]]
    ids = jax.ShapeDtypeStruct((2**24,), np.int32)
    assert explain(added(9), ids, passes=[NAME]).counts() == ONE


def test_declines_slices_and_index_vectors(same):
    rows = lambda ids: jnp.zeros((9, 2), np.int32).at[ids].add(1)
    pairs = lambda ids: jnp.zeros((9, 9), np.int32).at[ids, ids].add(1)
    for fn in (rows, pairs):
        assert codes(same(fn, IDS, passes=[NAME], applied={})) == [["layout"]]


def test_declines_where_there_are_too_many_places(same):
    assert codes(same(added(2**18 + 1), IDS, passes=[NAME], applied={})) == [["too-many-places"]]
    same(added(2**18), IDS, passes=[NAME], applied=ONE)
    few = IDS.reshape(3, 11)
    assert codes(same(jax.vmap(added(4097)), few, passes=[NAME], applied={})) == [
        ["too-many-places"]
    ]


def test_other_scatters_are_no_candidates():
    def fn(ids, x):
        zeros = jnp.zeros(9)
        return zeros.at[ids].add(x), zeros.at[ids].set(1), zeros.at[ids].max(1)

    assert not explain(fn, IDS, IDS.astype(np.float32), passes=[NAME]).sites


# --- mutants --------------------------------------------------------------------------------------


def battery(same):
    for way in WAYS:
        same(WAYS[way], IDS, passes=[NAME])
    for mode in MODES:
        same(raw(9, mode), IDS, passes=[NAME])
        same(raw(300, mode), np.array(EXTREMES[np.int8], np.int8), passes=[NAME])
    same(jax.vmap(WAYS["at-add"]), IDS.reshape(3, 11), passes=[NAME])
    same(lambda ids: jnp.arange(9).at[ids].add(1), IDS)
    same(added(9, jnp.bfloat16), np.zeros(300, np.int32))


def without(code):
    kept = tuple(r for r in counting_scatter.PASS.requirements if r.code != code)

    def mutate(monkeypatch):
        mutated = tuple(
            dataclasses.replace(p, requirements=kept) if p.name == NAME else p
            for p in registry.all_passes()
        )
        monkeypatch.setattr(registry, "all_passes", lambda: mutated)

    return mutate


def instead(module, name, change):
    original = getattr(module, name)
    return lambda m: m.setattr(module, name, lambda *a: change(original, *a))


MUTANTS = {
    "an id shifted by one": instead(one_hot, "by_digits", lambda f, i, p: f(i + 1, p)),
    "what lies outside counted": instead(
        counting_scatter, "counts", lambda f, i, p, clip: f(i, p, True)
    ),
    "clipping lost": instead(counting_scatter, "counts", lambda f, i, p, clip: f(i, p, False)),
    "narrow ids left narrow": instead(one_hot, "at_least_32_bits", lambda f, i: i),
    "digits swapped": instead(one_hot, "by_digits", lambda f, i, p: f(i, p)[::-1]),
    "one place too few": instead(
        one_hot, "by_comparison", lambda f, i, p: f(i, p).at[..., -1].set(0)
    ),
    "what it is added to lost": without("not-zeros"),
    "a sum that isn't exact": without("inexact"),
}


def test_the_battery_passes_unmutated(same):
    battery(same)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, same, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, OverflowError), match=r"differs in its bits|out of bounds"):
        battery(same)


# --- anything -------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([*EXTREMES]))
    info = np.iinfo(dtype)
    places, n = draw(st.sampled_from([(1, 1), (7, 12), (40, 5)]))  # each is compiled
    near = st.integers(max(-3, int(info.min)), min(places + 3, int(info.max)))
    ids = st.one_of(near, st.integers(int(info.min), int(info.max)))
    drawn = draw(st.lists(ids, min_size=n, max_size=n))
    return np.array(drawn, dtype), places, draw(st.sampled_from(MODES)), draw(st.booleans())


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(cases())
def test_any_ids(drawn):
    ids, places, mode, rows = drawn
    fn = raw(places, mode)
    fn, ids = (jax.vmap(fn), np.stack([ids, ids[::-1]])) if rows else (fn, ids)
    # Op by op: compiling whole programs would take most of the test's time.
    np.testing.assert_array_equal(optimize(fn, passes=[NAME])(ids), fn(ids))
