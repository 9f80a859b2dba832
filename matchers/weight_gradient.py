"""Weight gradients: the operations that make them, and the parameters that they are of.

jax transposes an equation in the name of the place where it was written: what it leaves has that
equation's stack of calls in the user's code, and ``transpose(…)`` in its name stack.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..compat import jaxprs
from ..compat.bodies import Role
from ..compat.kernel_parts import is_kernel
from ..compat.primitives import primitive
from ..compat.source import call_stack
from .dataflow import Dataflow
from .graph import Scope
from .value_walk import Place, backward

_MAKERS = "dot_general_p ragged_dot_general_p conv_general_dilated_p scatter_add_p"


@functools.cache
def makers() -> frozenset[Any]:
    """The primitives that make the gradient of a matrix, a filter or a table."""
    found = {primitive(name) for name in _MAKERS.split()}
    return frozenset(found - {None})


def is_transposed(scope: Scope, index: int) -> bool:
    """Whether an equation belongs to a backward pass, and not to what that recomputes."""
    stack = scope.name_stack(scope.eqns[index])
    return stack.rfind("transpose(") > stack.rfind("rematted_computation")


def transposed_makers(flow: Dataflow) -> list[Place]:
    """Every equation of a backward pass that may make a weight's gradient, dead ones included."""
    return [
        (scope, index)
        for scope in flow.scopes
        if not _in_kernel(scope)
        for index, eqn in enumerate(scope.eqns)
        if eqn.primitive in makers() and is_transposed(scope, index)
    ]


def transposed_kernels(flow: Dataflow) -> list[Place]:
    """Every Pallas kernel of a backward pass that makes several results."""
    return [
        (scope, index)
        for scope in flow.scopes
        if not _in_kernel(scope)
        for index in scope.children
        if len(scope.eqns[index].outvars) > 1
        and is_kernel(scope.eqns[index])
        and is_transposed(scope, index)
    ]


def _in_kernel(scope: Scope) -> bool:
    """Whether a body is a kernel's, on references: what it makes is the kernel's to make."""
    return any(c.entered.role is Role.KERNEL for c in scope.path())


@dataclass(frozen=True)
class Parameters:
    """Which of the program's inputs each weight gradient is a gradient with respect to."""

    _forward: dict[tuple[Any, ...], list[Place]]
    """By call stack and primitive."""
    _known: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, flow: Dataflow) -> Parameters:
        """Read a program's forward pass."""
        forward: dict[tuple[Any, ...], list[Place]] = {}
        read = makers() | {primitive("gather_p")}
        for scope in flow.scopes:
            for index in scope.live:
                eqn = scope.eqns[index]
                if eqn.primitive in read and not is_transposed(scope, index):
                    key = _stack(scope, eqn), eqn.primitive
                    forward.setdefault(key, []).append((scope, index))
        return cls(forward)

    def behind(self, place: Place) -> list[int]:
        """The inputs whose gradient an equation makes: usually one, none where that isn't clear."""
        scope, index = place
        known = self._known.get((id(scope), index))
        if known is None:
            known = self._known[id(scope), index] = self._behind(scope, index)
        return known

    def _behind(self, scope: Scope, index: int) -> list[int]:
        eqn = scope.eqns[index]
        scattered = eqn.primitive is primitive("scatter_add_p")
        wanted = primitive("gather_p") if scattered else eqn.primitive
        found: dict[int, None] = {}
        for inner, at in self._forward.get((_stack(scope, eqn), wanted), []):
            for atom in _alike(inner, at, shapes(eqn)):
                found.update(dict.fromkeys(backward(inner, atom)[1]))
        return list(found)


def _stack(scope: Scope, eqn: Any) -> tuple[Any, ...]:
    """The call stack of an equation; jax's own functions are traced once and know none."""
    stack = call_stack(eqn)
    while not stack and scope.callers:
        caller = scope.callers[0]
        stack = call_stack(caller.scope.eqns[caller.index])
        scope = caller.scope
    return stack


def shapes(eqn: Any) -> list[list[int]]:
    """The shapes that a weight may have of which this is the gradient, each in order of size.

    Under `jax.vmap` the gradients of a weight that isn't mapped are made side by side.
    """
    shape = list(eqn.outvars[0].aval.shape)
    batch = 0
    if eqn.primitive is primitive("dot_general_p"):
        batch = len(eqn.params["dimension_numbers"][1][0])
    return [sorted(shape), sorted(shape[batch:])]


def _alike(scope: Scope, index: int, shapes: list[list[int]]) -> Iterator[Any]:
    """The operands of one of some shapes, up to the order of its dimensions."""
    for atom in scope.eqns[index].invars:
        if not jaxprs.is_literal(atom) and sorted(atom.aval.shape) in shapes:
            yield atom
