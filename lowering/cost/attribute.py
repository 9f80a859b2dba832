"""Whose a saving is: the places of a comparison, gathered by the rewrites that changed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compare import Comparison, Group


@dataclass(frozen=True)
class RewriteSite:
    """A rewrite that B has and A hasn't."""

    name: str
    """Of the pass."""
    source: str | None
    """``file:line`` where the new operations stand."""
    lines: tuple[str, ...] = ()
    """All lines that it took operations from."""
    calls: int = 1

    @staticmethod
    def of_report(report: Mapping[str, Any]) -> tuple[RewriteSite, ...]:
        """The sites that were rewritten, from a report's JSON."""
        return tuple(
            RewriteSite(s["pass"], s["source"], tuple(s.get("lines", ())), s["calls"])
            for s in report["sites"]
            if s["status"] == "applied"
        )


@dataclass(frozen=True)
class SiteSaving:
    """What a rewrite saves, or several that share a line and can't be told apart."""

    sites: tuple[RewriteSite, ...]
    groups: tuple[Group, ...]
    """The places of the comparison that are theirs."""

    @property
    def label(self) -> str:
        """The passes, each once."""
        return " + ".join(dict.fromkeys(site.name for site in self.sites))

    @property
    def places(self) -> tuple[str, ...]:
        """Their lines that have operations in either program."""
        return tuple(group.place for group in self.groups)

    @property
    def saving(self) -> float:
        """Cycles saved at the places that have a figure in both programs; negative for a loss."""
        return sum(group.saving or 0.0 for group in self.groups)

    @property
    def before(self) -> float:
        """Cycles of A at those places."""
        return sum(group.before or 0.0 for group in self.groups if group.saving is not None)

    @property
    def undecided(self) -> bool:
        """Whether a place that changed has no figure."""
        return any(group.saving is None and not group.alike for group in self.groups)


@dataclass(frozen=True)
class Attribution:
    """A comparison's change by rewrite."""

    savings: tuple[SiteSaving, ...]
    """The largest first; a rewrite whose lines no operation stands at is there with none."""
    elsewhere: float
    """Cycles saved at places that belong to no rewrite: the compiler fuses otherwise there."""

    @property
    def saving(self) -> float:
        """Cycles saved at the rewrites' places."""
        return sum(found.saving for found in self.savings)

    @property
    def share(self) -> float | None:
        """The part of the whole change that the rewrites' places explain; None of no change."""
        whole = self.saving + self.elsewhere
        return self.saving / whole if whole else None


def attribute(found: Comparison, sites: Sequence[RewriteSite]) -> Attribution:
    """Gives each place of a comparison to the rewrites that took operations from its line.

    Args:
        found: A against B, B being A with the rewrites.
        sites: the rewrites.
    """
    by_line: dict[str, list[int]] = {}
    for number, site in enumerate(sites):
        for line in {line for line in (site.source, *site.lines) if line is not None}:
            by_line.setdefault(line, []).append(number)
    together = _together(by_line, found.groups, len(sites))
    groups: dict[int, list[Group]] = {}
    elsewhere = 0.0
    for group in found.groups:
        owners = by_line.get(group.place)
        if owners is None:
            elsewhere += group.saving or 0.0
        else:
            groups.setdefault(together[owners[0]], []).append(group)
    members: dict[int, list[RewriteSite]] = {}
    for number, site in enumerate(sites):
        members.setdefault(together[number], []).append(site)
    savings = [SiteSaving(tuple(of), tuple(groups.get(root, ()))) for root, of in members.items()]
    return Attribution(tuple(sorted(savings, key=lambda s: -s.saving)), elsewhere)


def _together(
    by_line: Mapping[str, Sequence[int]], groups: Sequence[Group], count: int
) -> list[int]:
    """For each rewrite, the first of those with which it shares a line that operations stand at."""
    root = list(range(count))

    def find(number: int) -> int:
        while root[number] != number:
            number = root[number]
        return number

    for group in groups:
        owners = [find(number) for number in by_line.get(group.place, ())]
        for other in owners[1:]:
            first, second = sorted((find(owners[0]), find(other)))
            root[second] = first
    return [find(number) for number in range(count)]
