"""Recognise a mask that holds only where an integer key lies in a window of known width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .fact import limits
from .graph import Scope, Value
from .origin import behind
from .subjects import is_alias


@dataclass(frozen=True)
class Window:
    """``lo <= key < lo + width`` at every element where the mask holds."""

    lo: int | Value
    """A number, or one that is the same for all elements but only known when the program runs."""
    width: int


@dataclass(frozen=True)
class _Bound:
    """``key - base >= least`` or ``key - base <= most``, in exact integers."""

    base: Value | None
    """Uniform; None is zero."""
    least: int | None = None
    most: int | None = None


def key_window(scope: Scope, mask: Atom, key: Value) -> Window | None:
    """The window that a mask restricts ``key`` to; None where that can't be proven.

    The mask is a conjunction, or the negation of a disjunction, and may be computed in a call.
    Among its terms must be a lower and an upper bound relative to one base: ``key >= base`` and
    ``key < base + width``, in any spelling; or constants, or what is known of the key's range.
    """
    assumed, key = key, behind(key)
    found_bounds = (_bound(term, key, holds) for term, holds in _terms(scope, mask))
    bounds = [b for b in found_bounds if b is not None]
    if not bounds:
        return None
    bases = {b.base for b in bounds}
    known = assumed.scope.fact(assumed.atom).range(key.atom.aval.dtype)
    bounds.append(_Bound(None, *known))
    found: Window | None = None
    for base in bases:
        least = [b.least for b in bounds if b.base == base and b.least is not None]
        most = [b.most for b in bounds if b.base == base and b.most is not None]
        if not least or not most:
            continue
        width = max(min(most) - max(least) + 1, 0)
        if base is not None and max(least) != 0:
            continue  # base + least would have to be computed, and might overflow
        if found is None or width < found.width:
            found = Window(max(least) if base is None else base, width)
    return found


def _terms(scope: Scope, mask: Atom, holds: bool = True) -> Iterator[tuple[Value, bool]]:
    """What must hold, or must not, wherever the mask holds, or doesn't."""
    value = scope.resolve(mask)
    producer = None if jaxprs.is_literal(value.atom) else value.scope.producer(value.atom)
    if producer is None:
        return
    eqn, inner = producer.eqn, producer.scope
    if eqn.primitive is primitive("and_p" if holds else "or_p"):
        for operand in eqn.invars:
            yield from _terms(inner, operand, holds)
    elif eqn.primitive is primitive("not_p"):
        yield from _terms(inner, eqn.invars[0], not holds)
    elif is_alias(eqn):
        yield from _terms(inner, eqn.invars[producer.result], holds)
    else:
        yield value, holds


_FLIPPED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt", "eq": "eq"}
_NEGATED = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _bound(term: Value, key: Value, holds: bool) -> _Bound | None:
    """What a comparison says of the key, where it holds or where it doesn't."""
    producer = None if jaxprs.is_literal(term.atom) else term.scope.producer(term.atom)
    if producer is None or producer.eqn.primitive not in _comparisons():
        return None
    name, scope = producer.eqn.primitive.name, producer.scope
    name = name if holds else _NEGATED[name]
    if name == "ne":
        return None
    left, right = producer.eqn.invars
    if limits(left.aval.dtype) is None:
        return None
    for side, other, how in ((left, right, name), (right, left, _FLIPPED[name])):
        if behind(scope.resolve(side)) == key:
            return _against(scope, other, how)
        base = _subtracted(scope, side, key)
        number = scope.fact(other).constant
        if base is not None and number is not None:
            return _compared(base, int(number.value), how)
    return None


def _subtracted(scope: Scope, atom: Atom, key: Value) -> Value | None:
    """``base`` where the atom is ``key - base`` and that can't overflow."""
    producer = None if jaxprs.is_literal(atom) else scope.producer(atom)
    if producer is None or producer.eqn.primitive is not primitive("sub_p"):
        return None
    inner, (left, right) = producer.scope, producer.eqn.invars
    dtype = left.aval.dtype
    limit, ours, base = limits(dtype), inner.fact(left).range(dtype), inner.fact(right).range(dtype)
    assert limit is not None
    exact = limit[0] <= ours[0] - base[1] and ours[1] - base[0] <= limit[1]
    uniform = _uniform(inner, right)
    ours_is_key = behind(inner.resolve(left)) == key
    return uniform[0] if exact and ours_is_key and uniform and not uniform[1] else None


def _against(scope: Scope, other: Atom, how: str) -> _Bound | None:
    number = scope.fact(other).constant
    if number is not None:
        base, offset = None, int(number.value)
    else:
        uniform = _uniform(scope, other)
        if uniform is None:
            return None
        base, offset = uniform
    return _compared(base, offset, how)


def _compared(base: Value | None, offset: int, how: str) -> _Bound:
    least = {"ge": offset, "gt": offset + 1, "eq": offset}.get(how)
    most = {"le": offset, "lt": offset - 1, "eq": offset}.get(how)
    return _Bound(base, least, most)


def _uniform(scope: Scope, atom: Atom) -> tuple[Value, int] | None:
    """A scalar, repeated, and a number added to it: ``base + offset`` where nothing overflows."""
    value = behind(scope.resolve(atom))
    offset = 0
    while True:
        producer = None if jaxprs.is_literal(value.atom) else value.scope.producer(value.atom)
        eqn: Any = None if producer is None else producer.eqn
        if producer is None:
            break
        inner = producer.scope
        if eqn.primitive is primitive("broadcast_in_dim_p") or (
            eqn.primitive is primitive("reshape_p") and eqn.invars[0].aval.shape == ()
        ):
            value = behind(inner.resolve(eqn.invars[0]))
        elif eqn.primitive is primitive("add_p"):
            added = _added(inner, eqn)
            if added is None:
                break
            value, offset = behind(inner.resolve(added[0])), offset + added[1]
        else:
            break
    return (value, offset) if getattr(value.atom.aval, "shape", None) == () else None


def _added(scope: Scope, eqn: Any) -> tuple[Atom, int] | None:
    """The other operand of a sum with a number that can't be seen to be negative.

    Should the sum overflow, it falls below its base: then no key is at least the base and less than
    the sum, which is what a window needs.
    """
    for atom, other in (eqn.invars, eqn.invars[::-1]):
        number = scope.fact(other).constant
        if number is not None and number.value >= 0:
            return atom, int(number.value)
    return None


def _comparisons() -> frozenset[Any]:
    return frozenset(primitive(f"{name}_p") for name in _NEGATED)
