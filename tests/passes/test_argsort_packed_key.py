"""An argsort of keys in a known range against one packed operand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower import assume_range, explain, optimize
from relower.matchers.fact import Affine, Fact
from relower.passes import argsort_packed_key

NAME = "argsort_packed_key"
ONE = {NAME: 1}


def pairs(lo, hi, dtype=np.int32):
    """Sorted keys and order of keys that lie in [lo, hi]."""

    def fn(k):
        return lax.sort_key_val(assume_range(k, lo, hi), lax.iota(dtype, k.size))

    return fn


def keys_in(lo, hi, dtype, n=37, seed=0):
    """Both ends of the range, what is next to them, and ties."""
    ends = [lo, hi, min(lo + 1, hi), max(hi - 1, lo), (lo + hi) // 2]
    picks = np.random.RandomState(seed).randint(0, len(ends), n)
    return np.array([ends[i] for i in picks], dtype)


def ranges(dtype):
    info = np.iinfo(dtype)
    return [(0, 9), (int(info.min), int(info.min) + 9), (int(info.max) - 9, int(info.max))] + (
        [(-1, 8), (-120, 7)] if info.min else []
    )


NARROW = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


@pytest.mark.parametrize(
    ("dtype", "lo", "hi"), [(d, *r) for d in NARROW for r in ranges(d)], ids=str
)
def test_keys_at_both_ends_of_the_range(same, dtype, lo, hi):
    same(pairs(lo, hi), keys_in(lo, hi, dtype), passes=[NAME], applied=ONE)


@pytest.mark.parametrize(
    ("dtype", "lo", "hi"),
    [(d, *r) for d in (np.int64, np.uint64) for r in ranges(d)]
    + [(np.int64, -(2**40), -(2**40) + 9), (np.int64, 2**40, 2**40 + 2**20)],
    ids=str,
)
def test_keys_of_64_bits_keep_sign_and_high_half(same, x64, dtype, lo, hi):
    same(pairs(lo, hi, np.int64), keys_in(lo, hi, dtype), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_a_narrow_dtype_is_a_range(same, dtype):
    info = np.iinfo(dtype)
    fn = lambda k: lax.sort_key_val(k, lax.iota(np.int32, k.size))
    same(fn, keys_in(int(info.min), int(info.max), dtype), passes=[NAME], applied=ONE)


@pytest.mark.parametrize("constant", [None, True, False])
def test_bool_keys(same, constant):
    mask = np.random.RandomState(0).rand(33) < 0.5

    def fn(m):
        m = m if constant is None else jnp.full_like(m, constant)
        return lax.sort_key_val(m, lax.iota(np.int32, m.size))

    same(fn, mask, passes=[NAME], applied=ONE)


def test_validity_partitions(same):
    mask = np.random.RandomState(0).rand(33) < 0.5
    same(lambda m: jnp.argsort(~m), mask, passes=[NAME], applied=ONE, eager=True)
    same(lambda m: jnp.argsort(jnp.where(m, 0, 1)), mask, passes=[NAME], applied=ONE)
    weak = lambda m: lax.sort_key_val(jnp.where(m, 3, -1), lax.iota(np.int32, m.size))
    report = same(weak, mask, passes=[NAME], applied=ONE)
    assert not report.declined


@pytest.mark.parametrize(("n", "span", "fits"), [
    (8, 2**29 - 1, True), (8, 2**29, False), (9, 2**28 - 1, True), (9, 2**28, False),
    (1, 2**32 - 1, True), (2, 2**31 - 1, True), (2, 2**31, False), (256, 2**24 - 1, True),
])  # fmt: skip
def test_exactly_32_bits_fit_and_33_do_not(same, why, n, span, fits):
    fn = lambda k: lax.sort_key_val(assume_range(k, 0, span), lax.iota(np.int32, k.size))
    report = same(fn, keys_in(0, span, np.uint32, n), passes=[NAME], applied=ONE if fits else {})
    if not fits:
        key, slot = span.bit_length(), (n - 1).bit_length()
        assert why(report, NAME) == [
            ["too-many-bits: key and slot don't fit one word together "
             f"(found {key} + {slot} bits; wanted at most 32)"]
        ]  # fmt: skip


@pytest.mark.parametrize("lo", [-(2**28), -1, 2**30])
def test_32_bits_with_an_offset(same, lo):
    hi = lo + 2**29 - 1
    same(pairs(lo, hi), keys_in(lo, hi, np.int32, 8), passes=[NAME], applied=ONE)
    same(pairs(lo, hi), np.array([hi, lo] * 4, np.int32), passes=[NAME], applied=ONE)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), -1), ((5, 6), 0), ((5, 6), 1), ((3, 4, 5), 0), ((3, 4, 5), 1), ((3, 4, 5), 2),
     ((3, 4), None), ((0,), 0), ((0, 3), 0), ((0, 3), 1), ((3, 0), 1), ((1,), 0), ((3, 1), 1),
     ((1, 3), 1)],
)  # fmt: skip
def test_any_axis_and_length(same, shape, axis):
    keys = np.random.RandomState(1).randint(-1, 3, shape).astype(np.int32)
    fn = lambda k: jnp.argsort(assume_range(k, -1, 2), axis=axis)
    same(fn, keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("axis", [0, 1])
def test_descending(same, eqns_of, axis):
    keys = np.random.RandomState(1).randint(-1, 3, (8, 5)).astype(np.int32)
    fn = lambda k: jnp.argsort(assume_range(k, -1, 2), axis=axis, descending=True)
    same(fn, keys, applied=ONE)
    (sort,) = eqns_of(optimize(fn), keys, name="sort")
    assert len(sort.invars) == 1


PARTITIONS = {
    "not": lambda m: jnp.argsort(~m),
    "logical_not": lambda m: jnp.argsort(jnp.logical_not(m), stable=True),
    "int32": lambda m: jnp.argsort(m.astype(jnp.int32)),
    "int8": lambda m: jnp.argsort(-m.astype(jnp.int8)),
    "descending": lambda m: jnp.argsort(m, descending=True),
    "descending_int32": lambda m: jnp.argsort(m.astype(jnp.int32), descending=True),
    "where": lambda m: jnp.argsort(jnp.where(m, 0, 1)),
    "numbers": lambda m: jnp.argsort(1 - m.astype(jnp.int32)),
    "rows": lambda m: jnp.argsort(~m.reshape(-1, 3), axis=1).reshape(-1),
    "columns": lambda m: jnp.argsort(~m.reshape(3, -1), axis=0).reshape(-1),
    "with_the_sorted_mask": lambda m: lax.sort_key_val(~m, lax.iota(np.int32, m.size))[0],
}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_partition_by_validity(same, eqns_of, name, share):
    mask = np.random.RandomState(0).rand(33) < share
    same(PARTITIONS[name], mask, passes=[NAME], applied=ONE)
    (sort,) = eqns_of(optimize(PARTITIONS[name], passes=[NAME]), mask, name="sort")
    assert len(sort.invars) == 1


def test_partition_is_for_up_to_two_to_the_31_rows(x64):
    def codes(n):
        rows = jax.ShapeDtypeStruct((n,), jnp.bool_)
        (site,) = explain(PARTITIONS["not"], rows, passes=[NAME]).sites
        return [reason.code for reason in site.reasons]

    assert codes(2**31 - 1) == []
    assert codes(2**31) == []
    assert codes(2**31 + 1) == ["too-many-bits"]


NO_PARTITIONS = {
    "not-stable": lambda m: jnp.argsort(~m, stable=False),
    "key-dtype": lambda m: jnp.argsort(m.astype(jnp.float32)),
    "unknown-range": lambda m: jnp.argsort(jnp.where(m, 0, jnp.cumsum(~m) * 2**27)),
    "carries-data": lambda m: lax.sort_key_val(~m, lax.iota(np.int32, m.size) ^ 1)[1],
}


@pytest.mark.parametrize("code", sorted(NO_PARTITIONS))
def test_no_partition(same, why, code):
    mask = np.random.RandomState(0).rand(33) < 0.5
    report = same(NO_PARTITIONS[code], mask, passes=[NAME], applied={})
    assert [r.code for s in report.declined for r in s.reasons] == [code]


def test_pairs_whose_positions_fall_order_ties_the_other_way(same):
    falling = lambda k: lax.sort((assume_range(k, 0, 3), 36 - lax.iota(np.int32, 37)), num_keys=2)
    report = same(falling, keys_in(0, 3, np.int32), passes=[NAME], applied={})
    assert "num-keys" in [r.code for s in report.declined for r in s.reasons]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8, np.int8])
def test_falling_positions_of_a_stable_sort(same, dtype):
    fn = lambda k: lax.sort_key_val(
        assume_range(k, 0, 3), (np.int32(120) - 3 * lax.iota(np.int32, 37)).astype(dtype)
    )
    same(fn, keys_in(0, 3, np.int32), passes=[NAME], applied=ONE)


@pytest.mark.parametrize(("dtype", "n", "factor", "offset"), [
    (np.int32, 20, 1, -9), (np.int32, 20, 3, 7), (np.uint8, 30, 3, 100), (np.int8, 200, 1, -100),
    (np.int32, 20, 2**20, -5),
])  # fmt: skip
def test_positions_with_offset_and_stride(same, dtype, n, factor, offset):
    def fn(k):
        wide = lax.iota(np.int32, n) * factor + offset
        return lax.sort_key_val(assume_range(k, 0, 3), wide.astype(dtype))

    keys = np.random.RandomState(0).randint(0, 4, n).astype(np.int32)
    same(fn, keys, passes=[NAME], applied=ONE)


def test_a_step_that_its_dtype_does_not_hold(same):
    fn = lambda k: lax.sort_key_val(assume_range(k, 0, 3), jnp.array([-100, 100], np.int8))
    same(fn, np.array([1, 0], np.int32), passes=[NAME], applied=ONE)


def test_positions_that_move_along_both_axes(same):
    def fn(k):
        i = lax.broadcasted_iota(np.int32, k.shape, 1)
        i = i * 2 - 100 * lax.broadcasted_iota(np.int32, k.shape, 0) + 7
        return lax.sort((assume_range(k, -1, 3), i), dimension=1, num_keys=1)

    keys = np.random.RandomState(0).randint(-1, 4, (4, 9)).astype(np.int32)
    same(fn, keys, passes=[NAME], applied=ONE)


def test_repeated_positions(same, eqns_of):
    def fn(k):
        i = lax.iota(np.int32, k.size)
        return lax.sort((assume_range(k, 0, 3), i, lax.iota(np.uint32, k.size), i), num_keys=1)

    keys = np.random.RandomState(0).randint(0, 4, 20).astype(np.int32)
    same(fn, keys, passes=[NAME], applied=ONE)
    (sort,) = eqns_of(optimize(fn), keys, name="sort")
    assert len(sort.invars) == 1


def test_positions_that_are_the_keys(same):
    def fn(n):
        i = lax.iota(np.int32, 20)
        return lax.sort_key_val(i, i), n

    same(fn, np.zeros(2), passes=[NAME], applied=ONE)


def test_iota_from_an_outer_scope(same):
    rows = np.random.RandomState(0).randint(0, 4, (4, 9)).astype(np.int32)

    def scanned(rows):
        i = lax.iota(np.int32, 9)
        step = lambda c, row: (c, lax.sort_key_val(row & 3, i))
        return lax.scan(step, 0, rows)[1]

    def called(rows):
        inner = jax.jit(lambda row, i: lax.sort_key_val(row & 3, i))
        return inner(rows[0], lax.iota(np.int32, 9)), inner(rows[1], lax.iota(np.int32, 9))

    same(scanned, rows, passes=[NAME], applied=ONE)
    same(called, rows, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_iota_as_an_input_of_shard_map(same, sharded, check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    vary = lambda i: i if sharded or not check_vma else lax.pcast(i, "d", to="varying")
    local = lambda k, i: lax.sort_key_val(k & 3, vary(i))
    specs = (P("d"), P("d") if sharded else P())
    part = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=check_vma)

    def fn(k):
        return part(k, lax.iota(np.int32, 32 if sharded else 8))

    keys = np.random.RandomState(0).randint(0, 4, 32).astype(np.int32)
    same(fn, keys, passes=[NAME], applied=ONE)


@pytest.mark.parametrize("n_devices", [4, 8])
def test_keys_sharded_along_another_axis_of_an_explicit_mesh(same, n_devices):
    mesh = jax.make_mesh((n_devices,), ("d",), axis_types=(AxisType.Explicit,))
    keys = np.random.RandomState(0).randint(0, 4, (n_devices, 9)).astype(np.int32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(keys, jax.NamedSharding(mesh, P("d")))
        fn = lambda k: jnp.argsort(k & 3, axis=1)
        assert jax.typeof(placed).sharding.spec[0] == "d"
        same(fn, placed, passes=[NAME], applied=ONE)
        assert jax.typeof(jax.jit(optimize(fn))(placed)) == jax.typeof(jax.jit(fn)(placed))


def test_padding_ids_of_minus_one(same):
    def fn(scores, padded):
        ids = jnp.where(padded[:, None], -1, lax.top_k(scores, 2)[1])
        return jnp.argsort(ids.reshape(-1))

    scores = np.random.RandomState(0).rand(12, 6).astype(np.float32)
    padded = np.random.RandomState(1).rand(12) < 0.4
    same(fn, scores, padded, passes=[NAME], applied=ONE, eager=True)


def test_argsort_of_an_argsort(same):
    fn = lambda k: jnp.argsort(jnp.argsort(k & 3))
    keys = np.random.RandomState(0).randint(0, 99, 20).astype(np.int32)
    report = same(fn, keys, passes=[NAME], applied=ONE)
    (site,) = report.applied  # one equation, in the body of jnp.argsort, called from one line
    assert site.calls == 2


@pytest.mark.parametrize("fill", [None, -1, 7])
def test_what_a_gather_in_fill_mode_brings_in(same, why, fill):
    def fn(scores, where):
        ids = lax.top_k(scores, 2)[1].reshape(-1)
        return jnp.argsort(ids.at[where].get(mode="fill", fill_value=fill))

    scores = np.random.RandomState(0).rand(4, 6).astype(np.float32)
    where = np.array([0, 99, 3, -1, 5, -200, 99], np.int32)
    report = same(fn, scores, where, passes=[NAME], applied={} if fill is None else ONE)
    if fill is None:
        assert why(report, NAME) == [
            ["unknown-range: the range of the keys is not known (found lo=unknown, hi=5; "
             "wanted both bounds, from the code or from relower.assume_range)"]
        ]  # fmt: skip


def test_declines_keys_that_are_only_usually_in_range(same, why):
    keys = np.random.RandomState(0).randint(0, 4, 20).astype(np.int32)
    report = same(jnp.argsort, keys, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["unknown-range: the range of the keys is not known (found lo=unknown, hi=unknown; "
         "wanted both bounds, from the code or from relower.assume_range)"]
    ]  # fmt: skip
    half = lambda k: jnp.argsort(jnp.maximum(k, 0))
    report = same(half, keys, passes=[NAME], applied={})
    assert "found lo=0, hi=unknown" in why(report, NAME)[0][0]


def test_declines_a_range_that_arithmetic_may_leave(same):
    keys = np.array([2**31 - 1, 0, 5, -(2**31)], np.int32)
    fn = lambda k: jnp.argsort(jnp.clip(k, 2**31 - 9, 2**31 - 1) + 1)  # wraps around
    same(fn, keys, passes=[NAME], applied={})


def test_declines_float_keys_key_dtype(same, why):
    keys = np.zeros(20, np.float32)
    report = same(jnp.argsort, keys, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["key-dtype: the key is no integer (found float32; wanted an integer or bool key)"]
    ]


def test_declines_carried_data(same, why):
    keys, data = np.zeros(20, np.int32), np.zeros(20, np.float32)
    fn = lambda k, d: lax.sort((k & 3, lax.iota(np.int32, 20), d), num_keys=1)
    report = same(fn, keys, data, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["carries-data: the sort carries more than positions along its axis "
         "(found i32[20], f32[20]; wanted one iota along axis 0)"]
    ]  # fmt: skip


def test_declines_a_lexsort_num_keys(same, why):
    keys = np.zeros(20, np.int32)
    fn = lambda k: jnp.lexsort((k & 3, k & 1))
    (found,) = why(same(fn, keys, passes=[NAME], applied={}), NAME)
    assert found[0] == (
        "num-keys: the sort compares more than one operand "
        "(found num_keys=2; wanted num_keys=1, or unique pairs)"
    )


def test_declines_an_unstable_sort(same, why):
    fn = lambda k: jnp.argsort(k & 3, stable=False)
    report = same(fn, np.zeros(20, np.int32), passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["not-stable: the sort may leave equal keys in any order "
         "(found is_stable=False; wanted is_stable=True, or unique pairs)"]
    ]  # fmt: skip


def test_declines_positions_that_are_an_unknown_input(same, why):
    keys, positions = np.zeros(20, np.int32), np.arange(20, dtype=np.int32)
    fn = lambda k, i: lax.sort_key_val(k & 3, i)
    report = same(fn, keys, positions, passes=[NAME], applied={})
    assert [r.split(":")[0] for r in why(report, NAME)[0]] == ["carries-data"]


def test_a_fact_of_a_whole_array_is_none_of_its_shard(same):
    """A permutation of 0 … 31 bounds every shard's keys by 31, not by its own length."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    part = jax.shard_map(jnp.argsort, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    fn = lambda s: part(jnp.argsort(s))
    scores = np.random.RandomState(0).rand(32).astype(np.float32)
    same(fn, scores, passes=[NAME], applied=ONE)


