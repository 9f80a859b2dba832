"""Recognise a scatter of rows: whole slices along one axis, by a permutation, some left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .graph import Scope
from .origin import behind, reach
from .wrapped_index import plain_index


def row_axis(eqn: Eqn) -> int | None:
    """The operand's axis that whole slices are scattered along; None for any other layout."""
    dims = eqn.params["dimension_numbers"]
    axes = tuple(dims.scatter_dims_to_operand_dims)
    paired = (*dims.operand_batching_dims, *dims.scatter_indices_batching_dims)
    if paired or len(axes) != 1 or tuple(dims.inserted_window_dims) != axes:
        return None
    operand, _, updates = (a.aval for a in eqn.invars)
    window = tuple(updates.shape[d] for d in dims.update_window_dims)
    rest = tuple(n for d, n in enumerate(operand.shape) if d != axes[0])
    return axes[0] if window == rest else None


def row_dimension(eqn: Eqn) -> int:
    """The dimension of the updates that counts the rows."""
    windows = eqn.params["dimension_numbers"].update_window_dims
    (rows,) = (d for d in range(eqn.invars[2].aval.ndim) if d not in windows)
    return rows


@dataclass(frozen=True)
class Rows:
    """Where the rows go."""

    permutation: Atom
    """``[n]`` or ``[n, 1]``, a permutation of 0 … n-1 along its first axis."""
    keep: Atom | None
    """bool ``[n]``: which rows are scattered at all; None for all of them."""
    keep_if: bool
    """The value of ``keep`` at rows that are."""


def rows_of(scope: Scope, eqn: Eqn, size: int) -> Rows | None:
    """The permutation behind a scatter's indices, also where some of them point outside.

    Args:
      scope: the body.
      eqn: the scatter.
      size: slices along the operand's axis; an index outside of these is one of no slice.
    """
    indices = eqn.invars[1]
    if indices.aval.ndim != 2:
        return None
    if scope.fact(indices).permutation == 0:
        return Rows(indices, None, True)
    return _masked(scope, plain_index(scope, indices), size)


def drops(eqn: Eqn) -> bool:
    """Whether rows with an index out of bounds are left out.

    jax lowers a scatter whose indices are promised to be in bounds to the one that drops, as it
    stands; only CLIP moves rows. The transpose of ``x[i]`` with a row beyond the end is of this
    kind: what the gather read there is masked, and so is its cotangent.
    """
    dropping = (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return eqn.params["mode"] in dropping


def _masked(scope: Scope, index: Atom, size: int) -> Rows | None:
    """``where(keep, permutation, outside)``, either way round."""
    chosen = None if jaxprs.is_literal(index) else scope.producer(index)
    if chosen is None or chosen.eqn.primitive is not primitive("select_n_p"):
        return None
    keep, *cases = chosen.eqn.invars
    inner: Any = chosen.scope
    if len(cases) != 2 or keep.aval.shape != cases[0].aval.shape or keep.aval.ndim != 1:
        return None
    for side in (0, 1):
        p, other = cases[side], inner.fact(cases[1 - side]).constant
        outside = other is not None and not 0 <= other.value < size
        if not outside or inner.fact(p).permutation != 0:
            continue
        permutation, mask = (reach(scope, behind(inner.resolve(a))) for a in (p, keep))
        if permutation is not None and mask is not None:
            return Rows(permutation, mask, bool(side))
    return None
