"""Recognise GEMMs of one left operand with the parts of one array."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..compat import jaxprs
from ..compat.jaxprs import Eqn
from ..compat.primitives import primitive
from .graph import Scope, Value
from .grouped_gemm import grouped_gemm


@dataclass(frozen=True)
class Part:
    """A GEMM whose right operand is a part of an array."""

    index: int
    """The GEMM's equation."""
    whole: Value
    """The array that the part is cut from, wherever it is made."""
    axis: int
    """The axis along which it is cut."""
    start: int
    stop: int
    casts: tuple[Any, ...]
    """Types that the part is converted to, the last of which the GEMM reads."""


@dataclass(frozen=True)
class Group:
    """GEMMs of one left operand and the same array's parts."""

    parts: tuple[Part, ...]
    """In the order of their equations."""

    @property
    def by_place(self) -> tuple[Part, ...]:
        """The parts as they lie in the array."""
        return tuple(sorted(self.parts, key=lambda p: (p.start, p.stop)))


def find_shared_lhs(scope: Scope, index: int) -> Group | None:
    """The group whose first GEMM stands at ``index``; None if it is alone, or not the first."""
    groups: dict[int, Group] | None = scope.memo.get("shared_lhs")
    if groups is None:
        groups = scope.memo["shared_lhs"] = {g.parts[0].index: g for g in _groups(scope)}
    return groups.get(index)


def gemms() -> frozenset[Any]:
    """The primitives that are GEMMs here."""
    return frozenset({primitive("dot_general_p"), primitive("ragged_dot_general_p")})


def _groups(scope: Scope) -> Iterator[Group]:
    found: dict[Hashable, list[Part]] = {}
    known = gemms()
    for index in scope.live:
        eqn = scope.eqns[index]
        part = _part(scope, index) if eqn.primitive in known else None
        if part is not None:
            others = (scope.resolve(a) for i, a in enumerate(eqn.invars) if i != 1)
            key = eqn.primitive, part.whole, *others
            found.setdefault(key, []).append(part)
    # The same part twice is one product, computed twice: no matter of this file.
    return (Group(tuple(p)) for p in found.values() if len(p) > 1)


def _part(scope: Scope, index: int) -> Part | None:
    where, atom, casts = scope, scope.eqns[index].invars[1], []
    # A name is not passed by: a remat policy may save what it names.
    passed = {primitive("pvary_p"), primitive("convert_element_type_p")}
    while (made := where.producer(atom)) is not None:
        where, eqn = made.scope, made.eqn
        if eqn.primitive is primitive("convert_element_type_p"):
            casts.append(eqn.outvars[0].aval.dtype)
        if eqn.primitive in passed:
            atom = eqn.invars[0]
            continue
        cut = _cut(eqn, made.result)
        if cut is None or not jaxprs.is_var(eqn.invars[0]):
            return None
        return Part(index, where.resolve(eqn.invars[0]), *cut, tuple(reversed(casts)))
    return None


def _cut(eqn: Eqn, result: int) -> tuple[int, int, int] | None:
    """The axis along which an equation cuts its operand, and where the part begins and ends."""
    if eqn.primitive is primitive("split_p"):
        ends = np.cumsum([0, *eqn.params["sizes"]])
        return eqn.params["axis"], int(ends[result]), int(ends[result + 1])
    if eqn.primitive is not primitive("slice_p"):
        return None
    strides, shape = eqn.params["strides"], eqn.invars[0].aval.shape
    ranges = list(zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True))
    cut = [d for d, size in enumerate(shape) if ranges[d] != (0, size)]
    if len(cut) != 1 or (strides is not None and set(strides) != {1}):
        return None
    return cut[0], int(ranges[cut[0]][0]), int(ranges[cut[0]][1])


def result_axis(eqn: Eqn, axis: int) -> int | None:
    """The axis of a GEMM's result that an axis of its right operand becomes; None if it is gone.

    An axis of the batch is None too: its parts are multiplied by parts of the left operand.
    """
    if eqn.primitive is primitive("ragged_dot_general_p"):
        found = grouped_gemm(eqn)
        known = found is not None and found.plain and axis == found.output_axis
        return 1 if known else None
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    free = [d for d in range(eqn.invars[1].aval.ndim) if d not in (*contracted, *batch)]
    if axis not in free:
        return None
    return int(eqn.outvars[0].aval.ndim) - len(free) + free.index(axis)


def differing_params(eqn: Eqn, other: Eqn) -> Mapping[str, tuple[Any, Any]]:
    """The params in which two GEMMs differ."""
    names = sorted({*eqn.params, *other.params})
    pairs = {n: (eqn.params.get(n), other.params.get(n)) for n in names}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