def test_names_every_unmet_requirement_at_once(why):
    fn = lambda a, b, c: lax.sort((a, b, c), num_keys=2)
    args = [np.zeros(4, np.float32)] * 3
    (found,) = why(explain(fn, *args, passes=[NAME]), NAME)
    assert [r.split(":")[0] for r in found] == ["num-keys", "carries-data", "key-dtype"]


def test_positions_that_span_more_than_their_dtype_holds():
    """No traced program is known to have such positions: facts of the host's constants could."""
    positions = SimpleNamespace(aval=SimpleNamespace(dtype=np.dtype(np.int32)))
    found = SimpleNamespace(order=1, positions=positions, axis=0, length=2)
    fact = Fact(affine=Affine(-(2**31), (2**32 - 1,)))
    match = SimpleNamespace(
        captures={"argsort": found}, scope=SimpleNamespace(fact=lambda atom: fact)
    )
    (check,) = (r.check for r in argsort_packed_key.PASS.requirements if r.code == "wide-positions")
    assert str(check(match)) == (
        "the positions span more than their dtype holds "
        "(found 4294967295 in int32; wanted at most 2147483647)"
    )


def test_a_key_range_of_32_bits_from_below_zero_does_not_fit(why):
    """``key - lo`` would leave int32: what that does is not for StableHLO to say."""
    fn = lambda k: lax.sort_key_val(assume_range(k, -2, 2**31 - 1), lax.iota(np.int32, 1))
    report = explain(fn, np.zeros(1, np.int32), passes=[NAME])
    assert [r.code for s in report.declined for r in s.reasons] == ["too-many-bits"]


