"""Find arrays that are widened whole and then read only in parts: through slices, pads and joins.

Which operations may stand in between is one closed list: those that move elements and compute
nothing. A call whose body is made of such operations alone, as that of `jnp.pad`, is one too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compat import jaxprs
from ..compat.bodies import Flow, Role
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .fact import Constant
from .graph import OUTPUT, Scope
from .pattern import describe_atom

_MOST = 400
"""Operations that are followed from one conversion."""


_FEW = 32
"""Operations of a body that is looked through by itself for each conversion in it."""


@dataclass(frozen=True)
class Trouble:
    """Why the array has to be widened whole."""

    code: str
    found: str


@dataclass(frozen=True)
class Step:
    """One operation that moves elements, on numbered values."""

    eqn: Eqn
    operands: tuple[int | Constant, ...]
    results: tuple[int, ...]


@dataclass
class Widened:
    """Conversions of one type to another, what moves their elements, and what reads them then."""

    sources: list[int] = field(default_factory=list)
    """The conversions, by index in their body; their results have the numbers 0, 1, …"""
    members: list[int] = field(default_factory=list)
    """Operations of the body that only move elements, calls included."""
    steps: list[Step] = field(default_factory=list)
    """The same, those of calls one by one."""
    leaves: list[tuple[int, Var]] = field(default_factory=list)
    """The values that something else reads."""
    windows: int = 0
    """How many of them are parts of an array."""
    troubles: list[Trouble] = field(default_factory=list)


@functools.cache
def conversion() -> Any:
    """The primitive of a change of dtype."""
    return primitive("convert_element_type_p")


@functools.cache
def _parts() -> frozenset[Any]:
    return frozenset({primitive("slice_p"), primitive("split_p")}) - {None}


@functools.cache
def _joins() -> frozenset[Any]:
    return frozenset({primitive("concatenate_p"), primitive("stack_p")}) - {None}


@functools.cache
def _keep_whole() -> frozenset[Any]:
    others = ("pad_p", "reshape_p", "squeeze_p", "transpose_p", "rev_p", "broadcast_in_dim_p")
    return frozenset({primitive(n) for n in others}) - {None}


@functools.cache
def _moves() -> frozenset[Any]:
    return _keep_whole() | _parts() | _joins()


@functools.cache
def _moves_or_calls() -> frozenset[Any]:
    return _moves() | {primitive("jit_p")}


def find_widened(scope: Scope, index: int) -> Widened | None:
    """What is read in parts of the result of a conversion; None where no part of it is cut out.

    A group of conversions that are joined is found at the first of them only.
    """
    found = _Search(scope).run(index)
    return found if found is not None and min(found.sources) == index else None


def may_be_cut(scope: Scope, var: Var) -> bool:
    """Whether what moves a value's elements cuts them, or may by a join with others."""
    if len(scope.live) > _FEW and var not in _read_by_moves(scope):
        return False  # nearly all: asked of every conversion of a program
    waiting, seen = [var], 0
    eqns, may_move = scope.eqns, _moves_or_calls()
    while waiting:
        for reader in scope.readers(waiting.pop()):
            if reader == OUTPUT or eqns[reader].primitive not in may_move:
                continue
            if not _only_moves(scope, reader):
                continue
            eqn = eqns[reader]
            seen += 1
            if _cuts_or_joins(scope, reader) or seen > _MOST:
                return True
            waiting += eqn.outvars
    return False


def _read_by_moves(scope: Scope) -> set[Var]:
    """What operations that may only move elements read."""
    known: set[Var] | None = scope.memo.get("read by moves")
    if known is None:
        eqns, places = scope.eqns, scope.places
        readers = (eqns[i] for kind in _moves_or_calls() for i in places.get(kind, ()))
        known = {a for eqn in readers for a in eqn.invars if not jaxprs.is_literal(a)}
        scope.memo["read by moves"] = known
    return known


