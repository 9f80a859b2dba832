"""The order of a body's equations where a replacement stands for several of them.

Several equations become one at the place of the first, so that what the others' operands need has
to come before it. Only pure equations are brought forward, and none over a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...compat import jaxprs
from ...compat.jaxprs import Atom, Eqn, Var
from ...matchers.motion import is_barrier, is_pure
from ..base import Accepted, Reason, SiteDeclined


def order_of(eqns: Sequence[Eqn], sites: Mapping[int, Accepted]) -> Sequence[int]:
    """The indices of ``eqns`` in the order in which to emit them.

    Those that go with a root are left out.

    Args:
      eqns: the equations of one body.
      sites: what is to be replaced, by the index of the root.

    Raises:
      SiteDeclined: what a replacement needs can't come before its root.
    """
    if not any(site.replacement.also for site in sites.values()):
        return range(len(eqns))
    return _Order(eqns, sites).run()


class _Order:
    def __init__(self, eqns: Sequence[Eqn], sites: Mapping[int, Accepted]) -> None:
        self.eqns = eqns
        self.sites = sites
        self.root_of = {i: root for root, s in sites.items() for i in s.replacement.also}
        self.made = {
            v: self.root_of.get(i, i) for i, eqn in enumerate(eqns) for v in eqn.outvars
        }  # fmt: skip
        self.placed: set[int] = set()
        self.order: list[int] = []

    def run(self) -> list[int]:
        for index in range(len(self.eqns)):
            if index in self.root_of and index in self.sites:
                raise self._declined(self.root_of[index], "taken", "another pass replaces a part",
                                     self.eqns[index].primitive.name)  # fmt: skip
        for index in range(len(self.eqns)):
            if index not in self.root_of and index not in self.placed:
                self._place(index)
        return self.order

    def _place(self, root: int) -> None:
        """Emit an equation after everything that it needs, without recursion."""
        waiting: set[int] = {root}
        stack: list[tuple[int, Iterator[int]]] = [(root, self._needs(root))]
        while stack:
            index, needs = stack[-1]
            needed = next((n for n in needs if n not in self.placed), None)
            if needed is None:
                stack.pop()
                waiting.discard(index)
                self.placed.add(index)
                self.order.append(index)
            elif needed in waiting:
                raise self._declined(root, "dependent", "a part depends on another part's result",
                                     self.eqns[needed].primitive.name)  # fmt: skip
            else:
                self._check_movable(root, self.eqns[needed])
                waiting.add(needed)
                stack.append((needed, self._needs(needed)))

    def _needs(self, index: int) -> Iterator[int]:
        site = self.sites.get(index)
        atoms: Sequence[Atom] = (
            self.eqns[index].invars if site is None else site.replacement.operands
        )
        variables: list[Var] = [a for a in atoms if jaxprs.is_var(a)]
        return iter([self.made[v] for v in variables if v in self.made])

    def _check_movable(self, root: int, eqn: Eqn) -> None:
        if not is_pure(eqn):
            raise self._declined(root, "effects", "an operand depends on an effect",
                                 eqn.primitive.name)  # fmt: skip
        if is_barrier(eqn):
            raise self._declined(root, "barrier", "an operand comes out of a barrier",
                                 eqn.primitive.name)  # fmt: skip

    def _declined(self, root: int, code: str, sentence: str, found: str) -> SiteDeclined:
        declined = SiteDeclined(
            Reason(code, sentence, found, "operands that can be ready at the first of the parts")
        )
        declined.blamed = (self.sites[root],) if root in self.sites else ()
        return declined
