"""A stable sort by one key against the unstable sort of unique pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import assume_range, explain, optimize

NAME = "argsort_unique_pairs"
ONE = {NAME: 1}
SPECIALS = {
    np.float32: (np.uint32, [0x7FC00000, 0xFFC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0, 1 << 31,
                             0x7F800000, 0xFF800000, 1, 0x80000001, 0x007FFFFF, 0x3F800000]),
    np.float16: (np.uint16, [0x7E00, 0xFE00, 0x7E01, 0xFFFF, 0x7C01, 0, 0x8000, 0x7C00, 0xFC00, 1,
                             0x8001, 0x3C00]),
    jnp.bfloat16: (np.uint16, [0x7FC0, 0xFFC0, 0x7FC1, 0xFFFF, 0x7F81, 0, 0x8000, 0x7F80, 0xFF80, 1,
                               0x8001, 0x3F80]),
}  # fmt: skip


def specials(dtype, n=47, seed=0):
    """Every special value of a float dtype many times, in random order."""
    word, patterns = SPECIALS[dtype]
    chosen = np.random.RandomState(seed).permutation(np.resize(patterns, n))
    return np.asarray(chosen, word).view(dtype)


def ties(dtype, shape, seed=0):
    """Few distinct values, the dtype's limits among them."""
    r = np.random.RandomState(seed)
    if dtype == np.bool_:
        return r.rand(*shape) < 0.5
    info = np.iinfo(dtype)
    return r.choice(np.array([info.min, info.max, 0, 1, info.max - 1], dtype), shape)


@pytest.mark.parametrize("dtype", list(SPECIALS), ids=lambda d: np.dtype(d).name)
def test_nan_payloads_and_signed_zeros_keep_their_order(same, dtype):
    keys = specials(dtype)
    same(jnp.argsort, keys, passes=[NAME], applied=ONE, eager=True)
    # Not only as jax sorts: the comparator takes NaNs, and zeros, for equal, so that their
    # positions decide.
    with np.errstate(invalid="ignore"):
        wide = keys.astype(np.float64) + 0.0
    canonical = np.where(np.isnan(wide), np.nan, wide)
    # XLA's CPU comparator flushes the subnormals of these two to zero, in plain and optimized.
    if dtype != np.float16:
        canonical[np.abs(canonical) < float(jnp.finfo(dtype).tiny)] = 0
    want = np.argsort(canonical, kind="stable")
    np.testing.assert_array_equal(jax.jit(optimize(jnp.argsort))(keys), want)


@pytest.mark.parametrize("dtype", list(SPECIALS), ids=lambda d: np.dtype(d).name)
def test_sorted_keys_keep_their_bits(same, dtype):
    def fn(k):
        return lax.sort_key_val(k, lax.iota(np.int32, k.size))

    same(fn, specials(dtype), passes=[NAME], applied=ONE)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.bool_]
)
def test_integer_and_bool_keys(same, dtype):
    def fn(k):
        return lax.sort_key_val(k, lax.iota(np.int32, k.size))

    same(fn, ties(dtype, (37,)), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex128])