def _cuts_or_joins(scope: Scope, index: int) -> bool:
    """Whether an equation that only moves elements cuts or joins arrays, or its body does."""
    if scope.eqns[index].primitive is not primitive("jit_p"):
        return scope.eqns[index].primitive not in _keep_whole()
    inside = scope.inside(index)
    if inside is None:
        return True
    child = inside[0]
    arrays = (i for i in child.live if child.eqns[i].outvars[0].aval.shape)
    return any(_cuts_or_joins(child, i) for i in arrays)


class _Search:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.found = Widened()
        self.numbers: dict[Var, int] = {}
        self.count = 0
        self.cut: dict[int, bool] = {}
        """Of every value followed, whether it is a part of an array."""

    def run(self, index: int) -> Widened | None:
        found, scope = self.found, self.scope
        self._follow_source(index)
        waiting = [scope.eqns[index].outvars[0]]
        seen: set[int] = set()
        read: dict[Var, list[int]] = {}
        while waiting:
            var = waiting.pop()
            read[var] = []
            for reader in scope.readers(var):
                if reader == OUTPUT or not self._moves(reader):
                    read[var].append(reader)
                elif reader not in seen:
                    seen.add(reader)
                    waiting += self._operands_joined(reader)
                    waiting += [v for v in scope.eqns[reader].outvars if not jaxprs.is_dropped(v)]
            if len(seen) > _MOST:
                return None
        found.members = sorted(seen)
        for member in found.members:
            self._step(scope, scope.eqns[member], member, self.numbers)
        for var, readers in read.items():
            if readers:
                self._leaf(var, readers)
        found.leaves.sort()
        return found if any(self.cut.values()) else None

    def _follow_source(self, index: int) -> None:
        self.found.sources.append(index)
        self._number(self.scope.eqns[index].outvars[0], False, self.numbers)

    def _number(self, var: Var, cut: bool, numbers: dict[Var, int]) -> int:
        number = numbers[var] = self.count
        self.count += 1
        self.cut[number] = cut
        return number

    def _moves(self, index: int) -> bool:
        return _only_moves(self.scope, index)

    def _operands_joined(self, index: int) -> Iterator[Var]:
        """The results of further conversions of the same kind that an equation joins."""
        scope, first = self.scope, self.scope.eqns[self.found.sources[0]]
        if scope.eqns[index].primitive not in _joins():
            return
        for atom in scope.eqns[index].invars:
            made = None if jaxprs.is_literal(atom) else scope.definition(atom)
            if made is None or made[0] in self.found.sources:
                continue
            eqn = scope.eqns[made[0]]
            if eqn.primitive is conversion() and _types(eqn) == _types(first):
                self._follow_source(made[0])
                yield atom

    def _step(self, scope: Scope, eqn: Eqn, index: int, numbers: dict[Var, int]) -> None:
        if eqn.primitive not in _moves():
            self._call(scope, index, numbers)
            return
        operands: list[int | Constant] = []
        for atom in eqn.invars:
            number = None if jaxprs.is_literal(atom) else numbers.get(atom)
            operands.append(self._constant(scope, eqn, atom) if number is None else number)
        cuts = eqn.primitive in _parts() or all(self.cut[n] for n in operands if isinstance(n, int))
        results = tuple(self._number(v, cuts, numbers) for v in eqn.outvars)
        self.found.steps.append(Step(eqn, tuple(operands), results))

    def _constant(self, scope: Scope, eqn: Eqn, atom: Atom) -> Constant:
        known = scope.fact(atom).constant if _is_plain(eqn, atom) else None
        first = self.scope.eqns[self.found.sources[0]]
        narrow, wide = first.invars[0].aval.dtype, first.outvars[0].aval.dtype
        if known is not None and is_exact(known.value, narrow, wide):
            return known
        code = "joined" if eqn.primitive in _joins() else "pad-constant"
        said = describe_atom(scope, atom) if known is None else f"the constant {known.value}"
        self.found.troubles.append(Trouble(code, said))
        return Constant.of(0)

    def _call(self, scope: Scope, index: int, numbers: dict[Var, int]) -> None:
        inside = scope.inside(index)
        assert inside is not None
        child, entered = inside
        eqn, inner = scope.eqns[index], {}
        for port, var in zip(entered.inputs, jaxprs.invars(child.body), strict=True):
            atom = None if port.outer is None else eqn.invars[port.outer]
            if atom is not None and not jaxprs.is_literal(atom) and atom in numbers:
                inner[var] = numbers[atom]
        for i in child.live:
            if any(a in inner for a in child.eqns[i].invars if not jaxprs.is_literal(a)):
                self._step(child, child.eqns[i], i, inner)
        for port, atom in zip(entered.outputs, jaxprs.opened(child.body).outvars, strict=True):
            if port.outer is not None:
                numbers[eqn.outvars[port.outer]] = inner[atom]

    def _leaf(self, var: Var, readers: Sequence[int]) -> None:
        number = self.numbers[var]
        self.found.leaves.append((number, var))
        if self.cut[number]:
            self.found.windows += 1
            return
        name = "an output" if readers[0] == OUTPUT else (
            self.scope.eqns[readers[0]].primitive.name
        )  # fmt: skip
        self.found.troubles.append(Trouble("other-reader", name))


