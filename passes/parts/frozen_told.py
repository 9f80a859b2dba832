"""Which equations and results are needed, in all the calls of the bodies that they stand in."""

from __future__ import annotations

from collections.abc import Callable

from ...matchers.demand import Demand
from ...matchers.graph import Scope
from ...matchers.value_walk import Place

Told = Callable[[Place], bool]
"""Says something of an equation."""


def contexts(demand: Demand) -> dict[int, list[Demand | None]]:
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


def told_apart(demand: Demand) -> tuple[Told, Told]:
    """Whether an equation is dead, and whether it is live, in some call of its body."""
    found = contexts(demand)

    def dead(place: Place) -> bool:
        scope, index = place
        return any(d is None or index not in d.live for d in found.get(id(scope), ()))

    def live(place: Place) -> bool:
        scope, index = place
        return any(d is not None and index in d.live for d in found.get(id(scope), ()))

    return dead, live


def makes(demand: Demand, index: int, result: int) -> bool:
    """Whether a result is still made, in a body of which this is needed."""
    left = demand.parts.get(index)
    return index in demand.live and (left is None or left.results[result])


def carry_dropped(demand: Demand, carry: tuple[Scope, int, int]) -> bool:
    """Whether a loop, given with one of its results, no longer carries it in some call."""
    scope, index, result = carry
    found = contexts(demand).get(id(scope), ())
    return any(
        d is None or index not in d.live or not d.results.get(index, (True,) * (result + 1))[result]
        for d in found
    )
