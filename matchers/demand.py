"""Which equations anything still needs, once some outputs are given up and some reads don't count.

Ordinary liveness takes a loop's carried values as read by the loop. Here a carried value is needed
only where its last value is, or a value that is needed is computed from it, so that a sum that
nobody reads isn't, nor what was added to it; likewise through calls, branches, remat and shard_map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compat import edit, jaxprs, kernel_parts
from ..compat.bodies import BodyKey, Entered, Flow, Role
from ..compat.jaxprs import Eqn, Var
from ..compat.kernel_parts import Part
from ..compat.source import any_kept
from .dataflow import pairwise
from .graph import Scope


@dataclass(frozen=True)
class Cut:
    """An equation whose result is known without some of its operands."""

    chosen: int | None
    """The operand that the result is; None where it is zero."""


@dataclass(eq=False)
class Demand:
    """What is needed of one body, for one set of its outputs."""

    scope: Scope
    outputs: tuple[bool, ...]
    """Which outputs are needed."""
    zeroed: frozenset[int]
    """Outputs that are needed as zeros, whatever computes them."""
    live: set[int] = field(default_factory=set)
    """Equations that are needed."""
    read: set[Var] = field(default_factory=set)
    inputs: tuple[bool, ...] = ()
    """Which inputs are read."""
    results: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    """Of needed equations that can do with fewer results, which of these are needed."""
    operands: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    """Of the same, which operands."""
    children: dict[int, dict[BodyKey, Demand]] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    """Of the same, those that are kernels: what is left of them."""
    whole: dict[int, str] = field(default_factory=dict)
    """Kernels of which some results aren't needed and stay, with the reason."""
    cuts: dict[int, Cut] = field(default_factory=dict)
    made_here: frozenset[int] = frozenset()
    """Of ``zeroed``, those whose zeros no body further in can make."""


CutAt = Callable[[Scope, int], "Cut | None"]


def is_pairwise(eqn: Eqn) -> bool:
    """Whether each result is of the operand at its place, and of no other."""
    if not len(eqn.invars) == len(eqn.outvars) > 1:
        return False
    return eqn.primitive in pairwise()