def test_wide_keys_and_positions(same, x64, dtype):
    if np.issubdtype(dtype, np.integer):
        keys = ties(dtype, (37,))
    else:
        with np.errstate(invalid="ignore"):
            keys = specials(np.float32).astype(np.float64).astype(dtype)

    def fn(k):
        order = jnp.argsort(k)
        assert order.dtype == np.int64
        return order

    same(fn, keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), -1), ((5, 6), 0), ((5, 6), 1), ((3, 4, 5), 0), ((3, 4, 5), 1), ((3, 4, 5), 2),
     ((3, 4), None), ((0,), 0), ((0, 3), 0), ((0, 3), 1), ((3, 0), 1), ((1,), 0), ((3, 1), 1),
     ((1, 3), 1)],
)  # fmt: skip
def test_any_axis_and_length(same, shape, axis):
    keys = np.random.RandomState(1).randint(0, 3, shape).astype(np.float32)
    same(lambda k: jnp.argsort(k, axis=axis), keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("axis", [0, 1])
def test_descending_keeps_the_first_of_equal_keys_first(same, axis):
    keys = specials(np.float32, 40).reshape(8, 5)

    def fn(k):
        return jnp.argsort(k, axis=axis, descending=True)

    same(fn, keys, passes=[NAME], applied=ONE)


def test_positions_that_fall(same):
    def fn(k):
        return lax.sort_key_val(k, lax.rev(lax.iota(np.int32, k.size), (0,)))

    keys = ties(np.int32, (20,))
    same(fn, keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize(("factor", "offset"), [(1, -9), (3, 7), (-1, 19), (-2, 5)])
def test_positions_with_offset_and_stride(same, factor, offset):
    def fn(k):
        positions = lax.iota(np.int32, k.size) * factor + offset
        return lax.sort_key_val(k, positions)

    same(fn, ties(np.int32, (20,)), passes=[NAME], applied=ONE)


def test_repeated_positions_are_sorted_once(same, eqns_of):
    def fn(k):
        i = lax.iota(np.int32, k.size)
        return lax.sort((k, i, lax.iota(np.int32, k.size), i), num_keys=1)

    keys = specials(np.float32)
    same(fn, keys, passes=[NAME], applied=ONE)
    (sort,) = eqns_of(optimize(fn), keys, name="sort")
    assert len(sort.invars) == 2
    assert sort.params["num_keys"] == 2
    assert not sort.params["is_stable"]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_data_goes_along_wherever_the_positions_stand(same, order):
    def fn(k, a, b):
        operands = [k, a, b]
        operands.insert(order, lax.iota(np.int32, k.size))
        return lax.sort(operands, num_keys=1)

    keys = specials(np.float32)
    data = np.random.RandomState(2).rand(2, keys.size).astype(np.float32)
    same(fn, keys, *data, passes=[NAME], applied=ONE)


def test_differentiated_sort_with_three_operands(same, eqns_of):
    def fn(k):
        return jax.grad(lambda x: (jnp.sort(x) * jnp.arange(1.0, 48.0)).sum())(k)

    keys = np.random.RandomState(0).randint(0, 4, 47).astype(np.float32)
    same(fn, keys, passes=[NAME], applied=ONE)
    assert np.any(jax.jit(optimize(fn))(keys))

    def tangent(k):
        pair = lambda x: lax.sort_key_val(x, lax.iota(np.int32, x.size))
        return jax.jvp(pair, (k,), (k,))[1][0]

    (sort,) = eqns_of(tangent, keys, name="sort")
    assert len(sort.invars) == 3
    same(tangent, keys, passes=[NAME], applied=ONE)
    (sort,) = eqns_of(optimize(tangent), keys, name="sort")
    assert len(sort.invars) == 2


def test_iota_from_an_outer_scope(same):
    keys = ties(np.int32, (4, 9))

    def scanned(rows):
        i = lax.iota(np.int32, 9)
        step = lambda c, row: (c, lax.sort_key_val(row, i)[1])
        return lax.scan(step, 0, rows)[1]

    def called(rows):
        inner = jax.jit(lambda row, i: lax.sort_key_val(row, i))
        return inner(rows[0], lax.iota(np.int32, 9))

    same(scanned, keys, passes=[NAME], applied=ONE)
    same(called, keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("sharded", [False, True])
def test_iota_as_an_input_of_shard_map(same, sharded):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    spec = P("d") if sharded else P()
    local = lambda k, i: lax.sort_key_val(k, i)[1]
    part = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), spec), out_specs=P("d"),
                         check_vma=False)  # fmt: skip

    def fn(k):
        return part(k, lax.iota(np.int32, 32 if sharded else 8))

    same(fn, ties(np.int32, (32,)), passes=[NAME], applied=ONE)


def test_weak_keys(same):
    fn = lambda m: lax.sort_key_val(jnp.where(m, 0, 1), lax.iota(np.int32, m.size))
    same(fn, ties(np.bool_, (20,)), passes=[NAME], applied=ONE)


