"""What a site costs as it is, and as each way to rewrite it would leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    def saving(self) -> float:
        """Cycles that the cheapest way saves; 0 where none does."""
        return 0.0 if self.chosen is None else self.before - self.after[self.chosen]

    def __str__(self) -> str:
        """One line for people."""
        if self.why is not None:
            return f"not measured, the rule of thumb decided: {self.why}"
        ways = ", ".join(f"{name} {cycles:,.0f}" for name, cycles in self.after.items())
        line = f"measured: {self.before:,.0f} estimated cycles as it is; {ways}; rung {self.rung}"
        rest = [f"{name} ({why})" for name, why in self.missing.items()]
        return line + (f"; without a figure: {', '.join(rest)}" if rest else "")
