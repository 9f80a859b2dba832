"""What the inputs of a site are made of: its producers, step by step backwards through calls.

A rewrite may rest on how two values of a body belong together, as an order and its inverse do,
which no fact about either says. Such a site is run with its producers before it, so that whatever
holds between the values holds in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.bodies import Role
from ...compat.jaxprs import Atom, Eqn, Var
from ...matchers.fact import Fact, limits
from ...matchers.graph import Scope, Value

MOST_STEPS = 160
"""Equations that are walked back through."""
DEEPEST = 32
"""Steps back from the site."""


@dataclass(frozen=True)
class Step:
    """One producer, on variables of the slice's own."""

    depth: int
    """Steps from the site to the nearest of its results."""
    eqn: Eqn


@dataclass(frozen=True)
class Ancestry:
    """The producers of a site's inputs, and what is known of every value among them."""

    aliases: Mapping[Var, Atom]
    """The site's inputs by the variable, or literal, that stands for each here."""
    steps: tuple[Step, ...]
    """In an order in which they can run."""
    facts: Mapping[Var, Fact]
    given: frozenset[Var]
    """The whole program's own inputs."""

    def prefix(self, depth: int, floats: bool = True) -> tuple[Eqn, ...]:
        """The producers up to ``depth`` steps back, of all values or of such as are `discrete`.

        What a rewrite rests on is nearly always said in indices and masks.
        """
        makers = {v: s for s in self.steps for v in s.eqn.outvars}
        kept: set[int] = set()
        reached = [a for a in self.aliases.values() if jaxprs.is_var(a)]
        for _ in range(depth):
            operands = []
            for var in reached:
                step = makers.get(var)
                if step is None or id(step) in kept or not (floats or var in self.discrete):
                    continue
                kept.add(id(step))
                operands += [a for a in step.eqn.invars if jaxprs.is_var(a)]
            reached = operands
        return tuple(s.eqn for s in self.steps if id(s) in kept)

    def between(self, wanted: Iterable[Atom], given: Iterable[Atom]) -> tuple[Eqn, ...]:
        """What makes some values out of others, and of whatever else it needs."""
        makers = {v: s for s in self.steps for v in s.eqn.outvars}
        reached, stop = [a for a in wanted if jaxprs.is_var(a)], set(map(id, given))
        kept: set[int] = set()
        while reached:
            var = reached.pop()
            step = makers.get(var)
            if step is None or id(var) in stop or id(step) in kept:
                continue
            kept.add(id(step))
            reached += [a for a in step.eqn.invars if jaxprs.is_var(a)]
        return tuple(s.eqn for s in self.steps if id(s) in kept)

    @cached_property
    def discrete(self) -> frozenset[Var]:
        """Integers, bools, and what is made of nothing else, as an identity matrix is."""
        found: set[Var] = set()
        for step in self.steps:
            operands = [a for a in step.eqn.invars if jaxprs.is_var(a)]
            alone = all(is_exact(a.aval) or a in found for a in operands)
            found.update(v for v in step.eqn.outvars if alone or is_exact(v.aval))
        return frozenset(found)

    @property
    def depth(self) -> int:
        """From here on there is nothing more to take in."""
        return max((s.depth + 1 for s in self.steps), default=0)


def is_exact(aval: Any) -> bool:
    """Whether a type is of integers or bools."""
    return limits(getattr(aval, "dtype", None)) is not None


def settled(scope: Scope, atom: Atom) -> Value:
    """Where a value is made, as far as that is one place; asks nothing of shared bodies."""
    while not jaxprs.is_literal(atom):
        if scope.definition(atom) is None and scope.is_shared:
            break
        step = scope.step(atom)
        if step is None:
            break
        scope, atom = step
    return Value(scope, atom)


class _Walk:
    def __init__(self) -> None:
        self.names: dict[Value, Var] = {}
        self.facts: dict[Var, Fact] = {}
        self.given: set[Var] = set()
        self.steps: list[Step] = []
        self.wanted: list[tuple[int, Value]] = []
        self._made: set[tuple[int, int]] = set()
        self._keep: list[Scope] = []

    def name(self, value: Value, depth: int, known: Var | None = None) -> Atom:
        """The variable of a value here, to be looked into in its turn."""
        if jaxprs.is_literal(value.atom):
            return value.atom
        var = self.names.get(value)
        if var is None:
            var = self.names[value] = jaxprs.new_var(value.atom.aval) if known is None else known
            self.facts[var] = value.scope.fact(value.atom)
            self.wanted.append((depth, value))
        return var

    def expand(self, depth: int, value: Value) -> None:
        found = value.scope.definition(value.atom)
        if found is None:
            if not value.scope.callers:
                self.given.add(self.names[value])
            return
        scope, index = value.scope, found[0]
        eqn = scope.eqns[index]
        if (id(scope), index) in self._made or not _walkable(eqn):
            return
        self._made.add((id(scope), index))
        self._keep.append(scope)
        operands = [self.name(settled(scope, a), depth + 1) for a in eqn.invars]
        results = [self._result(scope, v) for v in eqn.outvars]
        self.steps.append(Step(depth, eqn.replace(invars=operands, outvars=results)))

    def _result(self, scope: Scope, var: Var) -> Var:
        if jaxprs.is_dropped(var):
            return var
        value = Value(scope, var)
        if value not in self.names:
            self.names[value] = jaxprs.new_var(var.aval)
            self.facts[self.names[value]] = scope.fact(var)
        return self.names[value]


def ancestry(scope: Scope, inputs: Iterable[Var]) -> Ancestry:
    """The producers of some variables of a scope, nearest first, within bounds."""
    walk = _Walk()
    aliases: dict[Var, Atom] = {}
    for var in inputs:
        value = settled(scope, var)
        aliases[var] = walk.name(value, 0, var)
        if aliases[var] is var:
            walk.facts[var] = _narrower(scope.fact(var), walk.facts[var])
    while walk.wanted and len(walk.steps) < MOST_STEPS:
        depth, value = walk.wanted.pop(0)
        if depth < DEEPEST:
            walk.expand(depth, value)
    steps = _ordered(walk.steps)
    return Ancestry(aliases, steps, walk.facts, frozenset(walk.given))


def _narrower(here: Fact, there: Fact) -> Fact:
    """What the pass itself is told of a value; where that is nothing, what its maker's body says.

    Facts in a called body are those of the call; to take both apart is not needed.
    """
    return here if here != Fact() else there


def _walkable(eqn: Eqn) -> bool:
    if jaxprs.true_effects(eqn):
        return False
    entered = compat_bodies.carried(eqn).entered
    if eqn.primitive is compat_bodies.shard_map_primitive():
        return False
    return all(e.role is not Role.KERNEL for e in entered)


def _ordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, each after those that make its operands."""
    makers = {id(v): s for s in steps for v in s.eqn.outvars}
    done: dict[int, Step] = {}

    def visit(step: Step) -> None:
        if id(step) in done:
            return
        for atom in step.eqn.invars:
            maker = makers.get(id(atom))
            if maker is not None:
                visit(maker)
        done[id(step)] = step

    for step in steps:
        visit(step)
    return tuple(done.values())