def _is_plain(eqn: Eqn, atom: Atom) -> bool:
    """Whether a constant operand can be made anew as a pad's or a concatenation's."""
    spec = getattr(getattr(atom.aval, "sharding", None), "spec", None) or ()
    return eqn.primitive is not primitive("stack_p") and all(s is None for s in tuple(spec))


def _only_moves(scope: Scope, index: int) -> bool:
    """Whether an equation moves elements and computes nothing, calls of such bodies included."""
    key = "moves", index
    known: bool | None = scope.memo.get(key)
    if known is None:
        known = scope.memo[key] = _find_moves(scope, index)
    return known


def _find_moves(scope: Scope, index: int) -> bool:
    eqn = scope.eqns[index]
    if eqn.primitive in _moves():
        return not getattr(eqn.outvars[0].aval, "weak_type", False)
    if eqn.primitive is not primitive("jit_p") or eqn.effects:
        return False
    inside = scope.inside(index)
    if inside is None or inside[1].role is not Role.CALL:
        return False
    child, entered = inside
    if any(p.flow is not Flow.SAME for p in (*entered.inputs, *entered.outputs)):
        return False
    if not all(_only_moves(child, i) for i in child.live if child.eqns[i].outvars[0].aval.shape):
        return False
    # Scalars are what pads are filled with; they are looked up as facts.
    arrays = frozenset(v for v in jaxprs.invars(child.body) if v.aval.shape)
    holds: dict[Any, frozenset[Var]] = {}
    for i in child.live:
        operands = [a for a in child.eqns[i].invars if not jaxprs.is_literal(a)]
        held = frozenset().union(*(holds.get(a, arrays & {a}) for a in operands))
        holds.update((v, held) for v in child.eqns[i].outvars if v.aval.shape)
    # An array that a result holds nothing of would still be read by the call.
    outs = jaxprs.opened(child.body).outvars
    return not any(map(jaxprs.is_literal, outs)) and all(holds.get(a) == arrays for a in outs)


def _types(eqn: Eqn) -> tuple[Any, Any]:
    return eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype


def widens(narrow: Any, wide: Any) -> bool:
    """Whether each value of one floating point type is one of the other, larger one."""
    a: Any = jnp.finfo(narrow)
    b: Any = jnp.finfo(wide)
    return bool(
        np.dtype(narrow).itemsize < np.dtype(wide).itemsize
        and a.nmant <= b.nmant
        and float(a.max) <= float(b.max)
        and float(a.smallest_subnormal) >= float(b.smallest_subnormal)
    )


def is_exact(value: float, narrow: Any, wide: Any) -> bool:
    """Whether a number of the type ``wide`` is one of the type ``narrow``, a zero with its sign."""
    with np.errstate(over="ignore"):
        there = np.asarray(value, wide)
        back = there.astype(narrow).astype(wide)
        return back.tobytes() == there.tobytes() and not math.isnan(value)
