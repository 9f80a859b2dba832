"""What a site costs as it is, and as each way to rewrite it would leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..words import agreeing, plural

ONE_WAY = "rewrite"
"""What the way of a pass that knows one only is called, and the one that was taken unasked."""


@dataclass(frozen=True)
class Measurement:
    """What a site costs as it is, and as each way would leave it; cycles of one execution."""

    rung: str | None = None
    before: float = 0.0
    after: Mapping[str, float] = field(default_factory=dict)
    """By the name of the way."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Ways without a figure, each with its reason."""
    chosen: str | None = None
    """The cheapest way, where it costs less than what stands there."""
    runs: int | None = None
    """How often one run of the program executes the site; None where that isn't known."""
    bytes: int = 0
    """HBM bytes that the site moves as it is."""
    why: str | None = None
    """Why nothing was measured, so that the rule of thumb decided."""

    @property
    def taken(self) -> float | None:
        """Cycles of the way that was taken; None where it has no figure."""
        if self.chosen is not None:
            return self.after[self.chosen]
        return self.after.get(ONE_WAY) if self.why is None else None

    @property
    def saving(self) -> float:
        """Cycles that the cheapest way saves; 0 where none does."""
        return 0.0 if self.chosen is None else self.before - self.after[self.chosen]

    def __str__(self) -> str:
        """One line for people."""
        if self.why is not None:
            return f"not measured, the rule of thumb decided: {self.why}"
        ways = ", ".join(f"{name} {cycles:,.0f}" for name, cycles in self.after.items())
        before = plural(round(self.before), "estimated cycle")
        line = f"measured: {before} as it is; {ways}; rung {self.rung}"
        rest = [f"{name} ({why})" for name, why in self.missing.items()]
        return line + (f"; without a figure: {', '.join(rest)}" if rest else "")


@dataclass(frozen=True)
class SiteSum:
    """What the rewritten sites of a program cost in one run, before and after, added up.

    Each was compiled alone, on the rung ``fragment``; the rest of the program isn't in it.
    """

    sites: int
    """Rewritten."""
    summed: int
    """Of those, with figures and a known number of runs."""
    before: float
    after: float
    bytes: int
    """HBM bytes that the sites summed move as they were."""
    missing: Mapping[str, int]
    """Why others have no figure, and how many."""

    @property
    def saving(self) -> float:
        """Cycles saved; negative for a loss."""
        return self.before - self.after

    def __str__(self) -> str:
        """One line for people."""
        line = (
            f"the rewritten sites alone: {self.before:,.0f} → {self.after:,.0f} cycles in one run, "
            f"rung fragment; {self.summed} of {plural(self.sites, 'site')} "
            f"{agreeing(self.summed, 'has', 'have')} a figure"
        )
        rest = "; ".join(f"{count} without: {why}" for why, count in self.missing.items())
        return f"{line} ({rest})" if rest else line


def sum_of_sites(report: Mapping[str, Any]) -> SiteSum:
    """The sum over the sites of a report, given as JSON, that were rewritten."""
    alone = Measurement(why="judged in the whole program, which has no fragment of it")
    applied = [site for site in report["sites"] if site["status"] == "applied"]
    before = after = 0.0
    moved = summed = 0
    missing: dict[str, int] = {}
    for site in applied:
        found = Measurement(**site["measured"]) if site.get("measured") else alone
        figure = found.taken
        if figure is None:
            why = found.why or "; ".join(found.missing.values()) or "no way has a figure"
        elif found.runs is None:
            why = "it runs an unknown number of times"
        else:
            before, after = before + found.before * found.runs, after + figure * found.runs
            moved += found.bytes * found.runs
            summed += 1
            continue
        missing[why] = missing.get(why, 0) + 1
    return SiteSum(len(applied), summed, before, after, moved, missing)
