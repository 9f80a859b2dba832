"""Where a scatter puts its updates: whole slices along one axis, or single elements of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .graph import Scope
from .pattern import Mismatch

_PARAMS = frozenset({"dimension_numbers", "indices_are_sorted", "mode", "unique_indices",
                     "update_consts", "update_jaxpr"})  # fmt: skip


def unnamed_param(eqn: Eqn) -> Mismatch | None:
    """A parameter of a scatter that no pass knows; None if there is none."""
    unnamed = set(eqn.params) - _PARAMS
    if not unnamed:
        return None
    name = min(unnamed)
    return Mismatch((eqn.primitive.name, f"param {name}"), repr(eqn.params[name]), "no such param")


@dataclass(frozen=True)
class Slices:
    """Each index names one slice of the operand, which an update adds to as a whole."""

    axis: int
    """The operand's axis that the slices lie along."""
    rows: int
    """The updates' axis along which there is one slice for each index."""


def whole_slices(eqn: Eqn) -> Slices | None:
    """How a scatter of whole slices by a vector of indices lies; None for any other scatter."""
    dims = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.aval for a in eqn.invars)
    axes = tuple(int(d) for d in dims.scatter_dims_to_operand_dims)
    paired = (*dims.operand_batching_dims, *dims.scatter_indices_batching_dims)
    inserted = tuple(int(d) for d in dims.inserted_window_dims)
    if paired or len(axes) != 1 or inserted != axes or indices.ndim != 2:
        return None
    window = tuple(updates.shape[d] for d in dims.update_window_dims)
    rest = tuple(n for d, n in enumerate(operand.shape) if d != axes[0])
    if window != rest:
        return None
    (rows,) = (d for d in range(updates.ndim) if d not in dims.update_window_dims)
    return Slices(axes[0], rows)


@dataclass(frozen=True)
class Elements:
    """Each index names one element of the operand's row that it is paired with."""

    axis: int
    """The operand's axis that the indices count along; the others are rows."""
    free: tuple[int, ...]
    """The indices' dimensions that belong to one row together."""
    rows: tuple[int, ...]
    """The indices' dimensions that are paired with the operand's other dimensions, in order."""

    def by_row(self, ids: Any) -> Any:
        """``[*rows, n]``: the indices of each row, without the dimension of index vectors."""
        order = (*self.rows, *self.free)
        ids = ids if order == tuple(range(ids.ndim)) else lax.transpose(ids, order)
        shape = (*ids.shape[: len(self.rows)], -1)
        return ids if len(self.free) == 1 else ids.reshape(shape)

    def choices_first(self, x: Any) -> Any:
        """``[n, *rows]``: indices or updates of each row, those of one row along the first axis."""
        order = (*self.free, *self.rows)
        x = x if order == tuple(range(x.ndim)) else lax.transpose(x, order)
        return x if len(self.free) == 1 else x.reshape(-1, *x.shape[len(self.free) :])

    def places_last(self, found: Any) -> Any:
        """``[places, *rows]`` as the operand lies."""
        return found if self.axis == 0 else jnp.moveaxis(found, 0, self.axis)

    def in_place(self, found: Any) -> Any:
        """``[*rows, places]`` as the operand lies."""
        last = found.ndim - 1
        return found if self.axis == last else jnp.moveaxis(found, last, self.axis)


def single_elements(eqn: Eqn) -> Elements | None:
    """How a scatter of elements, row by row, lies; None for any other scatter."""
    dims: Any = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.aval for a in eqn.invars)
    axes = tuple(int(d) for d in dims.scatter_dims_to_operand_dims)
    inserted = tuple(int(d) for d in dims.inserted_window_dims)
    if len(axes) != 1 or inserted != axes or updates.shape != indices.shape[:-1]:
        return None
    paired = {int(d): int(i) for d, i in zip(dims.operand_batching_dims,
                                             dims.scatter_indices_batching_dims)}  # fmt: skip
    rest = [d for d in range(operand.ndim) if d != axes[0]]
    if dims.update_window_dims or sorted(paired) != rest:
        return None
    rows = tuple(paired[d] for d in rest)
    free = tuple(d for d in range(indices.ndim - 1) if d not in rows)
    return Elements(axes[0], free, rows)


def elements_by_id(scope: Scope, eqn: Eqn) -> tuple[Elements, Atom] | None:
    """As `single_elements`, with the indices that count along ``axis``: ``[…, 1]``, of this body.

    Seen too where every element is named in full, as ``zeros.at[arange(n)[:, None], ids]`` does:
    of all columns of the index vectors but one it must be known that they count up the rows.
    """
    found = single_elements(eqn)
    if found is not None:
        return found, eqn.invars[1]
    dims: Any = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.aval for a in eqn.invars)
    axes = tuple(int(d) for d in dims.scatter_dims_to_operand_dims)
    inserted = sorted(int(d) for d in dims.inserted_window_dims)
    columns = _columns(scope, eqn.invars[1])
    if len(axes) < 2 or len(columns) != len(axes) or inserted != sorted(axes):
        return None
    if dims.update_window_dims or updates.shape != indices.shape[:-1]:
        return None
    paired = {int(d): int(i) for d, i in zip(dims.operand_batching_dims,
                                             dims.scatter_indices_batching_dims)}  # fmt: skip
    chosen = []
    for axis, column in zip(axes, columns):
        row = _counts_up(scope, column, operand.shape[axis], paired)
        if row is None:
            chosen.append((axis, column))
        else:
            paired[axis] = row
    if len(chosen) != 1:
        return None
    ((axis, ids),) = chosen
    rest = [d for d in range(operand.ndim) if d != axis]
    if sorted(paired) != rest:
        return None
    rows = tuple(paired[d] for d in rest)
    return Elements(axis, tuple(d for d in range(indices.ndim - 1) if d not in rows), rows), ids


def _columns(scope: Scope, indices: Atom) -> list[Atom]:
    """What index vectors are put together of, one number of each after another."""
    found = None if jaxprs.is_literal(indices) else scope.definition(indices)
    eqn = None if found is None else scope.eqns[found[0]]
    if eqn is None or eqn.primitive is not primitive("concatenate_p"):
        return []
    last = indices.aval.ndim - 1
    whole = eqn.params["dimension"] == last and all(a.aval.shape[last] == 1 for a in eqn.invars)
    return list(eqn.invars) if whole else []


def _counts_up(scope: Scope, column: Atom, size: int, paired: dict[int, int]) -> int | None:
    """The dimension of indices along which a column counts ``0 … size-1``, and along no other."""
    shape, fact = column.aval.shape, scope.fact(column)
    return next(
        (d for d in range(len(shape) - 1)
         if shape[d] == size and d not in paired.values() and fact.is_iota(d, shape)),
        None,
    )  # fmt: skip
