"""permutation_scatter: adding rows into zeros by a permutation becomes a gather by its inverse.

before:  ``zeros.at[p].add(u)`` with ``p`` a permutation of all rows, and its inverse at hand
after:   ``u[inverse]``

This is what the backward of a gather by ``p`` leaves: the dispatch and the combine of a routed
layer. It helps because a gather reads each row once where a scatter-add reads, adds and writes, in
an order that must not collide; it costs nothing, as only an inverse that the program computes
anyway is used. The compiler doesn't know that ``p`` is a permutation. ``0 + (−0.0)`` is ``+0.0``,
so the sign of a zero may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.tracing import primitive
from ..compat.weak_types import weak
from ..matchers.graph import Scope
from ..matchers.inverse import find_inverse
from ..matchers.pattern import Mismatch, describe_atom
from ..matchers.wrapped_index import plain_value
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement

_PARAMS = frozenset({"dimension_numbers", "indices_are_sorted", "mode", "unique_indices",
                     "update_consts", "update_jaxpr"})  # fmt: skip


def _scatter_add() -> Any:
    return primitive("lax.slicing.scatter_add_p")


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    eqn = scope.eqns[index]
    unnamed = set(eqn.params) - _PARAMS
    if unnamed:
        name = min(unnamed)
        return Mismatch(("scatter-add", f"param {name}"), repr(eqn.params[name]), "no such param")
    return Match(scope, index, {"inverse": _inverse(scope, index)})


def _inverse(scope: Scope, index: int) -> Any:
    indices = scope.eqns[index].invars[1]
    known = indices.aval.ndim == 2 and scope.fact(indices).permutation == 0
    return find_inverse(scope, indices, index) if known else None


def _into_zeros(match: Match) -> Reason | None:
    operand = match.eqn.invars[0]
    if match.scope.fact(operand).is_zero():
        return None
    return Reason("not-zeros", "the updates are added to something",
                  describe_atom(match.scope, operand), "zeros")  # fmt: skip


def _axis(match: Match) -> int | None:
    """The operand's axis that whole slices are scattered along; None for any other layout."""
    dims = match.eqn.params["dimension_numbers"]
    axes = tuple(dims.scatter_dims_to_operand_dims)
    paired = (*dims.operand_batching_dims, *dims.scatter_indices_batching_dims)
    if paired or len(axes) != 1 or tuple(dims.inserted_window_dims) != axes:
        return None
    operand, _, updates = (a.aval for a in match.eqn.invars)
    window = tuple(updates.shape[d] for d in dims.update_window_dims)
    rest = tuple(n for d, n in enumerate(operand.shape) if d != axes[0])
    return axes[0] if window == rest else None


def _whole_slices(match: Match) -> Reason | None:
    if _axis(match) is not None:
        return None
    return Reason("layout", "the updates are not whole slices along one axis",
                  str(match.eqn.params["dimension_numbers"]),
                  "one inserted dimension, the others whole windows, none batched")  # fmt: skip


def _by_permutation(match: Match) -> Reason | None:
    indices, axis = match.eqn.invars[1], _axis(match)
    size = None if axis is None else match.eqn.invars[0].aval.shape[axis]
    known = indices.aval.ndim == 2 and match.scope.fact(indices).permutation == 0
    if known and size in (None, indices.aval.shape[0]):
        return None
    value = plain_value(match.scope, indices)
    what = f"a permutation of {indices.aval.shape[0]}" if known else (
        describe_atom(value.scope, value.atom)
    )  # fmt: skip
    return Reason("not-permutation", "the indices are not known to be a permutation of all slices",
                  what, f"a permutation of {'all' if size is None else size}")  # fmt: skip


def _at_hand(match: Match) -> Reason | None:
    if _by_permutation(match) is not None or match.captures["inverse"] is not None:
        return None
    value = plain_value(match.scope, match.eqn.invars[1])
    return Reason("no-inverse", "the inverse of the permutation is not at hand",
                  f"{describe_atom(value.scope, value.atom)} without it",
                  "its argsort, or what it is the argsort of, before it in its body")  # fmt: skip


def _replace(match: Match) -> Replacement:
    eqn, axis, inverse = match.eqn, _axis(match), match.captures["inverse"]
    updates, out = eqn.invars[2], eqn.outvars[0].aval
    windows = eqn.params["dimension_numbers"].update_window_dims
    (rows,) = (d for d in range(updates.aval.ndim) if d not in windows)
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(d for d in range(out.ndim) if d != axis),
        collapsed_slice_dims=(rows,),
        start_index_map=(rows,),
    )
    weak_updates = updates.aval.weak_type
    sizes = tuple(1 if d == rows else n for d, n in enumerate(updates.aval.shape))

    def gathered(updates: Any, inverse: Any) -> Sequence[Any]:
        inverse = inverse if inverse.ndim == 2 else lax.expand_dims(inverse, (1,))
        moved = lax.gather(
            updates, inverse, dims, sizes, unique_indices=True,
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )  # fmt: skip
        if out.weak_type:
            return [weak(moved)]
        return [lax.convert_element_type(moved, out.dtype) if weak_updates else moved]

    return Replacement((updates, inverse), tuple(eqn.outvars), gathered, (axis, rows))


def before(keys: jax.Array, rows: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorted ``rows`` taken back, and the cotangents ``g`` of what was sorted; both ``[n, d]``."""
    order = jnp.argsort(keys)
    inverse = jnp.argsort(order)
    return rows[inverse], jnp.zeros_like(g).at[order].add(g)


def after(keys: jax.Array, rows: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by two gathers."""
    inverse = jnp.argsort(jnp.argsort(keys))
    taken = rows[inverse]
    return taken, g.at[inverse].get(
        mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False
    )


PASS = Pass(
    name="permutation_scatter",
    contract=Contract.VALUE,
    summary="zeros.at[p].add(u) with p a permutation → u[inverse of p], where that exists",
    measure="scatter-adds",
    roots=lambda: frozenset({_scatter_add()}),
    find=_find,
    requirements=(
        Requirement("not-zeros", "The updates are added to zeros.", _into_zeros),
        Requirement("layout", "The updates are whole slices along one axis.", _whole_slices),
        Requirement(
            "not-permutation",
            "The indices are known to be a permutation of all slices.",
            _by_permutation,
        ),
        Requirement(
            "no-inverse",
            "The permutation's inverse is computed before, in the same body, and read.",
            _at_hand,
        ),
    ),
    profitable=lambda match: None,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((64,), jnp.int32),
                jax.ShapeDtypeStruct((64, 8), jnp.float32),
                jax.ShapeDtypeStruct((64, 8), jnp.float32),
            ),
            "sorted rows",
        ),
    ),
)
