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
    before, per_value = _earlier(hot)
    lower = jnp.cumsum(per_value) - per_value + jnp.sum(wide < lo, dtype=jnp.int32)
    # At most one term of each sum isn't zero.
    found = _flat(jnp.where(hot, before + lower, 0), n)
    return jnp.where(inside, found, NOWHERE)


def counting_ranks(keys: jax.Array, lo: int, values: int) -> jax.Array:
    """The stable rank of every key, all of which lie in ``[lo, lo + values)``.

    The last value needs no column of its own: of its rank, what isn't counted is the rest. So 129
    values, a shard's 128 experts and "elsewhere", take the 128 lanes of a register and no more.

    Args:
      keys: int ``[n]``; with keys that lie elsewhere the result is meaningless.
      lo: the least value, a number that the dtype of ``keys`` holds.
      values: how many there are, at least one.

    Returns:
      int32 ``[n]``: ``argsort(argsort(keys))``.
    """
    (n,) = keys.shape
    position = lax.iota(jnp.int32, n)
    if not n or values == 1:
        return position
    wide = keys.astype(jnp.int32) if np.dtype(keys.dtype).itemsize < 4 else keys
    slot = (wide - jnp.asarray(lo, keys.dtype).astype(wide.dtype)).astype(jnp.int32)
    hot = _one_hot_blocks(slot, values - 1)
    before, per_value = _earlier(hot)
    lower = jnp.cumsum(per_value) - per_value
    last = slot >= values - 1
    counted = hot | _in_blocks(last, True)[:, :, None]
    # A row of the last value adds up every column: the earlier keys of all others, and `lower`s.
    found = _flat(jnp.where(counted, before + lower, 0), n)
    rest = jnp.sum(per_value) + jnp.sum(lower) + position - found
    return jnp.where(last, rest, found)


def _last(lo: jax.Array, values: int) -> jax.Array:
    """``lo + values - 1``, or the greatest number there is where that overflows."""
    most = int(jnp.iinfo(lo.dtype).max)
    if values - 1 >= most:
        return jnp.full_like(lo, most)
    steps = lo.dtype.type(values - 1)
    return jnp.where(lo > lo.dtype.type(most - (values - 1)), lo.dtype.type(most), lo + steps)


def _in_blocks(x: jax.Array, fill: Any) -> jax.Array:
    """``[n]`` as ``[blocks, BLOCK]``, the last block filled up."""
    (n,) = x.shape
    filled = -(-n // BLOCK) * BLOCK
    return lax.pad(x, jnp.asarray(fill, x.dtype), [(0, filled - n, 0)]).reshape(-1, BLOCK)


def _flat(x: jax.Array, n: int) -> jax.Array:
    """Int32 ``[n]``: the sums over columns of ``[blocks, BLOCK, values]``, without the filling."""
    return jnp.sum(x, axis=-1, dtype=jnp.int32).reshape(-1)[:n]


def _one_hot_blocks(slot: jax.Array, values: int) -> jax.Array:
    """Bool ``[blocks, BLOCK, values]``; rows of no value where the last block is filled up."""
    blocks = _in_blocks(slot, values)
    return blocks[:, :, None] == lax.broadcasted_iota(jnp.int32, (1, 1, values), 2)


def _earlier(hot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In how many earlier rows each column is set, of ``hot``'s shape, and in how many of all."""
    per_block = jnp.sum(hot, axis=1, dtype=jnp.int32)
    before_block = jnp.cumsum(per_block, axis=0) - per_block
    return _earlier_in_block(hot) + before_block[:, None, :], jnp.sum(per_block, axis=0)


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
