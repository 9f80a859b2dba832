"""How facts pass between an equation and the bodies that it carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compat import jaxprs
from ..compat.bodies import Entered, Flow, Port
from .fact import UNKNOWN, Fact, default_of
from .transfer_layout import scanned_slice, scanned_stack, shard, unshard


def inflow(eqn: jaxprs.Eqn, entered: Entered, operands: Sequence[Fact]) -> tuple[Fact, ...]:
    """Facts about a body's inputs, from those about the equation's operands.

    Of a carried value, they are about the first iteration only.
    """
    invars = jaxprs.invars(entered.body)
    return tuple(_enters(eqn, p, v.aval, operands) for p, v in zip(entered.inputs, invars))


def _enters(eqn: jaxprs.Eqn, port: Port, aval: Any, operands: Sequence[Fact]) -> Fact:
    if port.outer is None or port.flow is Flow.UNKNOWN:
        return UNKNOWN
    fact = operands[port.outer]
    if fact is UNKNOWN or port.flow in (Flow.SAME, Flow.CARRY):
        return fact
    outer = eqn.invars[port.outer].aval
    if not _static(outer, aval) or _partial_sums(port.spec):
        return UNKNOWN
    return scanned_slice(fact, aval) if port.flow is Flow.SLICE else shard(fact, outer, aval)


def outflow(eqn: jaxprs.Eqn, entered: Entered, results: Sequence[Fact]) -> list[tuple[int, Fact]]:
    """Facts about an equation's results, by index, from those about a body's outputs.

    Of a carried value, they are about the last iteration only.
    """
    outvars = jaxprs.opened(entered.body).outvars
    return [
        (port.outer, _leaves(eqn, port, var.aval, fact))
        for port, var, fact in zip(entered.outputs, outvars, results)
        if port.outer is not None
    ]


def _leaves(eqn: jaxprs.Eqn, port: Port, aval: Any, fact: Fact) -> Fact:
    assert port.outer is not None
    outer = eqn.outvars[port.outer].aval
    if port.flow in (Flow.SAME, Flow.CARRY):
        return fact
    if port.flow is Flow.UNKNOWN or not _static(outer, aval) or _partial_sums(port.spec):
        return default_of(outer)
    return scanned_stack(fact, outer) if port.flow is Flow.SLICE else unshard(fact, aval, outer)


def _static(*avals: Any) -> bool:
    return all(type(n) is int for a in avals for n in getattr(a, "shape", (None,)))


def _partial_sums(spec: Any) -> bool:
    """Whether an array's value is the sum of what the devices hold."""
    return bool(getattr(spec, "unreduced", None))
