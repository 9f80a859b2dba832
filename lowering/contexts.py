"""From where functions and kernels are called: their operations' scopes as seen from the entry."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from .change import Change
from .program import Location

MAX_CONTEXTS = 200
"""Call paths that are followed for one function; a change below more of them counts as unplaced."""
MAX_DEPTH = 100
"""Calls within calls that are followed; what lies deeper counts as unplaced."""

Pair = tuple[str, str]
Places = tuple[Location | None, Location | None]
"""Where something is in the first and in the second program."""


@dataclass
class Contexts:
    """The calls that lead to each pair of sections."""

    _edges: dict[Pair, list[tuple[Pair, Places]]] = field(default_factory=lambda: defaultdict(list))
    _known: dict[Pair, tuple[Places, ...]] = field(default_factory=dict)

    def add(self, callee: Pair, caller: Pair, places: Places) -> None:
        """Records one call."""
        self._edges[callee].append((caller, places))

    def of(self, pair: Pair, depth: int = 0) -> tuple[Places, ...]:
        """The call sites of a pair as seen from the entry; empty for what nothing calls."""
        if depth > MAX_DEPTH:
            return ((None, None),)
        if pair not in self._known:
            self._known[pair] = ()  # a recursive function adds nothing to its own contexts
            found: dict[Places, None] = {}
            for caller, (a, b) in self._edges.get(pair, ()):
                for outer_a, outer_b in self.of(caller, depth + 1) or ((None, None),):
                    found[composed(outer_a, a), composed(outer_b, b)] = None
                    if len(found) > MAX_CONTEXTS:
                        found = {(None, None): None}
                        break
            self._known[pair] = tuple(found)
        return self._known[pair]

    def placed(self, change: Change, pair: Pair) -> Change:
        """``change`` with its places as seen from the entry."""
        contexts = self.of(pair)
        if not contexts:
            return change
        if change.section_kind == "kernel":
            # A kernel's own scopes begin anew; what counts is from where it is called.
            places = tuple(dict.fromkeys(p for context in contexts for p in context))
        else:
            own = change.places or (None,)
            places = tuple(
                dict.fromkeys(composed(p, o) for context in contexts for p in context for o in own)
            )
        first_a, first_b = contexts[0]
        return replace(
            change,
            places=places,
            where_a=composed(first_a, change.where_a) if change.kind != "added" else None,
            where_b=composed(first_b, change.where_b) if change.kind != "removed" else None,
        )


def composed(outer: Location | None, inner: Location | None) -> Location | None:
    """An operation's location in a function, seen from a call of that function."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    near = inner if inner.file is not None else outer
    scopes = [scope for scope in (outer.scope, inner.scope) if scope]
    return Location(near.file, near.line, "/".join(scopes) or None)
