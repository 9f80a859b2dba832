"""Rows gathered group by group and added up: what `sorted_scatter` puts in a scatter's place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...matchers.grouped import Grouped

_MODES = lax.GatherScatterMode


def by_choice(inverse: Any, grouped: Grouped) -> Any:
    """``[each, groups]``: for each group the places of its rows, from that of every row."""
    if grouped.div == 1:
        return inverse.reshape(grouped.each, grouped.groups)
    if grouped.repeats == 1:
        return lax.transpose(inverse.reshape(grouped.groups, grouped.each), (1, 0))
    shape = grouped.repeats, grouped.groups, grouped.div
    return lax.transpose(inverse.reshape(shape), (0, 2, 1)).reshape(grouped.each, grouped.groups)


def sorting_order(indices: Any, grouped: Grouped) -> Any:
    """``[each, groups]``: for each group the places of its rows, in ascending order."""
    places = lax.iota(np.int32, grouped.total)
    _, order = lax.sort((indices, places), num_keys=2, is_stable=False)
    return lax.transpose(order.reshape(grouped.groups, grouped.each), (1, 0))


def taken(updates: Any, places: Any, rows: int, axis: int, whole: bool) -> Any:
    """The updates at ``places``, choices in front and groups along ``axis``; zeros outside."""
    sizes = tuple(1 if d == rows else n for d, n in enumerate(updates.shape))
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(d + 1 for d in range(updates.ndim) if d != axis),
        collapsed_slice_dims=(rows,),
        start_index_map=(rows,),
    )
    mode = _MODES.PROMISE_IN_BOUNDS if whole else _MODES.FILL_OR_DROP
    fill = None if whole else 0
    return lax.gather(updates, lax.expand_dims(places, (2,)), dims, sizes,
                      unique_indices=whole, mode=mode, fill_value=fill)  # fmt: skip


def summed(parts: Any) -> Any:
    """The sum along the first axis; of 16-bit floats and narrower in float32, rounded once."""
    narrow = jnp.issubdtype(parts.dtype, jnp.floating) and parts.dtype.itemsize < 4
    wide = parts.astype(np.float32) if narrow else parts
    return lax.reduce_sum(wide, [0]).astype(parts.dtype)


def masked(updates: Any, indices: Any, rows: int, size: int) -> Any:
    """The updates, with zeros for those whose index lies outside."""
    inside = (indices >= 0) & (indices <= size - 1)
    inside = lax.broadcast_in_dim(inside, updates.shape, (rows,))
    return lax.select(inside, updates, lax.full_like(updates, 0))
