"""Rebuild nested bodies without what nothing needs any more.

Needed equations keep their objects unless they carry a body that loses something. Operands,
results and carried values that only what goes reads go with it, in every body on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import edit, jaxprs, tracing
from ...compat.bodies import BodyKey
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...matchers.demand import Demand
from ...matchers.graph import Scope
from .check import check_stripped

Dispensable = Callable[[Scope, int], bool]
"""Whether an equation that was dead before goes too."""


def strip(demand: Demand, dispensable: Dispensable) -> Body:
    """The whole program with what isn't needed removed, and zeros in the outputs given up.

    Args:
      demand: on the outermost body, of which every output is needed or zeroed.
      dispensable: which equations go that nothing read before either; all others of these stay,
        unless they read what goes.
    """
    scope = demand.scope
    inputs = (True,) * len(jaxprs.invars(scope.body))
    return _Stripper(dispensable).body(demand, inputs)


class _Stripper:
    def __init__(self, dispensable: Dispensable) -> None:
        self._dispensable = dispensable
        self._done: dict[tuple[Any, ...], Body] = {}
        self._made: dict[tuple[Any, ...], Body] = {}

    def body(self, demand: Demand, inputs: Sequence[bool]) -> Body:
        """A body with the outputs that are needed, and the inputs that its callers keep."""
        key = id(demand), tuple(inputs)
        known = self._done.get(key)
        if known is None:
            known = self._done[key] = self._body(demand, inputs)
        return known

    def _body(self, demand: Demand, inputs: Sequence[bool]) -> Body:
        body = demand.scope.body
        jaxpr = jaxprs.opened(body)
        kept = [v for v, keep in zip(jaxprs.invars(body), inputs, strict=True) if keep]
        gone = {v for v, keep in zip(jaxprs.invars(body), inputs, strict=True) if not keep}
        renamed: dict[Var, Atom] = {}
        eqns: list[Eqn] = []
        was_live = set(demand.scope.live)
        for index, eqn in enumerate(jaxpr.eqns):
            if index in demand.live:
                made = self._needed(demand, index, eqn, renamed)
                eqns += made
                bound = {*renamed, *(v for e in made for v in e.outvars)}
                gone.update(v for v in eqn.outvars if v not in bound)
            elif (
                index in was_live
                or not gone.isdisjoint(a for a in eqn.invars if jaxprs.is_var(a))
                or self._dispensable(demand.scope, index)
            ):
                gone.update(eqn.outvars)
            else:
                eqns.append(jaxprs.substitute(eqn, renamed))
        outvars: list[Atom] = []
        for position, atom in enumerate(jaxpr.outvars):
            if position in demand.made_here:
                made, zero = _zeros(demand.scope, atom)
                eqns += made
                outvars.append(zero)
            elif demand.outputs[position]:
                outvars.append(renamed.get(atom, atom) if jaxprs.is_var(atom) else atom)
        return self._rebuilt(body, kept, eqns, outvars)

    def _rebuilt(
        self, body: Body, kept: Sequence[Var], eqns: Sequence[Eqn], outvars: Sequence[Atom]
    ) -> Body:
        """The body of these parts; the same object for the same parts, so that sharing survives."""
        jaxpr = jaxprs.opened(body)
        same = [len(new) == len(old) and all(map(_is, new, old)) for new, old in (
            (kept, jaxprs.invars(body)), (eqns, jaxpr.eqns), (outvars, jaxpr.outvars)
        )]  # fmt: skip
        if all(same):
            return body
        parts = (*kept, None, *(_what(e) for e in eqns), None, *outvars)
        key = (id(body), *(p if isinstance(p, tuple) else id(p) for p in parts))
        known = self._made.get(key)
        if known is None:
            known = jaxprs.rebuild(
                body,
                invars=None if same[0] else kept,
                eqns=None if same[1] else eqns,
                outvars=None if same[2] else outvars,
            )
            check_stripped(known, body)
            self._made[key] = known
        return known

    def _needed(self, demand: Demand, index: int, eqn: Eqn, renamed: dict[Var, Atom]) -> list[Eqn]:
        cut = demand.cuts.get(index)
        if cut is not None:
            return _cut(eqn, cut.chosen, renamed)
        part = demand.parts.get(index)
        if part is not None:
            for new, old in part.bodies:
                check_stripped(new, old)
            return [jaxprs.substitute(part.eqn, renamed)]
        if index not in demand.results:
            return [jaxprs.substitute(eqn, renamed)]
        results, operands = demand.results[index], demand.operands[index]
        children = demand.children.get(index)
        if children is None:  # a result for each operand
            if all(results):
                return [jaxprs.substitute(eqn, renamed)]
            invars = [a for a, keep in zip(eqn.invars, operands, strict=True) if keep]
            outvars = [v for v, keep in zip(eqn.outvars, results, strict=True) if keep]
            return [jaxprs.substitute(eqn.replace(invars=invars, outvars=outvars), renamed)]
        narrower: dict[BodyKey, Body] = {}
        with tracing.inside(eqn):
            for key, child in children.items():
                ports = demand.scope.entered(index, key).inputs
                inputs = [p.outer is None or operands[p.outer] for p in ports]
                narrower[key] = self.body(child, inputs)
        was = {e.key: e.body for e in compat_bodies.carried(eqn).entered}
        if all(narrower[key] is was[key] for key in was):
            return [jaxprs.substitute(eqn, renamed)]
        return [jaxprs.substitute(edit.narrowed(eqn, operands, results, narrower), renamed)]


def _is(a: Any, b: Any) -> bool:
    return a is b


def _what(eqn: Eqn) -> Any:
    """Equal for two equations made from one in the same way."""
    params = tuple(id(v) for v in eqn.params.values() if jaxprs.is_body(v))
    branches = tuple(id(v) for v in eqn.params.get("branches", ()))
    atoms = (*eqn.invars, None, *eqn.outvars)
    return (id(eqn.primitive), params, branches, *map(id, atoms))


def _cut(eqn: Eqn, chosen: int | None, renamed: dict[Var, Atom]) -> list[Eqn]:
    """What an equation's result is without the operands that don't count."""
    (result,) = eqn.outvars
    if chosen is None:
        made, (zero,) = tracing.inline(lambda: [tracing.zeros(result.aval)], [], eqn)
        renamed[result] = zero
        return made
    atom = eqn.invars[chosen]
    renamed[result] = renamed.get(atom, atom) if jaxprs.is_var(atom) else atom
    return []


def _zeros(scope: Scope, atom: Atom) -> tuple[list[Eqn], Atom]:
    """Zeros of an output's type, made where the output was."""
    place = scope.definition(atom)
    assert place is not None  # an input or a literal is no gradient
    made, (zero,) = tracing.inline(lambda: [tracing.zeros(atom.aval)], [], scope.eqns[place[0]])
    return made, zero
