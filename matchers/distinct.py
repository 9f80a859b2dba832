"""Recognise indices that a routing chose, no index twice in a row."""

from __future__ import annotations

from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .graph import Scope, Value
from .grouped import kept_inside
from .origin import origin


def chosen(scope: Scope, atom: Any, size: int) -> Value | None:
    """Where indices come from that a top_k, an argmax or a sort chose; None for any others.

    Some may have been replaced by one index outside ``size`` places.
    """
    value = origin(scope, atom).value
    kept = kept_inside(value, size)
    value = value if kept is None else origin(kept.scope, kept.atom).value
    if jaxprs.is_literal(value.atom):
        return None
    return value if _choice(value) else None


def distinct_along(value: Value, axis: int) -> bool:
    """Whether the `chosen` indices are known to differ along an axis."""
    found = value.scope.definition(value.atom)
    if value.atom.aval.shape[axis] == 1 or value.scope.fact(value.atom).permutation == axis:
        return True
    if found is None:
        return False
    eqn = value.scope.eqns[found[0]]
    if eqn.primitive is primitive("top_k_p"):
        return bool(eqn.params.get("axis", -1) % eqn.outvars[0].aval.ndim == axis)
    if eqn.primitive is primitive("slice_p"):
        return value.scope.fact(eqn.invars[0]).permutation == axis
    return False


def _choice(value: Value) -> bool:
    found = value.scope.definition(value.atom)
    if found is None:
        return False
    eqn = value.scope.eqns[found[0]]
    if eqn.primitive is primitive("top_k_p"):
        return found[1] == 1
    if eqn.primitive is primitive("slice_p"):
        return value.scope.fact(eqn.invars[0]).permutation is not None
    return eqn.primitive in (primitive("argmax_p"), primitive("argmin_p")) or (
        value.scope.fact(value.atom).permutation is not None
    )
