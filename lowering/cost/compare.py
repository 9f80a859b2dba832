"""Two costs side by side, by the user's source line or by name scope, the largest saving first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .model import CYCLE_RUNGS, Cost, OpCost

NOWHERE = "no source line"

_HEAD = re.compile(r"^jit\([^)]*\)/")


@dataclass(frozen=True)
class Group:
    """What stands at one place in the two programs."""

    place: str
    """``file:line``, or a name scope where the two programs share no source line."""
    before: float | None
    """Cycles in one run; None where an operation has no figure, 0 where there is none."""
    after: float | None
    kinds_before: tuple[str, ...]
    kinds_after: tuple[str, ...]
    alike: bool
    """Whether the same operations on the same shapes stand there on both sides."""

    @property
    def saving(self) -> float | None:
        """Cycles saved, negative where it costs more; None where either side has no figure."""
        if self.before is None or self.after is None:
            return None
        return self.before - self.after


@dataclass(frozen=True)
class Comparison:
    """B against A."""

    a: Cost
    b: Cost
    groups: tuple[Group, ...]
    """Sorted by saving, those without a figure last; empty where cycles can't be compared."""
    unlike: str | None
    """Why cycles can't be compared; None where they can."""

    @property
    def compared(self) -> tuple[Group, ...]:
        """The groups with a figure on both sides."""
        return tuple(g for g in self.groups if g.saving is not None)

    @property
    def before(self) -> float:
        """Cycles of A in the groups compared."""
        return sum(g.before or 0.0 for g in self.compared)

    @property
    def after(self) -> float:
        """Cycles of B in the groups compared."""
        return sum(g.after or 0.0 for g in self.compared)

    @property
    def undecided(self) -> tuple[Group, ...]:
        """The groups that changed and have no figure on one side at least."""
        return tuple(g for g in self.groups if g.saving is None and not g.alike)

    @property
    def worse(self) -> bool | None:
        """Whether B costs more cycles than A; None where that can't be said.

        It can't where cycles of the two can't be compared, nothing has a figure on both sides, or
        a place that changed has none. Places alike on both sides need no figure.
        """
        if self.unlike is not None or self.undecided or not self.compared:
            return None
        return self.after > self.before


def compare(a: Cost, b: Cost, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compares two costs on the rung that both stand on.

    Cycles of different rungs, targets, clocks or compilers are not compared. Work that no rung has
    a figure for (SparseCore calls, copies that overlap) is left out on both sides.

    Args:
        a: before.
        b: after.
        names: what `Comparison.unlike` calls the two.
    """
    unlike = _unlike(a, b, *names)
    if unlike is not None:
        return Comparison(a, b, (), unlike)
    sources = ({op.source for op in cost.ops if op.source} for cost in (a, b))
    shared = bool(set.intersection(*sources))
    place = _by_source if shared else _by_scope
    before, after = _grouped(a.ops, place), _grouped(b.ops, place)
    groups = [
        Group(
            name,
            _sum(before.get(name, ())),
            _sum(after.get(name, ())),
            _kinds(before.get(name, ())),
            _kinds(after.get(name, ())),
            _work(before.get(name, ())) == _work(after.get(name, ())),
        )
        for name in dict.fromkeys((*before, *after))
    ]
    groups.sort(key=lambda g: (g.saving is None, -(g.saving or 0.0)))
    return Comparison(a, b, tuple(groups), None)


def _unlike(a: Cost, b: Cost, one: str, other: str) -> str | None:
    if a.target != b.target:
        return f"{one} is for {a.target}, {other} for {b.target}"
    if dict(a.versions) != dict(b.versions):
        return f"{one} was compiled by {_compiler(a, b)}, {other} by {_compiler(b, a)}"
    if a.rung != b.rung:
        return f"{one}'s figures stand on the rung '{a.rung}', {other}'s on '{b.rung}'"
    if a.rung not in CYCLE_RUNGS:
        return f"neither has cycles: both stand on the rung '{a.rung}'"
    return None


def _compiler(cost: Cost, other: Cost) -> str:
    """The versions that aren't the other's, as in ``libtpu 0.0.52``."""
    theirs = other.versions
    return ", ".join(f"{k} {v}" for k, v in cost.versions.items() if theirs.get(k) != v)


def _by_source(op: OpCost) -> str:
    return op.source or NOWHERE


def _by_scope(op: OpCost) -> str:
    """The scope without the function's own name in front and the operation's at its end."""
    return _HEAD.sub("", op.scope or "").rpartition("/")[0] or "top level"


def _grouped(ops: Iterable[OpCost], place: Callable[[OpCost], str]) -> dict[str, list[OpCost]]:
    found: dict[str, list[OpCost]] = {}
    for op in ops:
        if not op.overlapped and op.times != 0:
            found.setdefault(place(op), []).append(op)
    return found


def _sum(ops: Iterable[OpCost]) -> float | None:
    totals = [op.total for op in ops]
    return None if None in totals else sum(t for t in totals if t is not None)


def _work(ops: Iterable[OpCost]) -> Counter[tuple[str, str, int | None]]:
    return Counter((op.kind, op.shape, op.times) for op in ops)


def _kinds(ops: Iterable[OpCost]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.kind for op in ops))
