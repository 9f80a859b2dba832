"""All scopes of a program that are reached by live equations, and which calls share one."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from ..compat import bodies as compat_bodies
from ..compat import jaxprs
from ..compat.bodies import BodyKey, Flow
from ..compat.jaxprs import Body, Eqn, Var
from ..compat.primitives import primitive
from .fact import Fact
from .facts import MOST_CONTEXTS, Analysis, BodyFacts
from .graph import Caller, Scope

_MOST_COPIED = 1 << 14
"""Equations of one body, counted for each call, up to which it can be kept apart."""

_SMALL = 24
"""Equations of a body that is cheaper to keep apart at once than after it has been judged."""


@functools.cache
def pairwise() -> frozenset[Any]:
    """Primitives of which each result is of the operand at its place, where they have as many."""
    return frozenset({primitive("optimization_barrier_p"), primitive("psum_p")})


class Apart:
    """Bodies that are a scope for each call, as if each call had a body of its own."""

    def __init__(self, roots: Collection[Any] = ()) -> None:
        """Small bodies in which one of the primitives ``roots`` stands are among them."""
        self._roots = frozenset(roots)
        self._known: dict[int, tuple[Body, bool]] = {}

    def add(self, body: Body) -> None:
        """Keep a body apart from now on."""
        self._known[id(body)] = (body, True)

    def __contains__(self, body: Body) -> bool:
        """Whether a body is kept apart."""
        known = self._known.get(id(body))
        if known is None:
            eqns = jaxprs.opened(body).eqns
            small = len(eqns) <= _SMALL and any(e.primitive in self._roots for e in eqns)
            known = self._known[id(body)] = (body, small)
        return known[1]


class Dataflow:
    """All scopes of a closed jaxpr that are reached by live equations.

    What a body's inputs are made of is no fact about them. Where that matters, a body can be kept
    ``apart``.
    """

    def __init__(
        self,
        closed: Body,
        analysis: Analysis,
        in_facts: tuple[Fact, ...],
        apart: Apart | None = None,
    ) -> None:
        """Without ``apart``, all calls with the same facts share a scope."""
        self._scopes: dict[tuple[Any, ...], Scope] = {}
        self._leaves: dict[tuple[Any, ...], Scope] = {}
        """A scope of each body that carries none, by its facts and demanded outputs."""
        self._apart = Apart() if apart is None else apart
        self._copies: Counter[int] = Counter()
        self.idle_results = False
        """Whether a live equation that carries a body, or a barrier, makes what nothing reads."""
        self.crowded: set[int] = set()
        """Bodies to keep apart with so many calls that some of these share a scope all the same."""
        outputs = len(jaxprs.opened(closed).outvars)
        self.root = self._enter(analysis.enter(closed, in_facts), (True,) * outputs)
        for scope in self._scopes.values():
            scope.callers.reverse()  # bodies are walked from their end; callers stand in order

    @property
    def scopes(self) -> Iterator[Scope]:
        """Every scope, callees before callers."""
        return iter(self._scopes.values())

    @property
    def unclear(self) -> list[Body]:
        """Bodies of which somebody asked what an input is, which differs from call to call."""
        asked = (s.body for s in self._scopes.values() if s.several_asked)
        return [body for body in asked if body not in self._apart]

    def _enter(
        self, facts: BodyFacts, demanded: tuple[bool, ...], call: tuple[Any, ...] = ()
    ) -> Scope:
        key: tuple[Any, ...] = (id(facts), demanded)
        if call and facts.body in self._apart:
            key = self._for_one_call(facts.body, key, call)
        known = self._scopes.get(key)
        if known is not None:
            return known
        leaf = self._leaves.get(key[:2])
        if leaf is not None:
            scope = self._scopes[key] = leaf.copy()
            return scope
        jaxpr = jaxprs.opened(facts.body)
        scope = Scope(facts.body, facts, demanded, jaxpr.eqns)
        literal = jaxprs.LITERAL  # asked for once: this loop visits every equation
        read: set[Var] = {
            a for a, d in zip(jaxpr.outvars, demanded, strict=True) if d and type(a) is not literal
        }
        live: list[int] = []
        definitions, eqns, leaves = scope._definitions, jaxpr.eqns, compat_bodies.leaves()
        places, barriers = scope.places, pairwise()
        for index in range(len(eqns) - 1, -1, -1):
            eqn = eqns[index]
            outvars = eqn.outvars
            if len(outvars) == 1:
                definitions[outvars[0]] = index
            else:
                definitions.update((var, (index, result)) for result, var in enumerate(outvars))
            if read.isdisjoint(outvars) and not eqn.effects:
                continue
            live.append(index)
            kind = eqn.primitive
            alike = places.get(kind)
            if alike is None:
                places[kind] = [index]
            else:
                alike.append(index)
            carries = kind not in leaves
            if (carries or kind in barriers) and not read.issuperset(outvars):
                self.idle_results = True
            read.update([a for a in eqn.invars if type(a) is not literal])
            if carries:
                self._enter_bodies(scope, index, eqn, read)
        scope.live = live[::-1]
        for alike in places.values():
            alike.reverse()
        inputs = jaxprs.invars(facts.body)
        if not read.issuperset(inputs):
            scope.unread = tuple([i for i, v in enumerate(inputs) if v not in read])
        self._scopes[key] = scope
        if not scope.children:
            self._leaves[key[:2]] = scope
        return scope

    def _for_one_call(
        self, body: Body, key: tuple[Any, ...], call: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The key of a scope for one call; that of all of them where there are too many."""
        most = max(MOST_CONTEXTS, _MOST_COPIED // (len(jaxprs.opened(body).eqns) or 1))
        if self._copies[id(body)] >= most:
            self.crowded.add(id(body))
            return key
        self._copies[id(body)] += 1
        return *key, *call

    def _enter_bodies(self, scope: Scope, index: int, eqn: Eqn, read: set[Var]) -> None:
        carried = compat_bodies.carried(eqn)
        if carried is compat_bodies.NOTHING:
            return
        scope.not_entered.extend((index, n) for n in carried.not_entered)
        if not carried.entered:
            return
        child_facts = scope.facts.children(index)
        children: dict[BodyKey, Scope] = {}
        for entered in carried.entered:
            demanded = tuple(
                port.outer is None or port.flow is Flow.CARRY or eqn.outvars[port.outer] in read
                for port in entered.outputs
            )
            call = (id(scope), index, entered.key)
            child = self._enter(child_facts[entered.key], demanded, call)
            child.callers.append(Caller(scope, index, entered))
            children[entered.key] = child
            scope._entered[index, entered.key] = entered
        scope.children[index] = children

    def release(self) -> None:
        """Take the scopes apart, so that they are freed now and not by a later collection."""
        for scope in self._scopes.values():
            scope.callers.clear()
            scope.children.clear()
            scope._views.clear()
            scope._steps.clear()
            scope.memo.clear()
