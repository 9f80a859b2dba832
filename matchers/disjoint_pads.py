"""Recognise a sum of arrays, each padded with zeros to one shape.

That is what the derivative of an array leaves that was read in parts: every part's cotangent is
padded to the whole, and they are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .graph import OUTPUT, Scope

PARAMS: dict[str, frozenset[str]] = {
    "add": frozenset(),
    "add_any": frozenset(),
    "pad": frozenset({"padding_config"}),
}


@dataclass(frozen=True)
class Part:
    """One padded array."""

    index: int
    """The pad's equation."""
    operand: Atom
    config: tuple[tuple[int, int, int], ...]
    """Elements before, after, and between elements, for every axis."""
    zero: bool
    """Whether it is padded with zeros."""


@dataclass(frozen=True)
class Sum:
    """A sum's terms, in the order in which they are added."""

    parts: tuple[Part, ...]
    others: tuple[Atom, ...]
    """Terms that are no pads."""
    inner: tuple[int, ...]
    """The equations that add up terms and are read by the sum alone."""


@functools.cache
def roots() -> frozenset[Any]:
    """The primitives that add two arrays."""
    return frozenset({primitive("add_p"), primitive("add_jaxvals_p")}) - {None}


def find_sum(scope: Scope, index: int) -> Sum | None:
    """The pads that an addition adds up; None where it isn't the whole of such a sum.

    At most one further term is taken in: of two, the order in which they are added would change.
    """
    found = _terms(scope, index)
    if not found.parts or len(found.others) > 1 or len(found.parts) + len(found.others) < 2:
        return None
    reader = _only_reader(scope, scope.eqns[index].outvars[0])
    if reader is not None and len(_terms(scope, reader).others) <= 1:
        return None  # a part of that one
    return found if len(found.parts) > 1 else None


def _terms(scope: Scope, index: int) -> Sum:
    key = "disjoint_pads", index
    known: Sum | None = scope.memo.get(key)
    if known is not None:
        return known
    parts: list[Part] = []
    others: list[Atom] = []
    inner: list[int] = []
    for atom in scope.eqns[index].invars:
        made = None if jaxprs.is_literal(atom) else scope.definition(atom)
        made = None if made is None or scope.is_kept(made[0]) else made
        eqn = None if made is None else scope.eqns[made[0]]
        if made is not None and eqn is not None and _adds(eqn):
            if _only_reader(scope, atom) == index:
                below = _terms(scope, made[0])
                parts += below.parts
                others += below.others
                inner += (*below.inner, made[0])
                continue
        elif made is not None and eqn is not None and _pads(eqn):
            parts.append(_part(scope, made[0], eqn))
            continue
        others.append(atom)
    found = scope.memo[key] = Sum(tuple(parts), tuple(others), tuple(inner))
    return found


def _adds(eqn: Eqn) -> bool:
    return eqn.primitive in roots() and set(eqn.params) <= PARAMS[eqn.primitive.name]


def _pads(eqn: Eqn) -> bool:
    return eqn.primitive is primitive("pad_p") and set(eqn.params) <= PARAMS["pad"]


def _part(scope: Scope, index: int, eqn: Eqn) -> Part:
    operand, filling = eqn.invars
    config = tuple((int(a), int(b), int(c)) for a, b, c in eqn.params["padding_config"])
    return Part(index, operand, config, scope.fact(filling).is_zero())


def _only_reader(scope: Scope, var: Any) -> int | None:
    """The addition that is the only reader of a value, and reads it once."""
    readers = scope.readers(var)
    if len(set(readers)) != 1 or readers[0] == OUTPUT:
        return None
    eqn = scope.eqns[readers[0]]
    once = sum(a is var for a in eqn.invars) == 1
    return readers[0] if once and _adds(eqn) else None


@dataclass(frozen=True)
class Laid:
    """Arrays side by side along one axis."""

    axis: int
    order: tuple[int, ...]
    """Which part comes first, and so on; those of no width are left out."""
    gaps: tuple[int, ...]
    """Zeros before each of them, in that order, and after the last."""


def axes_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """The axes along which anything is padded."""
    n = len(parts[0].config)
    return tuple(d for d in range(n) if any(p.config[d] != (0, 0, 0) for p in parts))


def lay(parts: Sequence[Part], axis: int) -> Laid | None:
    """Where the parts lie along ``axis``; None where two of them overlap.

    A part of no width lies nowhere, and is left out unless all are such.
    """
    starts = [p.config[axis][0] for p in parts]
    wide = [i for i in range(len(parts)) if _extent(parts[i], axis)] or range(len(parts))
    order = tuple(sorted(wide, key=lambda i: starts[i]))
    gaps: list[int] = []
    end = 0
    for i in order:
        gaps.append(starts[i] - end)
        end = starts[i] + _extent(parts[i], axis)
    last = parts[order[-1]]
    gaps.append(last.config[axis][1])
    return Laid(axis, order, tuple(gaps)) if min(gaps) >= 0 else None


def _extent(part: Part, axis: int) -> int:
    return int(part.operand.aval.shape[axis])
