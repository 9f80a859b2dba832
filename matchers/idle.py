"""Tell for little that a program has nothing of some kinds that is live and not needed.

`Demands` finds out what is needed, equation by equation. Mostly that is all that is live, but for
what makes an operand that the body of a call doesn't read. To follow these alone takes less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..compat import jaxprs
from ..compat.bodies import Role
from ..compat.jaxprs import Atom, Var
from .dataflow import Dataflow, pairwise
from .graph import OUTPUT, Scope


def none_idle(flow: Dataflow, kinds: Collection[Any]) -> bool:
    """Whether no live equation of one of the primitives ``kinds`` is without need.

    False is no answer: at a result of an equation with a body that nothing reads, at loops and
    barriers, `Demands` knows. Of a body with several calls, what one of them doesn't need is taken
    as not needed by any, so that more is looked at than there is.
    """
    return not flow.idle_results and _Following(flow, kinds).ends_well()


class _Following:
    def __init__(self, flow: Dataflow, kinds: Collection[Any]) -> None:
        self.flow = flow
        self.kinds = kinds
        self.unneeded: set[tuple[int, int, Var]] = set()
        """Scope, equation and an operand that the equation doesn't need."""
        self.waiting: list[tuple[Scope, Var]] = []
        self.gone: set[tuple[int, int]] = set()

    def ends_well(self) -> bool:
        """Whether all that is followed is of other kinds."""
        for scope in self.flow.scopes:
            for position in scope.unread:
                self._not_handed_in(scope, position)
        while self.waiting:
            scope, var = self.waiting.pop()
            if self._is_needed(scope, var):
                continue
            made = scope.definition(var)
            if made is None:
                entry = scope.position(var)
                if entry is not None:
                    self._not_handed_in(scope, entry)
            elif not self._made_for_nothing(scope, *made):
                return False
        return True

    def _is_needed(self, scope: Scope, var: Var) -> bool:
        key = id(scope)
        return any((key, reader, var) not in self.unneeded for reader in scope.readers(var))

    def _without(self, scope: Scope, index: int, atoms: Iterator[Atom]) -> None:
        """Take note that an equation, or an output, doesn't need some operands."""
        for atom in atoms:
            if not jaxprs.is_literal(atom):
                self.unneeded.add((id(scope), index, atom))
                self.waiting.append((scope, atom))

    def _not_handed_in(self, scope: Scope, position: int) -> None:
        for caller in scope.callers:
            outer = caller.entered.inputs[position].outer
            if outer is not None:
                operand = caller.scope.eqns[caller.index].invars[outer]
                self._without(caller.scope, caller.index, iter((operand,)))

    def _made_for_nothing(self, scope: Scope, index: int, result: int) -> bool:
        """Follow what makes a result; False where that is for `Demands` to tell."""
        eqn = scope.eqns[index]
        if eqn.primitive in pairwise() or eqn.primitive in self.kinds:
            return False
        all_gone = not any(self._is_needed(scope, v) for v in eqn.outvars)
        children = scope.children.get(index, {})
        if children and (all_gone or len(children) > 1):
            return False
        for key, child in children.items():
            entered = scope.entered(index, key)
            if entered.role is not Role.CALL:
                return False
            outs = jaxprs.opened(child.body).outvars
            ports = zip(entered.outputs, outs, strict=True)
            self._without(child, OUTPUT, (a for p, a in ports if p.outer == result))
        if not children and all_gone and not eqn.effects and (id(scope), index) not in self.gone:
            self.gone.add((id(scope), index))
            self._without(scope, index, iter(eqn.invars))
        return True
