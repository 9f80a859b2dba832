"""The dataflow view of nested jaxprs: who made a value, who reads it, what is known of it.

A `Scope` is one body in one context: the facts of its inputs and the outputs that somebody
demands. A body called from several places in the same context is one scope with several callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from ..compat import bodies as compat_bodies
from ..compat import jaxprs, source
from ..compat.bodies import BodyKey, Entered, Flow, Role
from ..compat.jaxprs import Atom, Body, Eqn, Var
from .fact import Fact
from .facts import BodyFacts

OUTPUT = -1
"""The reader index that stands for the body's own outputs."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value by the scope and the atom that define it."""

    scope: Scope
    atom: Atom

    def __eq__(self, other: object) -> bool:
        """The same defining variable in the same scope, or equal literals of one type."""
        if not isinstance(other, Value):
            return NotImplemented
        if jaxprs.is_literal(self.atom) or jaxprs.is_literal(other.atom):
            return (
                jaxprs.is_literal(self.atom)
                and jaxprs.is_literal(other.atom)
                and self.atom.aval == other.atom.aval
                and _same_bits(self.atom.val, other.atom.val)
            )
        return self.scope is other.scope and self.atom is other.atom

    def __hash__(self) -> int:
        """Consistent with equality: literals hash by their type."""
        if jaxprs.is_literal(self.atom):
            return hash(str(self.atom.aval))
        return hash((id(self.scope), id(self.atom)))


def _same_bits(a: Any, b: Any) -> bool:
    import numpy as np

    left, right = np.asarray(a), np.asarray(b)
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


@dataclass(frozen=True, slots=True)
class Producer:
    """The equation that computes a value, and which of its results the value is."""

    scope: Scope
    index: int
    result: int

    @property
    def eqn(self) -> Eqn:
        """The equation."""
        return self.scope.eqns[self.index]


@dataclass(frozen=True, slots=True)
class Caller:
    """One place that runs a scope's body."""

    scope: Scope
    index: int
    entered: Entered


