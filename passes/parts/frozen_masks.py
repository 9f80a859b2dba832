"""Masks that a gradient meets: selects by a constant, and products with zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...compat import jaxprs
from ...compat.jaxprs import Var
from ...compat.mesh_types import differs_only_in_mesh
from ...compat.primitives import primitive
from ...matchers.dataflow import Dataflow
from ...matchers.demand import Cut
from ...matchers.graph import Scope
from ...matchers.value_walk import Place


@functools.cache
def _is_float(dtype: Any) -> bool:
    """Whether a value may be a gradient at all."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@functools.cache
def masks() -> frozenset[Any]:
    """The primitives of equations that mask."""
    return frozenset({primitive("select_n_p"), primitive("mul_p")})


def any_mask(flow: Dataflow) -> bool:
    """Whether a float is selected by a constant or multiplied by zero, a gradient or not."""
    select, product = primitive("select_n_p"), primitive("mul_p")
    for scope in flow.scopes:
        constant = scope.facts.constant
        for eqn in (scope.eqns[i] for i in scope.places.get(select, ())):
            if constant(eqn.invars[0]) is not None and _is_float(eqn.outvars[0].aval.dtype):
                return True
        for eqn in (scope.eqns[i] for i in scope.places.get(product, ())):
            known = (constant(a) for a in eqn.invars)
            zero = any(k is not None and k.value == 0 for k in known)
            if zero and _is_float(eqn.outvars[0].aval.dtype):
                return True
    return False


class Cutter:
    """Masks: equations that drop a gradient, or multiply it by zero."""

    def __init__(self, gradients: Callable[[], set[tuple[int, Var]]]) -> None:
        """``gradients`` finds all of a program, by ``(id(scope), variable)``."""
        self._find_gradients = gradients
        self.zeros: list[Place] = []
        """Where a gradient is multiplied by zero."""

    def cut(self, scope: Scope, index: int, finite: bool) -> Cut | None:
        """What a mask's result is without the gradients that it masks; None for anything else."""
        eqn = scope.eqns[index]
        if eqn.primitive not in masks() or not _is_float(eqn.outvars[0].aval.dtype):
            return None
        if eqn.primitive is primitive("select_n_p"):
            return self._selected(scope, index)
        for operand in (0, 1):
            known = scope.facts.constant(eqn.invars[1 - operand])
            if known is not None and known.value == 0 and self._is_gradient(scope, index, operand):
                self.zeros.append((scope, index))
                return Cut(None) if finite else None
        return None

    def _selected(self, scope: Scope, index: int) -> Cut | None:
        eqn = scope.eqns[index]
        known = scope.facts.constant(eqn.invars[0])
        if known is None:
            return None
        chosen = 1 + int(known.value)
        if chosen >= len(eqn.invars):
            return None
        found, wanted = eqn.invars[chosen].aval, eqn.outvars[0].aval
        if found != wanted and not differs_only_in_mesh(found, wanted):
            return None
        masked = [o for o in range(1, len(eqn.invars)) if o != chosen]
        return Cut(chosen) if any(self._is_gradient(scope, index, o) for o in masked) else None

    @functools.cached_property
    def _gradients(self) -> set[tuple[int, Var]]:
        """Found once there is a mask by a constant, which most programs have none of."""
        return self._find_gradients()

    def _is_gradient(self, scope: Scope, index: int, operand: int) -> bool:
        atom = scope.eqns[index].invars[operand]
        return not jaxprs.is_literal(atom) and (id(scope), atom) in self._gradients
