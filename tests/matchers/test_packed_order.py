"""A permutation is what the low bits of words are that somebody packed by hand, and sorted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.matchers.facts import Analysis

KEYS = np.array([[3, 3, 0, 7, 1], [2, 2, 2, 2, 2], [9, 8, 7, 6, 5]], np.uint32)


def packed(keys, shift=3, mask=7, axis=1, along=1, join=jnp.bitwise_or, slots=None):
    """The low bits of sorted words of a key and a position."""
    slots = lax.broadcasted_iota(keys.dtype, keys.shape, along) if slots is None else slots
    word = join(keys << keys.dtype.type(shift), slots)
    return lax.sort(word, dimension=axis, is_stable=False) & keys.dtype.type(mask)


def fact(fn, keys=KEYS):
    return Analysis().enter(jax.make_jaxpr(fn)(keys)).outputs[0]


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint8])
@pytest.mark.parametrize(
    ("shift", "mask", "axis"), [(3, 7, 1), (5, 7, 1), (4, 15, 1), (2, 3, 0), (7, 127, 0)]
)
def test_it_is_a_permutation(dtype, shift, mask, axis):
    fn = functools.partial(packed, shift=shift, mask=mask, axis=axis, along=axis)
    keys = KEYS.astype(dtype)
    assert fact(fn, keys).permutation == axis
    found = np.sort(np.asarray(fn(keys)), axis=axis)
    assert np.array_equal(found, np.indices(KEYS.shape)[axis])


def test_either_way_round_and_as_another_type():
    def fn(keys):
        word = lax.sort(lax.broadcasted_iota(jnp.uint32, keys.shape, 1) | keys << np.uint32(3))
        return (jnp.full(keys.shape, 7, jnp.uint32) & word).astype(jnp.int32)

    assert fact(fn).permutation == 1


MISSES = {
    "mask-too-narrow": {"mask": 3},  # positions up to 4 need three bits
    "mask-reaches-the-keys": {"mask": 15},
    "mask-with-a-gap": {"mask": 5},
    "shift-too-small": {"shift": 2},
    "shift-out-of-the-word": {"shift": 32},
    "sorted-along-another-axis": {"axis": 0},
    "positions-of-another-axis": {"along": 0, "mask": 3, "shift": 2},
    "joined-by-xor": {"join": jnp.bitwise_xor},  # the same here; not looked at
    "positions-twice": {"slots": np.array([[0, 1, 2, 2, 4]] * 3, np.uint32)},
}


@pytest.mark.parametrize("how", MISSES.values(), ids=MISSES)
def test_near_misses(how):
    assert fact(functools.partial(packed, **how)).permutation is None


def test_a_shift_that_is_no_constant():
    def fn(keys):
        slots = lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
        return lax.sort(keys << keys[:, :1] | slots) & np.uint32(7)

    assert fact(fn).permutation is None


def test_positions_that_are_carried_beside_the_word():
    """Sorted by another operand, the words come in another order, and yet all of them."""

    def fn(keys):
        word = keys << np.uint32(3) | lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
        return lax.sort((keys, word), num_keys=1)[1] & np.uint32(7)

    assert fact(fn).permutation is None  # true, but of one operand only is it looked for