def test_argsort_of_an_argsort(same):
    fn = lambda k: jnp.argsort(jnp.argsort(k))
    same(fn, specials(np.float32), passes=[NAME], applied={NAME: 2}, eager=True)


def test_declines_a_lexsort_num_keys(same, why):
    keys = ties(np.int32, (20,))
    report = same(lambda k: jnp.lexsort((k, -k)), keys, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["num-keys: the sort compares more than one operand (found num_keys=2; wanted num_keys=1)"]
    ]


def test_declines_where_no_operand_is_monotone_no_positions(same, why):
    keys, data = ties(np.int32, (20,)), np.zeros(20, np.float32)
    report = same(lambda k, d: lax.sort_key_val(k, d), keys, data, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["no-positions: no operand is known to rise or fall along the sort axis "
         "(found f32[20]; wanted an iota along axis 0)"]
    ]  # fmt: skip


def test_declines_positions_that_move_along_another_axis(same, why):
    def fn(k):
        i = lax.broadcasted_iota(np.int32, k.shape, 0)
        return lax.sort((k, i), dimension=1, num_keys=1)

    report = same(fn, ties(np.int32, (4, 5)), passes=[NAME], applied={})
    assert [[r.split(":")[0] for r in site] for site in why(report, NAME)] == [["no-positions"]]


def test_declines_positions_that_come_in_unknown(same, why):
    keys = ties(np.int32, (20,))
    positions = np.arange(20, dtype=np.int32)
    report = same(lambda k, i: lax.sort_key_val(k, i), keys, positions, passes=[NAME], applied={})
    assert [[r.split(":")[0] for r in site] for site in why(report, NAME)] == [["no-positions"]]


def test_declines_repeated_positions_no_tie_break(same):
    def fn(k):  # 0 0 1 1 2 2 …: not strictly increasing
        return lax.sort_key_val(k, lax.iota(np.int32, k.size) // 2)

    same(fn, ties(np.int32, (20,)), passes=[NAME], applied={})


@pytest.mark.parametrize(("dtype", "name"), [(np.uint32, "uint32"), (np.int32, "int32")])
def test_declines_falling_positions_that_may_not_be_negated(same, why, dtype, name):
    least = np.iinfo(dtype).min

    def fn(k):  # falls to the dtype's least value
        return lax.sort_key_val(k, lax.rev(lax.iota(dtype, 20), (0,)) + dtype(least))

    report = same(fn, ties(np.int32, (20,)), passes=[NAME], applied={})
    assert why(report, NAME) == [
        [f"falling-positions: positions that fall along the axis can't be negated safely "
         f"(found {name}; wanted a signed dtype and a lower bound above its least value)"]
    ]  # fmt: skip


def test_declines_an_unstable_sort(same, why):
    fn = lambda k: jnp.argsort(k, stable=False)
    report = same(fn, ties(np.int32, (20,)), passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["not-stable: the sort may leave equal keys in any order "
         "(found is_stable=False; wanted is_stable=True)"]
    ]  # fmt: skip


def test_names_every_unmet_requirement_at_once(why):
    fn = lambda a, b, c: lax.sort((a, b, c), num_keys=2)
    args = [np.zeros(4, np.float32)] * 3
    (found,) = why(explain(fn, *args, passes=[NAME]), NAME)
    assert [r.split(":")[0] for r in found] == ["num-keys", "no-positions"]


def test_a_sort_without_companions_is_no_candidate():
    assert not explain(jnp.sort, np.zeros(4, np.float32), passes=[NAME]).sites


def test_positions_of_two_calls_of_one_function_are_not_one_value(same):
    """Both rise, and both come out of one body: what tells them apart is the call."""
    shifted = jax.jit(lambda by: lax.iota(np.int32, 6) + by)

    def fn(k, a, b):
        a, b = (shifted(assume_range(v, 0, 99)) for v in (a, b))
        return lax.sort((k, a, b), num_keys=1)

    same(fn, np.array([3, 1, 3, 1, 2, 0], np.int32), np.int32(7), np.int32(40))