class Demands:
    """The demands on the bodies of one program."""

    def __init__(
        self,
        cut: CutAt = lambda scope, index: None,
        at: frozenset[Any] | None = None,
        given_up: frozenset[Var] = frozenset(),
    ) -> None:
        """What is needed where some operands aren't really read.

        Args:
          cut: says of which equations.
          at: the primitives that these are of; None for any.
          given_up: results of kernels that go although nothing read them in the first place.
        """
        self._given_up = given_up
        self._cut = cut
        self._at = at
        self._known: dict[tuple[Any, ...], Demand] = {}
        self._kept: dict[int, bool] = {}

    def of(
        self, scope: Scope, outputs: Sequence[bool], zeroed: frozenset[int] = frozenset()
    ) -> Demand:
        """The demand on a scope of which some outputs are needed, and some as zeros."""
        key = id(scope), tuple(outputs), zeroed
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(Demand(scope, tuple(outputs), zeroed))
        return known

    def _of(self, demand: Demand) -> Demand:
        scope = demand.scope
        outvars = jaxprs.opened(scope.body).outvars
        wanted = [a for i, a in enumerate(outvars) if demand.outputs[i] and i not in demand.zeroed]
        demand.read.update(a for a in wanted if not jaxprs.is_literal(a))
        inner = _zeros_further_in(demand)
        made_elsewhere: set[int] = set()
        keeps = self._keeps(scope)
        cuts_at = None if keeps else self._at
        eqns, read, live, children = scope.eqns, demand.read, demand.live, scope.children
        barriers = pairwise()
        literal = jaxprs.LITERAL  # asked for once: this loop visits every equation
        for index in reversed(range(len(eqns)) if keeps else scope.live):
            eqn = eqns[index]
            if (
                cuts_at is not None
                and eqn.primitive not in barriers
                and index not in children
                and not eqn.effects
            ):
                if read.isdisjoint(eqn.outvars):
                    continue
                if eqn.primitive not in cuts_at or self._cut(scope, index) is None:
                    live.add(index)
                    read.update([a for a in eqn.invars if type(a) is not literal])
                    continue
            needed = tuple([v in demand.read for v in eqn.outvars])
            zeros = {}
            if index in inner:
                zeros = {r: i for r, i in inner[index].items() if not needed[r]}
            stays = jaxprs.true_effects(eqn) or (keeps and self._holds(scope, index))
            if not any(needed) and not zeros and not stays:
                continue
            demand.live.add(index)
            made_elsewhere.update(zeros.values())
            self._read(demand, index, eqn, needed, frozenset(zeros))
        demand.inputs = tuple(v in demand.read for v in jaxprs.invars(scope.body))
        demand.made_here = demand.zeroed - made_elsewhere
        return demand

    def _read(
        self,
        demand: Demand,
        index: int,
        eqn: Eqn,
        needed: tuple[bool, ...],
        zeros: frozenset[int],
    ) -> None:
        whole = self._keeps(demand.scope) and demand.scope.is_kept(index)
        cut = None if whole else self._cut(demand.scope, index)
        if whole:
            kept = list(eqn.invars)
        elif cut is not None:
            demand.cuts[index] = cut
            kept = [eqn.invars[cut.chosen]] if cut.chosen is not None else []
        elif is_pairwise(eqn) and not jaxprs.true_effects(eqn):
            needed = tuple(
                n or _is_idle(demand.scope, a, v)
                for n, a, v in zip(needed, eqn.invars, eqn.outvars, strict=True)
            )
            demand.results[index] = demand.operands[index] = needed
            kept = [a for a, n in zip(eqn.invars, needed, strict=True) if n]
        elif index in demand.scope.children and edit.can_narrow(eqn):
            self._enter(demand, index, eqn, needed, zeros)
            kept = [a for a, n in zip(eqn.invars, demand.operands[index], strict=True) if n]
        elif not all(needed) and kernel_parts.is_kernel(eqn):
            self._separate(demand, index, eqn, needed)
            operands = demand.operands.get(index, (True,) * len(eqn.invars))
            kept = [a for a, n in zip(eqn.invars, operands, strict=True) if n]
        else:
            kept = list(eqn.invars)
        literal = jaxprs.LITERAL
        demand.read.update([a for a in kept if type(a) is not literal])

    def _separate(self, demand: Demand, index: int, eqn: Eqn, needed: tuple[bool, ...]) -> None:
        """A kernel without the results that aren't needed any more, where there is such a one.

        One that nothing read in the first place stays, as whoever wrote the kernel left it, unless
        it is given up.
        """
        left = (not demand.scope.readers(v) and v not in self._given_up for v in eqn.outvars)
        needed = tuple(map(bool.__or__, needed, left))
        if all(needed):
            return
        found = kernel_parts.without(eqn, needed)
        if isinstance(found, str):
            demand.whole[index] = found
        else:
            demand.parts[index] = found
            demand.results[index], demand.operands[index] = found.results, found.operands

    def _keeps(self, scope: Scope) -> bool:
        """Whether a body, or one that it runs, holds an equation that is to stay as it is."""
        known = self._kept.get(id(scope))
        if known is None:
            known = self._kept[id(scope)] = (
                scope.in_kept
                or bool(scope.spared)
                or any_kept(scope.eqns)
                or any(map(self._keeps, (s for c in scope.children.values() for s in c.values())))
            )
        return known

    def _holds(self, scope: Scope, index: int) -> bool:
        children = scope.children.get(index, {}).values()
        return scope.is_kept(index) or any(map(self._keeps, children))

    def _enter(
        self,
        demand: Demand,
        index: int,
        eqn: Eqn,
        needed: tuple[bool, ...],
        zeros: frozenset[int],
    ) -> None:
        """Go into an equation's bodies, round a loop until no more carried values are needed."""
        scope = demand.scope
        bodies = {key: (child, scope.entered(index, key))
                  for key, child in scope.children[index].items()}  # fmt: skip
        results = list(map(bool.__or__, needed, (r in zeros for r in range(len(needed)))))
        while True:
            inner = {
                key: self._body(child, entered, results, zeros)
                for key, (child, entered) in bodies.items()
            }
            more = list(results)
            for key, (_, entered) in bodies.items():
                for ordinal, position in enumerate(carried_inputs(entered)):
                    more[ordinal] = more[ordinal] or inner[key].inputs[position]
            if more == results:
                break
            results = more
        read = {0} if any(e.role is Role.BRANCH for _, e in bodies.values()) else set()
        for key, (_, entered) in bodies.items():
            ports = enumerate(entered.inputs)
            read.update(p.outer for i, p in ports if p.outer is not None and inner[key].inputs[i])
            carries = carried_inputs(entered)
            read.update(entered.inputs[i].outer for o, i in enumerate(carries) if results[o])  # type: ignore[misc]
        demand.children[index] = inner
        demand.results[index] = tuple(results)
        demand.operands[index] = tuple(i in read for i in range(len(eqn.invars)))

    def _body(
        self, child: Scope, entered: Entered, results: Sequence[bool], zeros: frozenset[int]
    ) -> Demand:
        ports = entered.outputs
        outputs = [p.outer is None or results[p.outer] for p in ports]
        zeroed = frozenset(i for i, p in enumerate(ports) if p.outer in zeros)
        return self.of(child, outputs, zeroed)


def _is_idle(scope: Scope, operand: Any, result: Var) -> bool:
    """Whether a constant is handed through to a result that nothing read in the first place.

    jax hands the gradients of integers, which there are none of, through the derivative of a
    barrier. What gives up the outputs of a program has nothing to do with these, and they stay.
    """
    if scope.readers(result):
        return False
    place = None if jaxprs.is_literal(operand) else scope.definition(operand)
    if place is None:
        return jaxprs.is_literal(operand)
    eqn = scope.eqns[place[0]]
    return not jaxprs.true_effects(eqn) and all(map(jaxprs.is_literal, eqn.invars))


def carried_inputs(entered: Entered) -> list[int]:
    """A body's inputs that a loop carries, in the order of the loop's first results."""
    return [i for i, p in enumerate(entered.inputs) if p.flow is Flow.CARRY]


def _zeros_further_in(demand: Demand) -> Mapping[int, Mapping[int, int]]:
    """Of each call here, its results that are zeroed outputs, with the output's position.

    To make zeros where the value was made leaves it the sharding that it had.
    """
    scope = demand.scope
    outvars = jaxprs.opened(scope.body).outvars
    found: dict[int, dict[int, int]] = {}
    for position in demand.zeroed:
        atom = outvars[position]
        place = None if jaxprs.is_literal(atom) else scope.definition(atom)
        if place is None or sum(a is atom for a in outvars) > 1:
            continue
        index, result = place
        inside = scope.children.get(index, {})
        called = [scope.entered(index, key).role is Role.CALL for key in inside]
        if called == [True] and edit.can_narrow(scope.eqns[index]):
            found.setdefault(index, {})[result] = position
    return found
