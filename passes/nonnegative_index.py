"""nonnegative_index: the wrap-around of an index that can't be negative is removed.

before:  ``select_n(i < 0, i, i + n)`` with ``i`` known to be at least 0
after:   ``i``

jax writes the select around every ``x[i]``, for Python's negative indices; where ``i`` is weakly
typed, as a ``fori_loop``'s counter is, it strengthens the ``i`` that it adds to. It helps where the
index array is large or the select keeps a gather's indices from being recognised; it costs nothing.
The compiler removes it only where it can see the range, as of an iota in the same fusion. Fused
into what makes the index it is next to nothing: 63 of 107,163 estimated TPU7x cycles where 81,920
indices come from a sort; where it stands alone, 1,360 for 8,192 of them (libtpu 0.0.52).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat import jaxprs
from ..compat.mesh_types import differs_only_in_mesh, told_apart
from ..compat.tracing import primitive
from ..matchers.fact import limits
from ..matchers.graph import Scope
from ..matchers.in_kernel import in_kernel
from ..matchers.pattern import Captures, Mismatch
from ..matchers.wrapped_index import wrapped_index
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .suggestion import Edit, Suggestion


def _select_n() -> Any:
    return primitive("lax.lax.select_n_p")


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    captures: Captures = {}
    chosen = scope.eqns[index].invars[1]
    if jaxprs.is_literal(chosen) or limits(chosen.aval.dtype) is None:
        return None  # of constants only, which any compiler folds; or of what is no index
    # A select of another kind is no near miss of this one, so a mismatch is not reported.
    if wrapped_index().match_equation(scope, index, captures) is not None:
        return None
    return Match(scope, index, captures)


def _nonnegative(match: Match) -> Reason | None:
    fact = match.scope.fact(match.eqn.invars[1])
    if fact.lo is not None and fact.lo >= 0:
        return None
    found = "no lower bound" if fact.lo is None else f"a lower bound of {fact.lo}"
    return Reason("maybe-negative", "the index is not known to be at least 0", found,
                  "a lower bound of 0 or more")  # fmt: skip


def _same_type(match: Match) -> Reason | None:
    found, wanted = match.eqn.invars[1].aval, match.eqn.outvars[0].aval
    if found.weak_type and not wanted.weak_type:
        found = found.strip_weak_type()
    if found == wanted or differs_only_in_mesh(found, wanted):
        return None
    return Reason("type-change", "the index has another type than the select",
                  *told_apart(found, wanted))  # fmt: skip


def _replace(match: Match) -> Replacement:
    eqn = match.eqn
    strong = eqn.invars[1].aval.weak_type and not eqn.outvars[0].aval.weak_type

    def strengthened(index: Any) -> Sequence[Any]:
        return [lax.convert_element_type(index, index.dtype)]

    fn = strengthened if strong else None
    return Replacement((eqn.invars[1],), tuple(eqn.outvars), fn, (strong,))


def _suggest(match: Match) -> Suggestion:
    said = "say that the index isn't negative: `x.at[i].get(wrap_negative_indices=False)`"
    if in_kernel(match.scope) is not False:
        return Suggestion(said)
    given = "the index is never negative"
    text = "{value}.at[{index}].get(wrap_negative_indices=False)"
    read = Edit("subscript", text, given=given)
    written = Edit("call", "{call}, wrap_negative_indices=False)", ("at[].*",), given=given)
    return Suggestion(said, (read, written))


def before(scores: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of ``table``, ``f32[experts, d]``, by the best of ``scores``, ``f32[n, experts]``."""
    return table[jnp.argmax(scores, axis=-1)]


def after(scores: jax.Array, table: jax.Array) -> jax.Array:
    """The same rows by the index as it is."""
    return table.at[jnp.argmax(scores, axis=-1)].get(wrap_negative_indices=False)


PASS = Pass(
    name="nonnegative_index",
    contract=Contract.BITWISE,
    summary="select_n(i < 0, i, i + n) with i ≥ 0 → i",
    measure="selects",
    suggest=_suggest,
    roots=lambda: frozenset({_select_n()}),
    find=_find,
    requirements=(
        Requirement("maybe-negative", "The index is known to be at least 0.", _nonnegative),
        Requirement("type-change", "Index and select have the same type.", _same_type),
    ),
    profitable=lambda match: None,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((256, 32), jnp.float32),
                jax.ShapeDtypeStruct((32, 8), jnp.float32),
            ),
            "best expert",
        ),
    ),
)
