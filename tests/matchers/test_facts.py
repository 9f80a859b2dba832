"""What is known after each family of operations, and what must not be claimed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from relower.compat import jaxprs
from relower.matchers.fact import UNKNOWN, Affine, Constant, Fact
from relower.matchers.facts import Analysis

X = jnp.zeros((4, 6), jnp.int32)
ROW = jnp.zeros(6, jnp.int32)
I = lax.iota  # noqa: E741


def outputs(fn, *args):
    return Analysis().enter(jax.make_jaxpr(fn)(*args)).outputs


def fact(fn, *args):
    found = outputs(fn, *args)
    assert len(found) == 1
    return found[0]


def bounds(fn, *args):
    found = fact(fn, *args)
    return found.lo, found.hi


def ids(x):
    """Values known to lie in [0, 7]."""
    return x & 7


def floats(x):
    return x.astype(jnp.float32)


def onehot(x):
    return jax.nn.one_hot(x.reshape(-1), 6, dtype=jnp.float32)


RANGES = {
    "mask": (lambda x: x & 7, (0, 7)),
    "add": (lambda x: ids(x) + 3, (3, 10)),
    "sub": (lambda x: 3 - ids(x), (-4, 3)),
    "mul": (lambda x: ids(x) * -2, (-14, 0)),
    "neg": (lambda x: -ids(x), (-7, 0)),
    "abs": (lambda x: abs(ids(x) - 3), (0, 4)),
    "div": (lambda x: lax.div(ids(x) - 4, 2), (-2, 1)),
    "floor_divide": (lambda x: ids(x) // 2, (0, 3)),
    "floor_divide_negative": (lambda x: (ids(x) - 4) // 3, (-2, 1)),
    "floor_divide_by_array": (lambda x: ids(x) // (ids(x) + 2), (0, 3)),
    "rem": (lambda x: lax.rem(x, 5), (-4, 4)),
    "rem_of_nonnegative": (lambda x: lax.rem(ids(x), 5), (0, 4)),
    "mod": (lambda x: ids(x) % 5, (0, 4)),
    "sign": (lambda x: lax.sign(ids(x)), (0, 1)),
    "square": (lambda x: lax.square(ids(x) - 4), (0, 16)),
    "cube": (lambda x: lax.integer_pow(ids(x) - 4, 3), (-64, 27)),
    "max": (lambda x: jnp.maximum(x, 3), (3, None)),
    "clip": (lambda x: jnp.clip(x, -1, 5), (-1, 5)),
    "clamp": (lambda x: lax.clamp(2, x, 5), (2, 5)),
    "or": (lambda x: ids(x) | 16, (16, 31)),
    "xor": (lambda x: ids(x) ^ 8, (0, 15)),
    "not": (lambda x: ~ids(x), (-8, -1)),
    "shift_left": (lambda x: ids(x) << 2, (0, 28)),
    "shift_right": (lambda x: (ids(x) - 4) >> 1, (-2, 1)),
    "shift_right_logical": (lambda x: lax.shift_right_logical(x, 28), (0, 15)),
    "population_count": (lambda x: lax.population_count(x), (0, 32)),
    "compare": (lambda x: (x > 3).astype(jnp.int32), (0, 1)),
    "where": (lambda x: jnp.where(x > 3, ids(x), -1), (-1, 7)),
    "wrapped_index": (lambda x: jnp.where(ids(x) < 0, ids(x) + 8, ids(x)), (0, 7)),
    "narrow": (lambda x: ids(x).astype(jnp.int8), (0, 7)),
    "widen_unsigned": (lambda x: x.astype(jnp.uint8).astype(jnp.int32), (0, 255)),
    "bitcast": (lambda x: lax.bitcast_convert_type(ids(x), jnp.uint32), (0, 7)),
    "shapes": (lambda x: ids(x).T.reshape(3, 8)[:, None, ::2], (0, 7)),
    "concatenate": (lambda x: jnp.concatenate([ids(x), ids(x) - 2]), (-2, 7)),
    "stack": (lambda x: jnp.stack([ids(x), ids(x) + 2]), (0, 9)),
    "pad": (lambda x: jnp.pad(ids(x), 1, constant_values=-1), (-1, 7)),
    "pad_none": (lambda x: lax.pad(ids(x), -1, ((0, 0, 0), (-1, 0, 0))), (0, 7)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(ids(x), (x[0, 0], 0), (2, 2)), (0, 7)),
    "update": (lambda x: ids(x).at[0].set(9), (0, 9)),
    "gather_clip": (lambda x: ids(x).at[x[0]].get(mode="clip"), (0, 7)),
    "gather_promised": (lambda x: ids(x).at[x[0]].get(mode="promise_in_bounds"), (0, 7)),
    "gather_fill_in_bounds": (lambda x: jnp.take(ids(x)[0], ids(x) % 6, mode="fill"), (0, 7)),
    "gather_fill_value": (
        lambda x: ids(x).at[x[0]].get(mode="fill", fill_value=-1),
        (-1, 7),
    ),
    "scatter": (lambda x: ids(x).at[x[0]].set(9), (0, 9)),
    "bincount": (lambda x: jnp.bincount(x.reshape(-1), length=5), (0, 24)),
    "sort": (lambda x: jnp.sort(ids(x)), (0, 7)),
    "top_k": (lambda x: lax.top_k(x, 2)[1], (0, 5)),
    "argmax": (lambda x: jnp.argmax(x, axis=0), (0, 3)),
    "reduce_sum": (lambda x: ids(x).sum(), (0, 168)),
    "reduce_max": (lambda x: ids(x).max(axis=0), (0, 7)),
    "cumsum": (lambda x: lax.cumsum(ids(x) - 1, axis=1), (-6, 36)),
    "cummax": (lambda x: lax.cummax(ids(x), axis=1), (0, 7)),
    "one_hot": (lambda x: jax.nn.one_hot(x, 5, dtype=jnp.int32), (0, 1)),
    "float": (lambda x: ids(x).astype(jnp.float32), (0, 7)),
    "through_float32": (lambda x: (x & (2**24 - 1)).astype(jnp.float32).astype(jnp.int32),
                        (0, 2**24 - 1)),
    "through_bfloat16": (lambda x: (x & 255).astype(jnp.bfloat16).astype(jnp.int32), (0, 255)),
    "through_two_floats": (lambda x: floats(ids(x)).astype(jnp.float16).astype(jnp.int8), (0, 7)),
    "float_arithmetic": (lambda x: ((floats(ids(x)) * 3 - 1) - floats(ids(x))).astype(jnp.int32),
                         (-8, 20)),
    "float_bounds": (lambda x: jnp.maximum(jnp.minimum(-abs(floats(ids(x))), 5), -3), (-3, 0)),
    "float_clip": (lambda x: lax.clamp(2.0, floats(ids(x)), 5.0).astype(jnp.int32), (2, 5)),
    "float_where": (lambda x: jnp.where(x > 3, floats(ids(x)), -1.0).astype(jnp.int32), (-1, 7)),
    "float_pad": (lambda x: jnp.pad(floats(ids(x)), 1, constant_values=-1.0), (-1, 7)),
    "float_count": (lambda x: (x > 0).astype(jnp.float32).sum(0).astype(jnp.int32), (0, 4)),
    "float_cumsum": (lambda x: jnp.cumsum(onehot(x), axis=0).astype(jnp.int32), (0, 24)),
    "float_bincount": (lambda x: jnp.zeros(9).at[x[0]].add(1.0).astype(jnp.int32), (0, 6)),
    "float_iota": (lambda x: (lax.iota(jnp.float32, 9) + floats(ids(x[0, 0]))), (0, 15)),
    "matmul_with_a_one_hot": (lambda x: (onehot(x) @ jnp.arange(6.0)).astype(jnp.int32), (0, 30)),
    "integer_matmul": (lambda x: onehot(x).astype(jnp.int32) @ jnp.arange(6), (0, 30)),
    "searchsorted": (lambda x: jnp.searchsorted(jnp.arange(9), x[0]), (0, 9)),
    "digitize": (lambda x: jnp.digitize(x[0], jnp.arange(0, 40, 5)), (0, 8)),
    "approx_max_k": (lambda x: lax.approx_max_k(floats(x), 2)[1], (-1, 5)),
    "barrier": (lambda x: lax.optimization_barrier(ids(x)), (0, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RANGES))
def test_range(name):
    fn, wanted = RANGES[name]
    assert bounds(fn, X) == wanted


NOT_CLAIMED = {
    "add_may_wrap": (lambda x: jnp.maximum(x, 0) + 1, (None, None)),
    "mul_may_wrap": (lambda x: ids(x) * 2**30, (None, None)),
    "neg_of_the_least": (lambda x: -x, (None, None)),
    "abs_of_the_least": (lambda x: lax.abs(x), (None, None)),
    "unsigned_sub_wraps": (lambda x: ids(x).astype(jnp.uint32) - 1, (0, None)),
    "narrowing_wraps": (lambda x: (x & 255).astype(jnp.int8), (None, None)),
    "sign_is_lost": (lambda x: (ids(x) - 1).astype(jnp.uint32), (0, None)),
    "division_by_zero": (lambda x: lax.div(ids(x), ids(x)), (None, None)),
    "least_by_minus_one": (lambda x: lax.div(x, ids(x) - 8), (None, None)),
    "remainder_by_zero": (lambda x: lax.rem(ids(x), ids(x)), (None, None)),
    "and_of_negatives": (lambda x: x & -8, (None, None)),
    "or_of_negatives": (lambda x: x | 1, (None, None)),
    "shift_out_of_range": (lambda x: ids(x) >> (ids(x) * 8), (None, None)),
    "shift_by_unknown": (lambda x: lax.shift_right_logical(ids(x), x), (None, None)),
    "gather_fills_with_the_least": (lambda x: jnp.take(ids(x)[0], x), (None, 7)),
    "gather_fills_above": (lambda x: ids(x).astype(jnp.uint8).at[x[0]].get(mode="fill"), (0, None)),
    "sum_may_wrap": (lambda x: (x & (2**29)).sum(), (None, None)),
    "float_rounds": (lambda x: (x & (2**25 - 1)).astype(jnp.float32), (None, None)),
    "bfloat16_rounds": (lambda x: (x & 511).astype(jnp.bfloat16), (None, None)),
    "float16_rounds": (lambda x: (x & 4095).astype(jnp.float16).astype(jnp.int32), (None, None)),
    "float8_is_not_known": (lambda x: ids(x).astype(jnp.float8_e4m3fn), (None, None)),
    "unknown_float": (lambda x: jnp.floor(x * 0.5).astype(jnp.int32), (None, None)),
    "half_of_a_float": (lambda x: (floats(x) * 0.5).astype(jnp.int32), (None, None)),
    "quotient_of_floats": (lambda x: (floats(x) / 2.0).astype(jnp.int32), (None, None)),
    "float_sum_may_round": (lambda x: floats(x & (2**21 - 1)).sum(), (None, None)),
    "float_sum_of_both_signs_may_round": (
        lambda x: (floats(x & (2**22 - 1)) - 2.0**21).sum(),
        (None, None),
    ),
    "bfloat16_count_may_round": (
        lambda x: jnp.ones((300, 6), jnp.bfloat16).cumsum(0) + x[:1].astype(jnp.bfloat16) * 0,
        (None, None),
    ),
    "matmul_of_more_than_8_bits": (lambda x: onehot(x) @ (jnp.arange(6.0) * 60), (None, None)),
    "float_leaves_the_integer": (lambda x: floats(x & 511).astype(jnp.int8), (None, None)),
    "float_gather_fills_with_nan": (
        lambda x: jnp.take(floats(ids(x))[0], x, mode="fill"),
        (None, None),
    ),
    "product_may_wrap": (lambda x: ids(x).prod(), (None, None)),
}


@pytest.mark.parametrize("name", sorted(NOT_CLAIMED))
def test_range_not_claimed(name):
    fn, wanted = NOT_CLAIMED[name]
    assert bounds(fn, X) == wanted


AFFINE = {
    "iota": (lambda x: jnp.arange(6), Affine(0, (1,))),
    "scaled": (lambda x: jnp.arange(6) * 3 - 1, Affine(-1, (3,))),
    "reversed": (lambda x: jnp.arange(6)[::-1], Affine(5, (-1,))),
    "sliced": (lambda x: jnp.arange(6)[1::2], Affine(1, (2,))),
    "flat_index": (lambda x: I(jnp.int32, 2)[:, None] * 3 + I(jnp.int32, 3), Affine(0, (3, 1))),
    "flattened": (lambda x: jnp.arange(6).reshape(2, 3).reshape(6), Affine(0, (1,))),
    "split": (lambda x: jnp.arange(6).reshape(2, 3), Affine(0, (3, 1))),
    "transposed": (lambda x: jnp.arange(6).reshape(2, 3).T, Affine(0, (1, 3))),
    "unknown_offset": (lambda x: jnp.arange(6) + ids(x)[0, 0], Affine(None, (1,))),
    "window": (lambda x: lax.dynamic_slice(jnp.arange(6), (x[0, 0],), (3,)), Affine(None, (1,))),
    "stacked": (lambda x: jnp.stack([jnp.arange(6)] * 2), Affine(0, (0, 1))),
    "count": (lambda x: lax.cumsum(jnp.ones(6, jnp.int32)), Affine(1, (1,))),
    "sorted_permutation": (lambda x: jnp.sort(jnp.argsort(x[0])), Affine(0, (1,))),
}


@pytest.mark.parametrize("name", sorted(AFFINE))
def test_affine(name):
    fn, wanted = AFFINE[name]
    assert fact(fn, X).affine == wanted


NOT_AFFINE = {
    "tiled": lambda x: jnp.tile(jnp.arange(3), 2),
    "repeated": lambda x: jnp.repeat(jnp.arange(3), 2),
    "two_starts": lambda x: jnp.concatenate([jnp.arange(3), jnp.arange(3)]),
    "wraps": lambda x: jnp.arange(6, dtype=jnp.int8) * 50,
    "too_long": lambda x: lax.iota(jnp.int8, 200),
    "sorted": lambda x: jnp.sort(jnp.arange(6) + x[0]),
    "offset_may_wrap": lambda x: jnp.arange(6) + x[0, 0],
    "per_element_choice": lambda x: jnp.where(x[0] > 0, jnp.arange(6), jnp.arange(6) + 1),
    "merged_with_a_broadcast": lambda x: jnp.broadcast_to(jnp.arange(3)[:, None], (3, 2)).reshape(
        6
    ),
}


@pytest.mark.parametrize("name", sorted(NOT_AFFINE))
def test_affine_not_claimed(name):
    assert fact(NOT_AFFINE[name], X).affine is None


PERMUTATIONS = {
    "argsort": (lambda x: jnp.argsort(x, axis=1), 1),
    "argsort_rows": (lambda x: jnp.argsort(x, axis=0), 0),
    "inverse": (lambda x: jnp.argsort(jnp.argsort(x)), 1),
    "two_keys": (
        lambda x: lax.sort((x, x, lax.broadcasted_iota(jnp.int32, (4, 6), 1)), num_keys=2)[2],
        1,
    ),
    "float_keys": (lambda x: jnp.argsort(x.astype(jnp.float32)), 1),
    "descending": (lambda x: jnp.argsort(x, descending=True), 1),
    "reversed": (lambda x: jnp.flip(jnp.argsort(x), axis=0), 1),
    "mirrored": (lambda x: 5 - jnp.argsort(x), 1),
    "transposed": (lambda x: jnp.argsort(x).T, 0),
    "expanded": (lambda x: jnp.argsort(x)[:, None, :, None], 2),
    "squeezed": (lambda x: jnp.argsort(x[:1])[0], 0),
    "converted": (lambda x: jnp.argsort(x).astype(jnp.uint8), 1),
    "rows": (lambda x: jnp.argsort(x)[1:3], 1),
    "stacked": (lambda x: jnp.stack([jnp.argsort(x), jnp.argsort(-x)]), 2),
    "top_k_of_all": (lambda x: lax.top_k(x, 6)[1], 1),
    "scattered_iota": (
        lambda x: jnp.zeros(6, jnp.int32).at[jnp.argsort(x[0])].set(jnp.arange(6)),
        0,
    ),
    "iota_of_another_axis": (
        lambda x: lax.sort((x, lax.broadcasted_iota(jnp.int32, (4, 6), 0)), 1, num_keys=1)[1],
        0,
    ),
    "composed": (lambda x: jnp.argsort(x[0])[jnp.argsort(x[1])], 0),
}


@pytest.mark.parametrize("name", sorted(PERMUTATIONS))
def test_permutation(name):
    fn, axis = PERMUTATIONS[name]
    assert fact(fn, X).permutation == axis


NOT_PERMUTATIONS = {
    "truncated": lambda x: jnp.argsort(x)[:, :4],
    "flattened": lambda x: jnp.argsort(x).reshape(-1),
    "some_top_k": lambda x: lax.top_k(x, 3)[1],
    "shifted_iota": lambda x: lax.sort((x[0], jnp.arange(6) + 1), num_keys=1)[1],
    "chosen": lambda x: jnp.where(x > 0, jnp.argsort(x), jnp.argsort(-x)),
    "joined": lambda x: jnp.concatenate([jnp.argsort(x[0]), jnp.argsort(x[1])]),
    "sorted_across": lambda x: lax.sort(jnp.argsort(x, axis=1), dimension=0),
    "repeated": lambda x: jnp.tile(jnp.argsort(x[0]), 2),
    "updated": lambda x: jnp.argsort(x[0]).at[0].set(1),
    "stretched": lambda x: jnp.broadcast_to(jnp.argsort(x[:, :1]), (4, 6)),
    "keys": lambda x: lax.sort((x[0], jnp.arange(6)), num_keys=1)[0],
}


@pytest.mark.parametrize("name", sorted(NOT_PERMUTATIONS))
def test_permutation_not_claimed(name):
    found = fact(NOT_PERMUTATIONS[name], X)
    assert found.permutation is None or found.constant is not None


def constant(fn, *args):
    return fact(fn, *args).constant


def test_constants():
    assert constant(lambda: jnp.zeros((3, 4))) == Constant(0.0, False)
    assert constant(lambda: -jnp.zeros(3)) == Constant(0.0, True)
    assert constant(lambda: jnp.full(3, 2.5).reshape(3, 1).T.astype(jnp.bfloat16)) == Constant.of(
        2.5
    )
    assert constant(lambda: jnp.full(3, 7)) == Constant.of(7)
    assert constant(lambda: jnp.full(3, -jnp.inf)) == Constant.of(-np.inf)
    assert constant(lambda: jnp.stack([jnp.zeros(3), jnp.zeros(3)])) == Constant.of(0.0)
    assert constant(lambda x: ids(x) < 0, X) == Constant.of(0)
    assert fact(lambda: jnp.zeros(3)).is_zero()


def test_constants_not_claimed():
    assert constant(lambda: jnp.full(3, jnp.nan)) is None
    assert constant(lambda x: x * 0.0, jnp.ones(3)) is None  # NaN and infinity times zero
    assert constant(lambda: jnp.full(3, 0.1).astype(jnp.bfloat16)) is None  # rounds
    assert constant(lambda: jnp.full(3, 1e-40) * 1.0) is None  # may be flushed
    assert constant(lambda: jnp.stack([jnp.zeros(3), -jnp.zeros(3)])) is None
    assert constant(lambda x: x + 0.0, jnp.ones(3)) is None


def test_positive_and_negative_zero_are_told_apart():
    assert Fact(constant=Constant.of(0.0)) != Fact(constant=Constant.of(-0.0))


def test_constant_arrays_of_the_host():
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert fact(lambda x: x[0, 0] * 0 + jnp.asarray(table), X).affine == Affine(0, (4, 1))
    swaps = np.array([2, 0, 1], np.int32)
    assert fact(lambda: lax.rev(swaps, (0,))) == Fact(0, 2, None, 0)
    large = np.zeros(1 << 17, np.int32)
    assert fact(lambda: lax.rev(large, (0,))) == UNKNOWN


def test_constants_on_a_device_are_not_read():
    array = jnp.arange(6) * 1
    assert fact(lambda: lax.rev(array, (0,))).lo is None


# Across bodies.


@jax.custom_jvp
def jvp_identity(x):
    return x


jvp_identity.defjvp(lambda p, t: (p[0], t[0]))


@jax.custom_vjp
def vjp_identity(x):
    return x


vjp_identity.defvjp(lambda x: (x, None), lambda _, g: (g,))


CALLS = {
    "jit": jax.jit(lambda x: x),
    "remat": jax.checkpoint(lambda x: x + 0),
    "custom_jvp": jvp_identity,
    "custom_vjp": vjp_identity,
    "vmap": jax.vmap(lambda row: row + 0),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_through_calls(name):
    assert bounds(lambda x: CALLS[name](ids(x)) + 1, X) == (1, 8)


def test_children_hold_the_facts_inside():
    body = jax.make_jaxpr(lambda x: jax.jit(lambda y: y + 1)(ids(x)))(X)
    facts = Analysis().enter(body)
    eqns = jaxprs.opened(body).eqns
    index = next(i for i, e in enumerate(eqns) if e.primitive.name == "jit")
    (child,) = facts.children(index).values()
    assert child.inputs == (Fact(0, 7),)
    assert child.outputs == (Fact(1, 8),)
    assert facts.fact(eqns[index].outvars[0]) == Fact(1, 8)
    assert facts.children(0) == {}


def test_one_body_is_analysed_once_for_equal_facts():
    inner = jax.jit(lambda y: y + 1)

    def fn(x):
        return inner(ids(x)), inner(ids(x + 1)), inner(x & 3)

    facts = Analysis().enter(jax.make_jaxpr(fn)(X))
    calls = [
        next(iter(facts.children(i).values()))
        for i in range(len(jaxprs.opened(facts.body).eqns))
        if facts.children(i)
    ]
    assert calls[0] is calls[1]
    assert calls[2] is not calls[0]
    assert [f.hi for f in facts.outputs] == [8, 8, 4]


def test_branches_are_joined():
    def fn(x, branches):
        return lax.switch(x[0, 0], branches, x)

    assert bounds(lambda x: fn(x, [ids, lambda x: x & 15, lambda x: ids(x) - 1]), X) == (-1, 15)
    both = [lambda x: jnp.argsort(x), lambda x: jnp.argsort(-x)]
    assert fact(lambda x: fn(x, both), X).permutation == 1
    shifted = [lambda x: jnp.arange(6), lambda x: jnp.arange(6) + 1]
    assert fact(lambda x: fn(x, shifted), X) == Fact(0, 6, Affine(None, (1,)))


def test_scan_counts_and_stacks():
    def fn(x):
        def body(carry, row):
            i, most = carry
            return (i + 1, jnp.maximum(most, row)), (i, row, jnp.arange(3))

        (i, most), ys = lax.scan(body, (0, x[0, :1] * 0), ids(x)[:, :1])
        return i, most, *ys

    i, most, counts, rows, iotas = outputs(fn, X)
    assert i.constant == Constant.of(4)
    assert (most.lo, most.hi) == (0, 7)
    assert (counts.lo, counts.hi) == (0, 3)
    assert (rows.lo, rows.hi) == (0, 7)
    assert iotas.affine == Affine(0, (0, 1))


def test_scan_slices_and_constants():
    def fn(x):
        table = jnp.broadcast_to(jnp.arange(6), (4, 6))
        order = jnp.argsort(x)

        def body(c, row):
            return c, (row[0], row[1], order)

        return lax.scan(body, 0, (table, order))[1]

    same, sliced, whole = outputs(fn, X)
    assert same.affine == Affine(0, (0, 1))
    assert sliced.permutation == 1
    assert whole.permutation == 2


def test_a_scanned_permutation_of_the_leading_axis_is_lost():
    def fn(x):
        return lax.scan(lambda c, row: (c, row + 0), 0, jnp.argsort(x, axis=0))[1]

    assert fact(fn, X) == Fact(0, 3)


def test_loops_stay_bounded_and_sound():
    assert bounds(lambda: lax.fori_loop(0, 9, lambda i, a: jnp.maximum(a, i), 0)) == (0, 8)
    assert bounds(
        lambda n: lax.fori_loop(0, n, lambda i, a: jnp.maximum(a, i), 0), jnp.int32(3)
    ) == (0, None)
    grows = lambda: lax.while_loop(lambda a: a != 99, lambda a: a * 2 + 1, 0)
    assert bounds(grows) == (None, None)
    counts = lambda: lax.while_loop(lambda a: a < 10, lambda a: a + 3, 0)
    assert bounds(counts) == (0, 12)


def test_values_that_trade_places_in_a_loop():
    def fn(x):
        return lax.fori_loop(0, 5, lambda i, s: (s[1], s[2], s[0]), (0, 5, x[0, 0] & 63))

    for found in outputs(fn, X):
        assert (found.lo, found.hi) in ((0, 63), (0, None), (None, None))


def test_a_counter_that_would_wrap_is_not_claimed():
    def fn(x):
        return lax.scan(lambda i, _: (i + jnp.int8(100), i), jnp.int8(0), None, length=4)[1]

    assert bounds(fn, X) == (None, None)


def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(fn, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)


def test_shards():
    x = jnp.zeros((4, 8), jnp.int32)

    def fn(x):
        iota = lax.broadcasted_iota(jnp.int32, (4, 8), 1)
        order = jnp.argsort(x, axis=1)
        return sharded(
            lambda x, i, o: (
                ids(x),
                i,
                o,
                lax.axis_index("b") + x * 0,
                lax.all_gather(ids(x), "a"),
            ),
            (P("a", "b"), P("a", "b"), P("a", None)),
            (P("a", "b"), P("a", "b"), P("a", None), P("a", "b"), P(None, "a", "b")),
        )(x, iota, order)

    facts = Analysis().enter(jax.make_jaxpr(fn)(x))
    values, iota, order, index, gathered = facts.outputs
    assert (values.lo, values.hi) == (0, 7)
    assert (iota.lo, iota.hi, iota.affine) == (0, 7, None)
    assert order.permutation == 1
    assert (index.lo, index.hi) == (0, 3)
    assert (gathered.lo, gathered.hi) == (0, 7)
    (inside,) = next(
        (facts.children(i).values())
        for i, e in enumerate(jaxprs.opened(facts.body).eqns)
        if e.primitive.name == "shard_map"
    )
    assert inside.inputs[1].affine == Affine(None, (0, 1))  # a block, from an unknown start
    assert inside.inputs[2].permutation == 1


def test_a_sharded_permutation_is_none_inside():
    def fn(x):
        return sharded(lambda o: o, P(None, "b"), P(None, "b"))(jnp.argsort(x, axis=1))

    assert fact(fn, jnp.zeros((4, 8), jnp.int32)) == Fact(0, 7)


def test_axis_index_is_below_the_axis_size():
    assert bounds(lambda: sharded(lambda: lax.axis_index("b")[None], (), P("b"))()) == (0, 3)


def test_references_have_no_facts():
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...] & 3) + 1

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32))
    facts = Analysis().enter(jax.make_jaxpr(lambda x: call(ids(x)))(jnp.zeros((8, 128), jnp.int32)))
    assert facts.outputs == (UNKNOWN,)
    (child,) = (c for i in range(2) for c in facts.children(i).values())
    assert set(child.inputs) == {UNKNOWN}
    added = next(e for e in jaxprs.opened(child.body).eqns if e.primitive is lax.add_p)
    assert child.fact(added.outvars[0]) == Fact(1, 4)


def test_symbolic_shapes_give_no_facts_and_no_errors():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n,), jnp.int32)
    jaxpr = jax.jit(lambda x: (jnp.argsort(x), x.sum(), jnp.arange(x.shape[0]))).trace(x).jaxpr
    for found in Analysis().enter(jaxpr).outputs:
        assert found.permutation is None
        assert found.affine is None


def test_facts_are_wanted_for_each_input():
    with pytest.raises(ValueError, match="found 2 facts, wanted one for each of 1"):
        Analysis().enter(jax.make_jaxpr(ids)(X), (UNKNOWN, UNKNOWN))


def test_facts_about_inputs_are_used():
    body = jax.make_jaxpr(lambda x: x + 1)(X)
    assert Analysis().enter(body, (Fact(0, 3),)).outputs == (Fact(1, 4),)


def test_extended_types_have_no_facts():
    assert functools.reduce(
        lambda a, f: a and f == UNKNOWN,
        outputs(lambda: (jax.random.key(0), jnp.zeros(2) * 1j)),
        True,
    )
