"""Recognise a mask that is true where a key lies in a window: ``lo <= key < hi``.

The ends may be numbers or scalars that the program computes, such as the first expert of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .graph import Scope, Value
from .subjects import is_alias

_DEPTH = 16


@dataclass(frozen=True)
class End:
    """One end of a window: ``value + shift``, or ``shift`` alone."""

    value: Value | None
    """A scalar of the key's dtype; None for a number."""
    shift: int


@dataclass(frozen=True)
class Window:
    """A mask that is true exactly where ``lo <= key < hi`` in exact integers."""

    key: Value
    lo: End | None
    """None: the window has no lower end."""
    hi: End | None


def range_where(scope: Scope, mask: Atom, atom: Atom, holds: bool = True) -> tuple[int, int] | None:
    """The range of an integer array at the places where a mask of its shape is true.

    Args:
        scope: The body of both.
        mask: A bool array.
        atom: An integer or bool array.
        holds: Whether to tell of the places where the mask is true or where it is false.

    Returns:
        Inclusive bounds; None where the mask is known never to come out so.
    """
    if mask.aval.shape != atom.aval.shape:
        raise ValueError(f"found a mask of {mask.aval.shape} for an array of {atom.aval.shape}, "
                         "wanted one shape")  # fmt: skip
    guard = scope.facts.guards.of(mask)
    fact = scope.facts.guards.narrowed(atom, guard.true if holds else guard.false)
    return None if fact is None else fact.range(atom.aval.dtype)


def find_window(scope: Scope, mask: Atom) -> Window | None:
    """The window that a mask is, seen through calls; None if it is none, or of several keys."""
    conditions = list(_conditions(scope, mask, True, _DEPTH))
    if not conditions or None in conditions:
        return None
    known = [c for c in conditions if c is not None]
    keys = [key for key in (known[0][0], known[0][1]) if _is_array(key)]
    for key in keys:
        found = _of_key(key, known)
        if found is not None:
            return found
    return None


_Condition = tuple[Value, Value, int]
"""``low + gap <= high``."""


def _of_key(key: Value, conditions: list[_Condition]) -> Window | None:
    lo: End | None = None
    hi: End | None = None
    for low, high, gap in conditions:
        if high == key and lo is None:
            lo = _end(low, gap)
            if lo is None:
                return None
        elif low == key and hi is None:
            hi = _end(high, 1 - gap)
            if hi is None:
                return None
        else:
            return None
    return Window(key, lo, hi)


def _end(value: Value, shift: int) -> End | None:
    """A scalar, spread over the key's shape or not, or a known number."""
    constant = value.scope.fact(value.atom).constant
    if constant is not None:
        return End(None, int(constant.value) + shift)
    while _is_array(value):
        made = value.scope.producer(value.atom)
        if made is None or made.eqn.primitive is not primitive("broadcast_in_dim_p"):
            return None
        value = made.scope.resolve(made.eqn.invars[0])
    return End(value, shift)


def _is_array(value: Value) -> bool:
    return value.atom.aval.shape != ()  # type: ignore[no-any-return]


def _conditions(scope: Scope, mask: Atom, wanted: bool, depth: int) -> Iterator[_Condition | None]:
    """The comparisons that must all hold for a mask to be as wanted; None for anything else."""
    made = None if jaxprs.is_literal(mask) else scope.producer(mask)
    if made is None or not depth:
        yield None
        return
    scope, eqn = made.scope, made.eqn
    operands = eqn.invars
    joins = primitive("and_p") if wanted else primitive("or_p")
    if eqn.primitive is joins:
        for operand in operands:
            yield from _conditions(scope, operand, wanted, depth - 1)
    elif eqn.primitive is primitive("not_p"):
        yield from _conditions(scope, operands[0], not wanted, depth - 1)
    elif is_alias(eqn):
        yield from _conditions(scope, operands[made.result], wanted, depth - 1)
    else:
        yield _comparison(scope, eqn, wanted)


def _comparison(scope: Scope, eqn: jaxprs.Eqn, wanted: bool) -> _Condition | None:
    """A comparison of integers as ``low + gap <= high``."""
    if len(eqn.invars) != 2 or eqn.invars[0].aval.dtype.kind not in "iu":
        return None
    x, y = (scope.resolve(atom) for atom in eqn.invars)
    orders = {
        primitive("lt_p"): (x, y, 1),
        primitive("le_p"): (x, y, 0),
        primitive("gt_p"): (y, x, 1),
        primitive("ge_p"): (y, x, 0),
    }
    found = orders.get(eqn.primitive)
    if found is None or wanted:
        return found
    low, high, gap = found
    return high, low, 1 - gap  # not low + gap <= high
