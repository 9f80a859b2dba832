"""What came of a gate: each cell, the guards, and the closing line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..lowering.change import Difference
from ..lowering.words import plural
from .cells import Cell
from .shard import Shard

Status = Literal["holds", "broken", "undecided"]
_CLOSING = {
    "identical": "identical",
    "differs": "controls differ",
    "snapshot": "snapshots match",
    "locked": "keep their sites",
    "numerics": "agree in numbers",
    "numerics-control": "numeric controls caught",
}


@dataclass(frozen=True)
class CellResult:
    """What came of one cell."""

    cell: Cell
    status: Status
    messages: tuple[str, ...]
    """Why it is broken or undecided."""
    difference: Difference | None = None
    numerics: Mapping[str, Any] | None = None
    """Of a cell of kind numerics, every figure."""

    @property
    def sides(self) -> tuple[str, str]:
        """What ``-`` and ``a`` stand for in the difference, and what ``+`` and ``b`` do."""
        other = "" if self.cell.other is None else self.cell.other.name
        return f"- a: {self.cell.node.name}", f"+ b: {other}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cell": self.cell.name,
            "program": self.cell.program,
            "expects": self.cell.kind,
            "status": self.status,
            "messages": list(self.messages),
            "a": self.cell.node.name,
            "b": None if self.cell.other is None else self.cell.other.name,
            "difference": None if self.difference is None else self.difference.to_json(),
            **({} if self.numerics is None else {"numerics": dict(self.numerics)}),
        }


@dataclass(frozen=True)
class GateResult:
    """All cells, and the guards that failed."""

    cells: tuple[CellResult, ...]
    guards: tuple[str, ...]
    """Why the matrix as a whole shows less than it seems to."""
    shard: Shard | None = None
    """The part that was run; None is the whole."""
    total: int = 0
    """Cells of the whole matrix."""
    remarks: tuple[str, ...] = ()
    """What was reused, written or left aside on the way."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, and what a part of the matrix doesn't show."""
        if self.shard is None or not self.cells:
            return self.remarks
        return (
            *self.remarks,
            "whether two variants lower to one program was checked among the programs of this "
            "shard only",
        )

    @property
    def exit_code(self) -> int:
        """0 all hold, 1 something is broken, 2 nothing is broken but something is undecided."""
        if self.guards or any(c.status == "broken" for c in self.cells):
            return 1
        return 2 if any(c.status == "undecided" for c in self.cells) else 0

    @property
    def closing(self) -> str:
        """As in ``45 of 45 identical, 9 of 9 controls differ``."""
        halves = []
        for name, text in _CLOSING.items():
            kind = [c for c in self.cells if c.cell.kind == name]
            held = sum(c.status == "holds" for c in kind)
            if kind:
                halves.append(f"{held} of {len(kind)} {text}")
        undecided = sum(c.status == "undecided" for c in self.cells)
        halves += [f"{undecided} undecided"] if undecided else []
        if not self.cells:
            part = f"shard {self.shard} holds none of {plural(self.total, 'cell')}"
            halves.append(part if self.shard is not None and self.total else "no cells")
        if self.guards:
            halves.append(f"{plural(len(self.guards), 'guard')} failed")
        if self.shard is not None and self.cells:
            halves.append(f"shard {self.shard}: {len(self.cells)} of {plural(self.total, 'cell')}")
        return ", ".join(halves)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "exit_code": self.exit_code,
            "closing": self.closing,
            "cells": [cell.to_json() for cell in self.cells],
            "guards": list(self.guards),
            "shard": None if self.shard is None else str(self.shard),
            "total": self.total,
            "notes": list(self.notes),
        }
