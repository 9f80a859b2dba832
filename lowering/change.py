"""What a comparison of two programs found, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from .program import Level, Location, Unknown

Kind = Literal[
    "attribute",
    "operation",
    "operands",
    "type",
    "added",
    "removed",
    "moved",
    "blocks",
    "callee",
    "text",
]


_GROUPS_IN_TEXT = 30


class Verdict(Enum):
    """What may be said of two programs; the value is the exit code of ``relower diff``."""

    IDENTICAL = 0
    DIFFERENT = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class Change:
    """One difference between two programs."""

    kind: Kind
    op: str
    """The operation, or the section where a whole one was added or removed."""
    detail: str
    """Which part: an attribute's path, ``operand 1``, ``result types``; empty for a whole."""
    a: str
    b: str
    """Both sides, shortened around the first character that differs."""
    section: str
    """What the user calls the function or kernel."""
    section_kind: Literal["module", "function", "kernel"]
    path: tuple[str, ...] = ()
    """The operations that enclose this one, outermost first."""
    where_a: Location | None = None
    where_b: Location | None = None
    places: tuple[Location | None, ...] = ()
    """Whose scopes this touches: its own, or those of the values that a use was rewired between."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kind": self.kind,
            "op": self.op,
            "detail": self.detail,
            "a": self.a,
            "b": self.b,
            "section": self.section,
            "section_kind": self.section_kind,
            "path": list(self.path),
            "where_a": location_json(self.where_a),
            "where_b": location_json(self.where_b),
        }


@dataclass(frozen=True)
class Group:
    """Changes that say the same in one or several places."""

    changes: tuple[Change, ...]

    @property
    def first(self) -> Change:
        """The one that stands for all."""
        return self.changes[0]

    @property
    def sections(self) -> tuple[str, ...]:
        """The functions or kernels it occurs in, in order."""
        return tuple(dict.fromkeys(change.section for change in self.changes))

    def to_json(self) -> dict[str, Any]:
        """The first change, the count, and where the others are."""
        return {
            **self.first.to_json(),
            "count": len(self.changes),
            "sections": list(self.sections),
            "places": sorted({place_text(c.where_b or c.where_a) for c in self.changes}),
        }


@dataclass(frozen=True)
class Touched:
    """What a difference touches, for ``only-in``."""

    kernels: frozenset[str]
    """Labels of kernels whose body differs, or that are on one side only."""
    scopes: frozenset[str]
    """Name scopes of the operations that differ outside kernels."""
    unplaced: int = 0
    """Differences outside kernels that have no name scope."""


@dataclass(frozen=True)
class Difference:
    """The verdict on two programs at one level, and what it rests on."""

    verdict: Verdict
    level: Level
    digests: tuple[str, str]
    reasons: tuple[str, ...] = ()
    """Why the verdict isn't IDENTICAL, where no change below says it."""
    groups: tuple[Group, ...] = ()
    notes: tuple[str, ...] = ()
    """Where the comparison was cut short to stay within its bounds."""
    unknowns: tuple[tuple[Literal["a", "b"], Unknown], ...] = ()
    allowed: tuple[str, ...] = ()
    """Fields of the stamp that differ and were allowed by name."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes, ungrouped."""
        return tuple(change for group in self.groups for change in group.changes)

    def touched(self) -> Touched:
        """The kernels and name scopes that the changes touch."""
        kernels: set[str] = set()
        scopes: set[str] = set()
        unplaced = 0
        for change in self.changes:
            if change.section_kind == "kernel":
                kernels.add(change.section)
                continue
            found = {p.scope for p in change.places if p is not None and p.scope}
            scopes |= found
            unplaced += not found or any(p is None or not p.scope for p in change.places)
        return Touched(frozenset(kernels), frozenset(scopes), unplaced)

    def __str__(self) -> str:
        """The report in plain text: the first groups of differences, the verdict last."""
        lines: list[str] = []
        for group in self.groups[:_GROUPS_IN_TEXT]:
            change = group.first
            times = f", {len(group.changes)} times alike" if len(group.changes) > 1 else ""
            inside = " › ".join((f"{change.section_kind} {change.section}", *change.path))
            lines.append(f"{inside} › {change.op}: {change.detail or change.kind}{times}")
            lines.extend(
                f"  {sign} {side}" for sign, side in (("-", change.a), ("+", change.b)) if side
            )
            lines.append(f"  {place_text(change.where_b or change.where_a)}")
        if len(self.groups) > _GROUPS_IN_TEXT:
            lines.append(f"… and {len(self.groups) - _GROUPS_IN_TEXT} more groups of differences")
        lines.extend(f"note: {note}" for note in self.notes)
        lines.extend(self.reasons)
        count = len(self.changes)
        tail = f": {count} difference{'' if count == 1 else 's'}" if count else ""
        return "\n".join([*lines, f"{self.verdict.name} at level {self.level}{tail}"])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the tree is sections → groups of changes."""
        touched = self.touched()
        return {
            "verdict": self.verdict.name,
            "level": self.level,
            "digests": list(self.digests),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "allowed": list(self.allowed),
            "unknowns": [
                {
                    "side": side,
                    "construct": unknown.construct,
                    "reason": unknown.reason,
                    "where": location_json(unknown.where),
                }
                for side, unknown in self.unknowns
            ],
            "touched": {
                "kernels": sorted(touched.kernels),
                "scopes": sorted(touched.scopes),
                "unplaced": touched.unplaced,
            },
            "change_count": len(self.changes),
            "groups": [group.to_json() for group in self.groups],
        }


@dataclass
class Collector:
    """Gathers changes up to a bound, and groups them."""

    limit: int
    changes: list[Change] = field(default_factory=list)
    dropped: int = 0

    def add(self, changes: Iterable[Change]) -> None:
        """Keeps what fits and counts the rest."""
        for change in changes:
            if len(self.changes) < self.limit:
                self.changes.append(change)
            else:
                self.dropped += 1

    def groups(self) -> tuple[Group, ...]:
        """The changes by what they say, in the order found."""
        found: dict[tuple[str, ...], list[Change]] = {}
        for c in self.changes:
            kernel = c.section if c.section_kind == "kernel" else c.section_kind
            found.setdefault((c.kind, c.op, c.detail, c.a, c.b, kernel), []).append(c)
        return tuple(Group(tuple(changes)) for changes in found.values())


def location_json(where: Location | None) -> dict[str, Any] | None:
    """A location as JSON values."""
    if where is None:
        return None
    return {"file": where.file, "line": where.line, "scope": where.scope}


def place_text(where: Location | None) -> str:
    """``file:line``, or an empty text."""
    if where is None or where.file is None:
        return ""
    return where.file if where.line is None else f"{where.file}:{where.line}"
