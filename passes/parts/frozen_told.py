"""Which equations and results are needed, in all the calls of the bodies that they stand in."""

from __future__ import annotations

from ...matchers.demand import Demand
from ...matchers.graph import Scope
from ...matchers.value_walk import Place


class Told:
    """What is needed of a program, asked by equation: a body may be run from several places."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        """On the outermost body."""
        self._calls = _calls(demand)

    def of(self, scope: Scope) -> list[Demand | None]:
        """The demands on a scope; None where some call of it is not needed at all."""
        return self._calls.get(id(scope), [])

    def dead(self, place: Place) -> bool:
        """Whether an equation is not needed in some call of its body."""
        scope, index = place
        return any(d is None or index not in d.live for d in self.of(scope))

    def live(self, place: Place) -> bool:
        """Whether an equation is needed in some call of its body."""
        scope, index = place
        return any(d is not None and index in d.live for d in self.of(scope))

    def unmade(self, scope: Scope, index: int, result: int) -> bool:
        """Whether one result of an equation is no longer made in some call of its body."""
        return any(d is None or not _makes(d, index, result) for d in self.of(scope))

    def carry_dropped(self, carry: tuple[Scope, int, int]) -> bool:
        """Whether a loop, given with one of its results, no longer carries it in some call."""
        scope, index, result = carry
        return any(
            d is None
            or index not in d.live
            or not d.results.get(index, (True,) * (result + 1))[result]
            for d in self.of(scope)
        )


def _calls(demand: Demand) -> dict[int, list[Demand | None]]:
    """The demands on each scope, by its id; None where some call of it is not needed at all."""
    found: dict[int, list[Demand | None]] = {}
    waiting: list[tuple[Scope, Demand | None]] = [(demand.scope, demand)]
    while waiting:
        scope, known = waiting.pop()
        here = found.setdefault(id(scope), [])
        if any(known is other or (known and other and _alike(known, other)) for other in here):
            continue
        here.append(known)
        for index, children in scope.children.items():
            inner = known.children.get(index, {}) if known is not None else {}
            needed = known is not None and index in known.live
            for key, child in children.items():
                # Of an equation that can't do with fewer results, all stays as it is.
                everything = set(range(len(child.eqns)))
                whole = Demand(child, child.demanded, frozenset(), live=everything)
                waiting.append((child, inner.get(key, whole) if needed else None))
    return found


def _alike(a: Demand, b: Demand) -> bool:
    return a.live == b.live and a.results == b.results


def _makes(demand: Demand, index: int, result: int) -> bool:
    left = demand.parts.get(index)
    return index in demand.live and (left is None or left.results[result])
