"""top_k_scatter: bringing the cotangents of a top_k to their places becomes comparisons.

before:  ``vmap(lambda ids, ct: zeros.at[ids].add(ct))``, ``ids`` of each row those of a ``top_k``
after:   for each of the k choices, ``where(ids == experts, ct, rest)``

This is what the backward of ``top_k`` leaves, and of ``take_along_axis`` by its indices. It helps
because comparing an index with every expert is cheap where there are few: for f32[8192, 512] and
k = 10, 52,533 estimated TPU7x cycles against 124,035 (libtpu 0.0.52), most of the latter for a sort
of the places and none yet for the scatter itself, which goes to a SparseCore. Up to 16 choices are
selected one after another, more of them compared at once and summed (95,616). For a single choice a
row the compiler does the same. Looked at are scatters whose rows are batched, as `jax.vmap` and
these derivatives make them, and those that name rows by indices known to count them up, as
``zeros.at[arange(tokens)[:, None], ids].add(ct)``. The ids of a row are distinct, so nothing is
added to anything but zero, and all that may differ is the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.primitives import primitive
from ..compat.weak_types import weak
from ..matchers.distinct import chosen, distinct_along
from ..matchers.graph import Scope
from ..matchers.origin import origin
from ..matchers.pattern import Mismatch, describe_atom
from ..matchers.scattered import elements_by_id, unnamed_param
from ..matchers.wrapped_index import plain_index
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts.one_hot import placed

_MODES = lax.GatherScatterMode
_MOST_PLACES = 4096
"""With more, comparing with each takes more than the scatter's 6.9 cycles a value."""


def _find(scope: Scope, at: int) -> Match | Mismatch | None:
    eqn = scope.eqns[at]
    elements, index = elements_by_id(scope, eqn) or (None, eqn.invars[1])
    size = 0 if elements is None else eqn.invars[0].aval.shape[elements.axis]
    ids = None if elements is None else chosen(scope, index, size)
    if ids is None and (elements is None or not elements.rows):
        return None  # a scatter of slices, or a count
    unnamed = unnamed_param(eqn)
    if unnamed is not None:
        return unnamed
    found = {"elements": elements, "index": index, "ids": ids, "size": size}
    return Match(scope, at, found)


def _into_zeros(match: Match) -> Reason | None:
    operand = match.eqn.invars[0]
    if match.scope.fact(operand).is_zero():
        return None
    return Reason("not-zeros", "the values are added to something",
                  describe_atom(match.scope, operand), "zeros")  # fmt: skip


def _by_choice(match: Match) -> Reason | None:
    if match.captures["ids"] is not None:
        return None
    value = origin(match.scope, match.captures["index"]).value
    return Reason("not-chosen", "the indices are not those of a top_k or argmax",
                  describe_atom(value.scope, value.atom),
                  "the indices of a top_k, an argmax or a sort")  # fmt: skip


def _distinct(match: Match) -> Reason | None:
    elements, ids = match.captures["elements"], match.captures["ids"]
    if ids is None:
        return None
    indices = match.captures["index"].aval
    rank = ids.atom.aval.ndim
    one = all(indices.shape[d] == 1 for d in elements.free)
    if one or (rank == indices.ndim - 1 and len(elements.free) == 1
               and distinct_along(ids, elements.free[0])):  # fmt: skip
        return None
    return Reason("not-distinct", "two indices of a row may be equal",
                  f"{describe_atom(ids.scope, ids.atom)}, by dimensions {elements.free}",
                  "the choices of one row along one dimension")  # fmt: skip


def _stays(match: Match) -> Reason | None:
    """Clipping could bring two indices together."""
    if match.captures["ids"] is None or match.eqn.params["mode"] is not _MODES.CLIP:
        return None
    fact = match.scope.fact(match.captures["index"])
    if fact.within(0, match.captures["size"] - 1):
        return None
    return Reason("clipped", "an index outside is brought to the nearest place", "mode CLIP",
                  f"indices known to lie in [0, {match.captures['size'] - 1}]")  # fmt: skip


def _fewer_cycles(match: Match) -> Reason | None:
    if match.captures["size"] <= _MOST_PLACES:
        return None
    return Reason("too-many-places", "comparing with each would cost more than the scatter",
                  f"{match.captures['size']} places", f"at most {_MOST_PLACES}")  # fmt: skip


def _replace(match: Match) -> Replacement:
    eqn, elements, size = match.eqn, match.captures["elements"], match.captures["size"]
    out = eqn.outvars[0].aval
    ids, updates = plain_index(match.scope, match.captures["index"]), eqn.invars[2]
    rank = updates.aval.ndim

    def summed(ids: Any, values: Any) -> Sequence[Any]:
        ids = lax.squeeze(ids, [rank]) if ids.ndim > rank else ids
        ids = lax.expand_dims(ids, [rank - 1]) if ids.ndim < rank else ids
        found = placed(elements.choices_first(ids), elements.choices_first(values), size)
        found = elements.places_last(found)
        return [weak(found) if out.weak_type else lax.convert_element_type(found, out.dtype)]

    return Replacement((ids, updates), tuple(eqn.outvars), summed, (elements, size))


def before(scores: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two experts a token and the transpose of choosing them.

    ``scores`` is ``[tokens, experts]``, ``ct`` the cotangents of the chosen ones, ``[tokens, 2]``.
    """
    top, choose = jax.vjp(lambda s: lax.top_k(s, 2)[0], scores)
    return top, *choose(ct)


def after(scores: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by comparisons."""
    top, ids = lax.top_k(scores, 2)
    ids, ct = ids.T, ct.T
    shape = scores.shape[1], scores.shape[0]
    expert, found = lax.broadcasted_iota(jnp.int32, shape, 0), jnp.zeros(shape)
    for i in range(2):
        here = lax.broadcast_in_dim(lax.index_in_dim(ids, i, keepdims=False), shape, (1,)) == expert
        value = lax.broadcast_in_dim(lax.index_in_dim(ct, i, keepdims=False), shape, (1,))
        found = lax.select(here, value, found)
    return top, found.T


PASS = Pass(
    name="top_k_scatter",
    contract=Contract.VALUE,
    summary="of each row, zeros.at[ids].add(ct), ids those of a top_k → where(ids == experts, ct, "
    "0).sum()",
    measure="scatter-adds",
    suggest="bring the cotangents to their places by comparisons, `jnp.where(ids == experts, "
    "ct, 0)`, in a `jax.custom_vjp` of the choice",
    roots=lambda: frozenset({primitive("scatter_add_p")}),
    find=_find,
    requirements=(
        Requirement("not-zeros", "The values are added to zeros.", _into_zeros),
        Requirement(
            "not-chosen", "The indices are those of a top_k, an argmax or a sort.", _by_choice
        ),
        Requirement("not-distinct", "The indices of a row are known to differ.", _distinct),
        Requirement("clipped", "Clipping brings no two indices together.", _stays),
    ),
    profitable=_fewer_cycles,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((32, 16), jnp.float32),
                jax.ShapeDtypeStruct((32, 2), jnp.float32),
            ),
            "two experts a token",
        ),
    ),
)
