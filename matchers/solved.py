"""Triangular solves, and the inverses that they have computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .graph import Scope
from .identity import bare, is_identity


def solve() -> Any:
    """The primitive of `lax.linalg.triangular_solve`."""
    return primitive("triangular_solve_p")


@dataclass(frozen=True)
class AtHand:
    """A solve that has computed the inverse of a site's matrix, or its transpose."""

    atom: Atom
    """Its result, in the site's body."""
    transposed: bool
    """Whether it is the transpose of what the site multiplies by."""


def inverse_at_hand(scope: Scope, index: int) -> AtHand | None:
    """The inverse of the matrix that a solve is by, where an equation before it has computed it."""
    eqn = scope.eqns[index]
    matrix, shape = bare(scope, eqn.invars[0]), eqn.invars[0].aval.shape
    made = (v for i in scope.live if i < index for v in scope.eqns[i].outvars)
    for var in (*jaxprs.opened(scope.body).invars, *made):
        found = getattr(var.aval, "shape", ())
        if found[-2:] != shape[-2:] or math.prod(found) != math.prod(shape):
            continue
        value = bare(scope, var)
        solve = None if jaxprs.is_literal(value.atom) else value.scope.producer(value.atom)
        if solve is None or solve.eqn.primitive is not eqn.primitive:
            continue
        other = solve.eqn
        alike = all(other.params[n] == eqn.params[n] for n in ("lower", "unit_diagonal"))
        same = bare(solve.scope, other.invars[0]) == matrix
        if alike and same and is_identity(solve.scope, other.invars[1]):
            return AtHand(var, other.params["transpose_a"] != eqn.params["transpose_a"])
    return None
