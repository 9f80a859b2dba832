"""Rows of an array gathered along one axis, in the layout that a scatter of them would give."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ...compat.weak_types import weak


def gathered_rows(
    updates: jax.Array, by: jax.Array, keep: jax.Array | None, *, out: Any, axis: int, row: int
) -> jax.Array:
    """``out[…, r, …] = updates[…, by[r], …]`` along ``axis``, or zero where the row isn't kept.

    Args:
      updates: the rows, counted along dimension ``row``.
      by: int ``[n]``, all in bounds and different; entries past the length of ``out`` are unused.
      keep: bool ``[n]``, of the rows of ``updates``; None keeps all.
      out: the type of the result.
      axis: the result's axis that the rows lie along.
      row: the dimension of ``updates`` that counts the rows.
    """
    size = out.shape[axis]
    by = by if by.shape[0] == size else lax.slice_in_dim(by, 0, size)
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(out.ndim) if d != axis),
        collapsed_slice_dims=(row,),
        start_index_map=(row,),
    )
    moved = _gather(updates, by, dims, tuple(1 if d == row else n
                                             for d, n in enumerate(updates.shape)))  # fmt: skip
    if keep is not None:
        scalars = lax.GatherDimensionNumbers((), (0,), (0,))
        kept = lax.broadcast_in_dim(_gather(keep, by, scalars, (1,)), moved.shape, (axis,))
        moved = lax.select(kept, moved, lax.full_like(moved, 0))
    if out.weak_type:
        return weak(moved)
    return lax.convert_element_type(moved, out.dtype) if updates.weak_type else moved


def _gather(operand: Any, by: Any, dims: Any, sizes: tuple[int, ...]) -> Any:
    return lax.gather(operand, lax.expand_dims(by, (1,)), dims, sizes, unique_indices=True,
                      mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)  # fmt: skip
