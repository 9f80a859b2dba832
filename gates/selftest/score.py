"""What a comparison made of each mutant and each variation, and the score over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["mutant", "noise"]
State = Literal["caught", "survived", "matched", "not matched", "not applicable"]


@dataclass(frozen=True)
class Row:
    """One mutant or variation of one program."""

    program: str
    name: str
    kind: Kind
    state: State
    reason: str = ""
    sites: int = 1
    """At how many places it was made."""
    levels: tuple[str, ...] = ()
    """Where it must, and does, differ or match."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        """The row that `to_json` described."""
        return cls(**{**value, "levels": tuple(value["levels"])})


@dataclass(frozen=True)
class Score:
    """All rows of one run."""

    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        """Survivors, and noise that wasn't matched."""
        return tuple(r for r in self.rows if r.state in ("survived", "not matched"))

    @property
    def nowhere(self) -> tuple[str, ...]:
        """Mutants and variations that apply to no program: they test nothing."""
        names = dict.fromkeys(row.name for row in self.rows)
        used = {row.name for row in self.rows if row.state != "not applicable"}
        return tuple(name for name in names if name not in used)

    @property
    def holds(self) -> bool:
        """Whether everything was caught and matched, and nothing was left untried."""
        return bool(self.rows) and not self.failures and not self.nowhere

    def line(self) -> str:
        """The score: mutants caught, variations matched."""
        mutants = self._counts("mutant", "caught")
        noise = self._counts("noise", "matched")
        return (
            f"{mutants[0]} of {mutants[1]} mutants caught, {noise[0]} of {noise[1]} variations "
            "matched"
        )

    def _counts(self, kind: Kind, good: State) -> tuple[int, int]:
        applied = [r for r in self.rows if r.kind == kind and r.state != "not applicable"]
        return sum(r.sites for r in applied if r.state == good), sum(r.sites for r in applied)


def names(rows: Sequence[Row], kind: Kind) -> tuple[str, ...]:
    """The mutants, or variations, in the order of their first row."""
    return tuple(dict.fromkeys(row.name for row in rows if row.kind == kind))
