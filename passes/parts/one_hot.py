"""Comparisons of indices with all they could be: what stands in for scatters of single elements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def at_least_32_bits(ids: Any) -> Any:
    """``ids`` in a dtype that any place and any digit of it fits in."""
    return ids.astype(np.int32) if ids.dtype.itemsize < 4 else ids


def clipped(ids: Any, places: int) -> Any:
    """``ids`` brought into ``[0, places)``."""
    return lax.clamp(ids.dtype.type(0), ids, ids.dtype.type(places - 1))


def counts(ids: Any, places: int, clip: bool) -> Any:
    """How often each of ``0 … places-1`` occurs in each row: ``int32[…, places]``.

    Args:
      ids: integers ``[…, n]``, with n at most 2²⁴, so that every count is exact.
      places: what lies outside is not counted.
      clip: whether it is instead counted at the nearest place.
    """
    ids = at_least_32_bits(ids)
    ids = clipped(ids, places) if clip else ids
    return by_comparison(ids, places) if small(ids.shape) else by_digits(ids, places)


def small(shape: tuple[int, ...]) -> bool:
    """Whether ``[…, n]`` ids are several rows, none of which would fill a tile of a product."""
    return len(shape) > 1 and shape[-1] < 128


def by_comparison(ids: Any, places: int) -> Any:
    """Counts of ids ``[…, n]`` by comparing each with every place."""
    shape = (*ids.shape, places)
    spread = lax.broadcast_in_dim(ids, shape, tuple(range(ids.ndim)))
    here = spread == lax.broadcasted_iota(ids.dtype, shape, ids.ndim)
    return lax.reduce_sum(here.astype(np.int32), [ids.ndim - 1])


def by_digits(ids: Any, places: int) -> Any:
    """Counts of ids ``[…, n]`` by the product of the one-hot matrices of their two digits."""
    shift = (max(places - 1, 1).bit_length() + 1) // 2
    low_count = 1 << shift
    high_count = -(-places // low_count)
    high = one_hot(ids >> ids.dtype.type(shift), high_count)
    low = one_hot(ids & ids.dtype.type(low_count - 1), low_count)
    rows = tuple(range(ids.ndim - 1))
    pairs = lax.dot_general(
        high, low, (((ids.ndim,), (ids.ndim,)), (rows, rows)), preferred_element_type=np.float32
    )
    every = pairs.reshape(*ids.shape[:-1], high_count * low_count)
    whole = every.shape[-1] == places
    every = every if whole else lax.slice_in_dim(every, 0, places, axis=ids.ndim - 1)
    return every.astype(np.int32)


def one_hot(digits: Any, count: int) -> Any:
    """``bfloat16[…, count, n]`` of digits ``[…, n]``; all zeros where a digit is none of them."""
    rows = tuple(range(digits.ndim - 1))
    shape = (*digits.shape[:-1], count, digits.shape[-1])
    spread = lax.broadcast_in_dim(digits, shape, (*rows, len(rows) + 1))
    here = spread == lax.broadcasted_iota(digits.dtype, shape, len(rows))
    return here.astype(jnp.bfloat16)


def placed(ids: Any, values: Any, places: int) -> Any:
    """Each value at the place that its id names, zeros elsewhere: ``[places, …]``.

    Args:
      ids: integers ``[k, …]``, distinct along the first axis where they lie inside.
      values: ``[k, …]``.
      places: a value whose id lies outside is dropped.
    """
    ids = at_least_32_bits(ids)
    if 0 < ids.shape[0] <= _UNROLLED:
        return _chosen(ids, values, places)
    shape = (ids.shape[0], places, *ids.shape[1:])
    across = (0, *range(2, len(shape)))
    here = lax.broadcast_in_dim(ids, shape, across) == lax.broadcasted_iota(ids.dtype, shape, 1)
    spread = lax.broadcast_in_dim(values, shape, across)
    return lax.reduce_sum(lax.select(here, spread, lax.full_like(spread, 0)), [0])


_UNROLLED = 16
"""As many values of a row are chosen one after another, which takes no sums."""


def _chosen(ids: Any, values: Any, places: int) -> Any:
    shape = (places, *ids.shape[1:])
    across = tuple(range(1, len(shape)))

    def row(x: Any, i: int) -> Any:
        one = lax.index_in_dim(x, i, 0, keepdims=False)
        return lax.broadcast_in_dim(one, shape, across)

    place = lax.broadcasted_iota(ids.dtype, shape, 0)
    found = lax.full_like(row(values, 0), 0)
    for i in range(ids.shape[0]):
        found = lax.select(row(ids, i) == place, row(values, i), found)
    return found
