"""Ranks in a stable order, counted instead of sorted.

The rank of a key is the number of keys below it, plus that of equal keys in earlier slots. The
latter are prefix counts: within blocks of slots a product with a strictly triangular matrix of
ones, across blocks a running sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256
"""Slots per block. The product adds up at most that many ones: float32 is exact to 2**24."""
NOWHERE = -1
"""The rank of a key outside the window."""


def counting_rank(keys: jax.Array, lo: Any, values: int) -> jax.Array:
    """The stable rank of each key in a window among all keys, and `NOWHERE` for other keys.

    Args:
      keys: int ``[n]``.
      lo: the least key of the window, a number that the dtype of ``keys`` holds; may be traced.
      values: the width of the window: keys up to ``lo + values - 1`` are in it. Static, as one-hot
        rows of this length are made.

    Returns:
      int32 ``[n]``; what ``argsort(argsort(keys))`` gives for keys in the window.
    """
    (n,) = keys.shape
    if not n or not values:
        return jnp.full((n,), NOWHERE, jnp.int32)
    wide = keys.astype(jnp.int32) if np.dtype(keys.dtype).itemsize < 4 else keys
    lo = jnp.asarray(lo, keys.dtype).astype(wide.dtype)
    inside = (wide >= lo) & (wide <= _last(lo, values))
    # Where a key is inside, neither the difference nor the cast overflows.
    slot = jnp.where(inside, (wide - lo).astype(jnp.int32), values)
    hot = _one_hot_blocks(slot, values)
    earlier = _earlier_in_block(hot)
    per_block = jnp.sum(hot, axis=1, dtype=jnp.int32)
    before_block = jnp.cumsum(per_block, axis=0) - per_block
    per_value = jnp.sum(per_block, axis=0)
    lower = jnp.cumsum(per_value) - per_value + jnp.sum(wide < lo, dtype=jnp.int32)
    ranks = earlier + (before_block + lower)[:, None, :]
    # At most one term of each sum isn't zero.
    found = jnp.sum(jnp.where(hot, ranks, 0), axis=-1, dtype=jnp.int32).reshape(-1)[:n]
    return jnp.where(inside, found, NOWHERE)


def _last(lo: jax.Array, values: int) -> jax.Array:
    """``lo + values - 1``, or the greatest number there is where that overflows."""
    most = int(jnp.iinfo(lo.dtype).max)
    if values - 1 >= most:
        return jnp.full_like(lo, most)
    steps = lo.dtype.type(values - 1)
    return jnp.where(lo > lo.dtype.type(most - (values - 1)), lo.dtype.type(most), lo + steps)


def _one_hot_blocks(slot: jax.Array, values: int) -> jax.Array:
    """Bool ``[blocks, BLOCK, values]``; rows of no value where the last block is filled up."""
    (n,) = slot.shape
    filled = -(-n // BLOCK) * BLOCK
    slot = lax.pad(slot, jnp.int32(values), [(0, filled - n, 0)])
    return slot.reshape(-1, BLOCK, 1) == lax.broadcasted_iota(jnp.int32, (1, 1, values), 2)


def _earlier_in_block(hot: jax.Array) -> jax.Array:
    """int32 of ``hot``'s shape: in how many earlier rows of its block a column is set.

    bfloat16 holds the ones and zeros, float32 their sums, both exactly.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), d) for d in (0, 1))
    below = (column < row).astype(jnp.bfloat16)
    counts = jnp.einsum(
        "ij,bjv->biv", below, hot.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )
    return counts.astype(jnp.int32)
