"""Recognise a logistic, and ``x * logistic(x)``, as an operation or written out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .graph import Scope


class Spelling(Enum):
    """How a program writes ``x * logistic(x)``."""

    LOGISTIC = "x * logistic(x)"
    RECIPROCAL = "x * (1 / (1 + exp(-x)))"
    QUOTIENT = "x / (1 + exp(-x))"


@dataclass(frozen=True)
class Operand:
    """What a logistic, or SiLU, is of."""

    scope: Scope
    """The body of the equation found."""
    atom: Atom
    spelling: Spelling


def logistic_of(scope: Scope, atom: Atom) -> Operand | None:
    """What an atom is the logistic of, seen through calls."""
    made = scope.producer(atom)
    if made is None:
        return None
    eqn = made.eqn
    if eqn.primitive is primitive("logistic_p"):
        return Operand(made.scope, eqn.invars[0], Spelling.LOGISTIC)
    below: Atom | None = None
    if eqn.primitive is primitive("div_p") and _is_one(made.scope, eqn.invars[0]):
        below = eqn.invars[1]
    elif eqn.primitive is primitive("integer_pow_p") and eqn.params["y"] == -1:
        below = eqn.invars[0]
    found = None if below is None else denominator_of(made.scope, below)
    return None if found is None else Operand(*found, Spelling.RECIPROCAL)


def silu_of(scope: Scope, atom: Atom) -> Operand | None:
    """What an atom is SiLU of, seen through calls."""
    made = scope.producer(atom)
    if made is None:
        return None
    inner, eqn = made.scope, made.eqn
    if eqn.primitive is primitive("div_p"):
        found = denominator_of(inner, eqn.invars[1])
        if found is not None and found[0].resolve(found[1]) == inner.resolve(eqn.invars[0]):
            return Operand(inner, eqn.invars[0], Spelling.QUOTIENT)
    if eqn.primitive is not primitive("mul_p"):
        return None
    for x, sigmoid in (eqn.invars, eqn.invars[::-1]):
        of = logistic_of(inner, sigmoid)
        if of is not None and of.scope.resolve(of.atom) == inner.resolve(x):
            return Operand(inner, x, of.spelling)
    return None


def denominator_of(scope: Scope, atom: Atom) -> tuple[Scope, Atom] | None:
    """The ``x`` of ``1 + exp(-x)``, and the body in which it is negated."""
    added = scope.producer(atom)
    if added is None or added.eqn.primitive is not primitive("add_p"):
        return None
    for one, power in (added.eqn.invars, added.eqn.invars[::-1]):
        raised = added.scope.producer(power)
        if raised is None or raised.eqn.primitive is not primitive("exp_p"):
            continue
        negated = raised.scope.producer(raised.eqn.invars[0])
        if negated is None or negated.eqn.primitive is not primitive("neg_p"):
            continue
        if _is_one(added.scope, one):
            return negated.scope, negated.eqn.invars[0]
    return None


def _is_one(scope: Scope, atom: Atom) -> bool:
    known = scope.fact(atom).constant
    return known is not None and bool(known.value == 1)