@pytest.mark.parametrize("version", ["narrow", "wide"])
def test_no_conversion_leaves_its_dtype(version):
    """StableHLO leaves open what a conversion out of range gives, so none may be out of range."""
    dtype = np.int8 if version == "narrow" else np.int32
    keys = np.arange(-5, 5).astype(dtype)

    def fn(k):
        return lax.sort_key_val(assume_range(k, -5, 4), lax.iota(np.int32, k.size))

    for eqn in jax.make_jaxpr(optimize(fn))(keys).eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == np.uint32:
            assert eqn.invars[0].aval.dtype == np.int32


def test_what_this_pass_gives_back_goes_to_the_next():
    """Declined while substituting, as the order reaches a cond: pairs fit all the same."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def part(k):
        order = jnp.argsort(k & 3)
        return lax.cond(order[0] > 0, lambda o: o * 2, lambda o: o, order)

    fn = jax.shard_map(part, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    report = explain(fn, jnp.arange(32))
    assert report.counts() == {"argsort_unique_pairs": 1}
    assert [(s.pass_name, s.reasons[0].code) for s in report.declined] == [(NAME, "vma-change")]
    assert_equal = np.testing.assert_array_equal
    assert_equal(jax.jit(optimize(fn))(jnp.arange(32)), jax.jit(fn)(jnp.arange(32)))
