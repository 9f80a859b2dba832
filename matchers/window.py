"""Recognise a mask that holds only where an integer key lies in a window of known width."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .fact import limits
from .graph import Producer, Scope, Value
from .origin import behind
from .subjects import is_alias


@dataclass(frozen=True)
class Window:
    """``lo <= key < lo + width`` at every element where the mask holds."""

    lo: int | Value = field(compare=False)
    """A number, or one that is the same for all elements but only known when the program runs."""
    width: int
    start: Hashable
    """Equal for two windows that start alike, whichever values hold where."""


@dataclass(frozen=True)
class _Base:
    """A scalar times a number, as ``axis_index * experts``."""

    scalar: Hashable
    """A value; or of an axis index, which: two of one axis in one body are equal."""
    factor: int
    value: Value = field(compare=False)
    """The scalar."""


@dataclass(frozen=True)
class _Uniform:
    """``base + offset``, the same for all elements."""

    base: _Base
    offset: int
    value: Value
    """What holds it."""
    exact: bool
    """Whether no sum in it can have overflowed."""


@dataclass(frozen=True)
class _Bound:
    """``key - base >= least`` or ``key - base <= most``, in exact integers."""

    base: _Base | None
    """Uniform; None is zero."""
    least: int | None = None
    most: int | None = None
    at: Value | None = None
    """What holds ``base + least``, where something does."""


def key_window(scope: Scope, mask: Atom, key: Value) -> Window | None:
    """The window that a mask restricts ``key`` to; None where that can't be proven.

    The mask is a conjunction, or the negation of a disjunction, and may be computed in a call.
    Among its terms must be a lower and an upper bound relative to one base: ``key >= base`` and
    ``key < base + width``, in any spelling, as ``i * n`` and ``(i + 1) * n``; or constants, or what
    is known of the key's range.
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
        first = max(least)
        width = max(min(most) - first + 1, 0)
        lo = first if base is None else _start(base, first, bounds)
        if lo is None:
            continue  # base + least would have to be computed, and might overflow
        if found is None or width < found.width:
            found = Window(lo, width, (base, first))
    return found


def _start(base: _Base, least: int, bounds: list[_Bound]) -> Value | None:
    """What holds ``base + least``."""
    if least == 0 and base.factor == 1:
        return base.value
    return next((b.at for b in bounds if b.base == base and b.least == least and b.at), None)


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
        taken = _subtracted(scope, side, key)
        number = scope.fact(other).constant
        if taken is not None and number is not None:
            bound = _compared(taken.base, taken.offset + int(number.value), how)
            return replace(bound, at=taken.value) if number.value == 0 and how == "ge" else bound
    return None


def _subtracted(scope: Scope, atom: Atom, key: Value) -> _Uniform | None:
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
    return uniform if exact and ours_is_key and uniform and uniform.exact else None


def _against(scope: Scope, other: Atom, how: str) -> _Bound | None:
    number = scope.fact(other).constant
    if number is not None:
        return _compared(None, int(number.value), how)
    uniform = _uniform(scope, other)
    if uniform is None:
        return None
    bound = _compared(uniform.base, uniform.offset, how)
    return replace(bound, at=uniform.value) if how in ("ge", "eq") and uniform.exact else bound


def _compared(base: _Base | None, offset: int, how: str) -> _Bound:
    least = {"ge": offset, "gt": offset + 1, "eq": offset}.get(how)
    most = {"le": offset, "lt": offset - 1, "eq": offset}.get(how)
    return _Bound(base, least, most)


def _uniform(scope: Scope, atom: Atom) -> _Uniform | None:
    """A scalar, repeated, times a number and with a number added: ``factor · scalar + offset``.

    A sum with a number that isn't negative may overflow, but not within a product. Should it, it
    falls below its base: then no key is at least the base and less than the sum, which is what a
    window needs.
    """
    value = behind(scope.resolve(atom))
    factor, offset, exact = 1, 0, True
    whole: Value | None = None
    while (producer := _made(value)) is not None:
        eqn, inner = producer.eqn, producer.scope
        if eqn.primitive is primitive("broadcast_in_dim_p") or (
            eqn.primitive is primitive("reshape_p") and eqn.invars[0].aval.shape == ()
        ):
            value = behind(inner.resolve(eqn.invars[0]))
            continue
        if getattr(value.atom.aval, "shape", None) != ():
            return None
        whole = value if whole is None else whole
        step = _step(inner, eqn, factor)
        if step is None:
            break
        (source, times, added), known = step
        offset, factor, exact = offset + factor * added, factor * times, exact and known
        value = behind(inner.resolve(source))
    if getattr(value.atom.aval, "shape", None) != ():
        return None
    return _Uniform(_Base(_which(value), factor, value), offset, whole or value, exact)


def _made(value: Value) -> Producer | None:
    return None if jaxprs.is_literal(value.atom) else value.scope.producer(value.atom)


def _which(value: Value) -> Hashable:
    """The value, or which axis index it is."""
    producer = _made(value)
    if producer is None or producer.eqn.primitive is not primitive("axis_index_p"):
        return value
    return "axis_index", id(producer.scope), str(producer.eqn.params["axis_name"])


def _step(scope: Scope, eqn: Any, factor: int) -> tuple[tuple[Atom, int, int], bool] | None:
    """``source · times + added`` that an equation computes, and whether that is known exact."""
    names = {primitive(f"{n}_p"): n for n in ("add", "sub", "mul")}
    name = names.get(eqn.primitive)
    limit = limits(eqn.outvars[0].aval.dtype)
    if name is None or limit is None:
        return None
    left, right = eqn.invars
    for source, other in ((left, right),) if name == "sub" else ((left, right), (right, left)):
        number = scope.fact(other).constant
        if number is None:
            continue
        n = int(number.value)
        times, added = (n, 0) if name == "mul" else (1, n if name == "add" else -n)
        ends = [times * end + added for end in scope.fact(source).range(source.aval.dtype)]
        exact = limit[0] <= min(ends) and max(ends) <= limit[1]
        falls = name == "add" and n >= 0 and factor == 1
        if times > 0 and (exact or falls):
            return (source, times, added), exact
    return None


def _comparisons() -> frozenset[Any]:
    return frozenset(primitive(f"{name}_p") for name in _NEGATED)