@dataclass(eq=False)
class Scope:
    """One body in one context."""

    body: Body
    facts: BodyFacts
    demanded: tuple[bool, ...]
    eqns: Sequence[Eqn]
    callers: list[Caller] = field(default_factory=list, repr=False)
    children: dict[int, dict[BodyKey, Scope]] = field(default_factory=dict, repr=False)
    """Scopes of the live equations that carry bodies, by equation index."""
    live: list[int] = field(default_factory=list, repr=False)
    """Indices of live equations, in order."""
    places: dict[Any, list[int]] = field(default_factory=dict, repr=False)
    """The same by primitive."""
    unread: tuple[int, ...] = ()
    """Which of the body's inputs no live equation reads, nor an output that somebody demands."""
    not_entered: list[tuple[int, compat_bodies.NotEntered]] = field(default_factory=list)
    _definitions: dict[Var, int | tuple[int, int]] = field(default_factory=dict, repr=False)
    """The equation of each variable, and which of its results where it has several."""
    _steps: dict[tuple[int, int], tuple[Scope, Atom] | None] = field(
        default_factory=dict, repr=False
    )
    """What `_inward` has found."""
    _readers: dict[Var, list[int]] | None = field(default=None, repr=False)
    _runs: int | None = field(default=None, repr=False)
    _inputs: dict[Var, int] | None = field(default=None, repr=False)
    _entered: dict[tuple[int, BodyKey], Entered] = field(default_factory=dict, repr=False)
    _call: Caller | None = field(default=None, repr=False)
    """The one call that this scope stands for, where a value was followed into it."""
    several_asked: bool = field(default=False, repr=False)
    """Whether somebody asked which call runs the body where it could be several."""
    _views: dict[tuple[int, int], Scope] = field(default_factory=dict, repr=False)
    """This scope as entered from each of several calls: values of one aren't those of another."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What matchers found out about the scope, by keys of their own."""
    spared: set[int] = field(default_factory=set, repr=False)
    """Indices of equations that are turned off for a pass that judges the whole program."""

    def copy(self) -> Scope:
        """The same body with the same facts for another call, which is yet to be added."""
        made = copy(self)
        made.callers, made._views, made._steps, made.memo = [], {}, {}, {}
        made.several_asked, made._runs = False, None
        return made

    def fact(self, atom: Atom) -> Fact:
        """What is known of an atom of this body."""
        return self.facts.fact(atom)

    def definition(self, var: Var) -> tuple[int, int] | None:
        """The index of the equation that binds ``var`` and the result's position."""
        found = self._definitions.get(var)
        return (found, 0) if type(found) is int else found  # type: ignore[return-value]

    def readers(self, var: Var) -> list[int]:
        """Indices of the live equations that read ``var``; `OUTPUT` for the body's outputs."""
        if self._readers is None:
            readers: dict[Var, list[int]] = {}
            literal, eqns = jaxprs.LITERAL, self.eqns  # this loop visits every equation
            for i in self.live:
                for atom in eqns[i].invars:
                    if type(atom) is not literal:
                        known = readers.get(atom)
                        if known is None:
                            readers[atom] = [i]
                        else:
                            known.append(i)
            for atom in jaxprs.opened(self.body).outvars:
                if type(atom) is not literal:
                    readers.setdefault(atom, []).append(OUTPUT)
            self._readers = readers
        return self._readers.get(var, [])

    def resolve(self, atom: Atom) -> Value:
        """Where an atom's value is really made, seen through calls in both directions.

        Goes into the body of a call for its result, and out to the operand of the caller where
        the value is the same inside and outside, and it is known which call that is: the only one,
        or the one by which the value was followed inwards. Of a body that several calls share,
        the value's scope is a view for that call alone, so that no two calls' values are equal.
        """
        return Value(*self._made(atom))

    def _made(self, atom: Atom) -> tuple[Scope, Atom]:
        """What `resolve` gives a name to; matchers ask for little as often."""
        scope: Scope = self
        literal = jaxprs.LITERAL
        while type(atom) is not literal:
            step = scope.step(atom)
            if step is None:
                break
            scope, atom = step
        return scope, atom

    def step(self, var: Var) -> tuple[Scope, Atom] | None:
        """One step of `resolve`: into the call that returns a value, or out to what was given."""
        found = self._definitions.get(var)
        if found is None:
            return self._outward(var)
        index, result = (found, 0) if type(found) is int else found  # type: ignore[misc]
        if index not in self.children:
            return None
        place = index, result
        if place not in self._steps:
            self._steps[place] = self._inward(index, result)
        return self._steps[place]

    def producer(self, atom: Atom) -> Producer | None:
        """The equation that computes an atom's value, seen through calls; None for an input."""
        scope, atom = self._made(atom)
        if type(atom) is jaxprs.LITERAL:
            return None
        found = scope.definition(atom)
        return None if found is None else Producer(scope, *found)

    @property
    def caller(self) -> Caller | None:
        """The call that runs the body; None at the outermost, and where it could be several."""
        if self._call is None and len(self.callers) != 1:
            self.several_asked = self.several_asked or bool(self.callers)
            return None
        return self._call or self.callers[0]

    @property
    def is_shared(self) -> bool:
        """Whether several calls run the body, with nothing to tell which of them is meant."""
        return self._call is None and len(self.callers) > 1

    def position(self, var: Var) -> int | None:
        """Which of the body's inputs a variable is, as counted by `compat.jaxprs.invars`."""
        if self._inputs is None:
            self._inputs = {v: i for i, v in enumerate(jaxprs.invars(self.body))}
        return self._inputs.get(var)

    def inside(self, index: int) -> tuple[Scope, Entered] | None:
        """The one body that an equation carries, as run from here."""
        child = self.children.get(index)
        if child is None or len(child) != 1:
            return None
        ((key, scope),) = child.items()
        entered = self._entered[index, key]
        return scope._entered_by(Caller(self, index, entered)), entered

    def entered(self, index: int, key: BodyKey) -> Entered:
        """How the operands and results of a live equation reach one of its bodies."""
        return self._entered[index, key]

    def route(self) -> tuple[Caller, ...] | None:
        """The calls by which the body is run, from the outermost; None where they are several."""
        steps: list[Caller] = []
        scope = self
        while (caller := scope.caller) is not None:
            steps.append(caller)
            scope = caller.scope
        return None if scope.callers else tuple(reversed(steps))

    def path(self) -> tuple[Caller, ...]:
        """The first caller of each scope from the outermost inwards."""
        steps: list[Caller] = []
        scope = self
        while scope.callers:
            steps.append(scope.callers[0])
            scope = scope.callers[0].scope
        return tuple(reversed(steps))

    def name_stack(self, eqn: Eqn) -> str:
        """The full name-stack path of an equation, through its first callers."""
        parts = [step_name(c.scope.eqns[c.index], c.entered) for c in self.path()]
        parts.append(source.name_stack(eqn))
        return "/".join(p for p in parts if p)

    def is_kept(self, index: int) -> bool:
        """Whether an equation is to stay as it is, by its own name stack or that of a call."""
        return index in self.spared or source.is_kept(self.eqns[index]) or self.in_kept

    @property
    def in_kept(self) -> bool:
        """Whether a call that runs the body is to stay as it is."""
        known = self.memo.get("kept")
        if known is None:
            known = any(c.scope.is_kept(c.index) for c in self.callers)
            self.memo["kept"] = known
        return bool(known)

    @property
    def runs(self) -> int:
        """How often the body runs, through all its callers; loops counted once, at least one."""
        if self._runs is None:
            self._runs = sum(caller.scope.runs for caller in self.callers) or 1
        return self._runs

    def source_line(self, eqn: Eqn) -> str | None:
        """``file.py:line`` of an equation, or else of the call it stands in.

        jax's own functions, such as `jnp.argsort`, are traced once and know no caller: then the
        line is that of the innermost caller that has one.
        """
        line = source.source_line(eqn)
        scope = self
        while line is None and scope.callers:
            caller = scope.callers[0]
            line = source.source_line(caller.scope.eqns[caller.index])
            scope = caller.scope
        return line

    def whereabouts(self, eqn: Eqn) -> str:
        """The line of an equation, or what it is where jax kept none, and its scope."""
        line = self.source_line(eqn) or f"a {eqn.primitive.name} of unknown line"
        stack = self.name_stack(eqn)
        return line + (f" ({stack})" if stack else "")

    def _inward(self, index: int, result: int) -> tuple[Scope, Atom] | None:
        child = self.children.get(index)
        if child is None or len(child) != 1:
            return None
        ((key, scope),) = child.items()
        entered = self._entered[index, key]
        if entered.role is not Role.CALL:
            return None
        # A call returns its body's outputs in order; anything else is looked for.
        ports = entered.outputs
        positions = range(len(ports))
        if result < len(ports) and ports[result].outer == result:
            positions = range(result, result + 1)
        for position in positions:
            if ports[position].outer == result and ports[position].flow is Flow.SAME:
                view = scope._entered_by(Caller(self, index, entered))
                return view, jaxprs.opened(scope.body).outvars[position]
        return None

    def _entered_by(self, call: Caller) -> Scope:
        """The scope as ``call`` runs it: itself where no other call could be meant."""
        if len(self.callers) == 1 and call.scope._call is None:
            return self
        key = (id(call.scope), call.index)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = replace(self, _call=call, _views={}, _steps={}, memo={})
        return view

    def _outward(self, var: Var) -> tuple[Scope, Atom] | None:
        caller, position = self.caller, self.position(var)
        if caller is None or position is None:
            return None
        port = caller.entered.inputs[position]
        if port.flow is not Flow.SAME or port.outer is None:
            return None
        return caller.scope, caller.scope.eqns[caller.index].invars[port.outer]


def step_name(eqn: Eqn, entered: Entered) -> str:
    """What a call adds to the name-stack path of the equations in a body that it runs."""
    stack = source.name_stack(eqn)
    name = eqn.params.get("name")
    label = f"{eqn.primitive.name}({name})" if isinstance(name, str) else eqn.primitive.name
    if entered.role is Role.BRANCH:
        label += f"[{entered.key[1]}]"
    return f"{stack}/{label}" if stack else label
