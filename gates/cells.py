"""What a gate compares: programs to lower, cells that expect something of them, and the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..lowering.program import Level
from ..lowering.words import plural
from .budget import Budget
from .numerics_cell import Steps
from .pass_sets import PassChoice

Kind = Literal["identical", "differs", "snapshot", "numerics", "numerics-control", "locked"]


@dataclass(frozen=True)
class Node:
    """One program to lower: a variant under a pass set."""

    program: str
    variant: str
    pass_set: str
    spec: str
    args: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...] | None
    choice: PassChoice
    target: str | None
    route: str | None
    inputs: tuple[str, ...] = ()
    """Patterns of files that the case reads besides its sources."""

    @property
    def name(self) -> str:
        """``variant`` or ``variant+passes``."""
        return self.variant if self.pass_set == "none" else f"{self.variant}+{self.pass_set}"

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for nodes that are one lowering."""
        where = (self.target, self.route)
        return (self.spec, self.args, self.mesh, self.choice, *where, self.inputs)


@dataclass(frozen=True)
class Cell:
    """One expectation."""

    program: str
    node: Node
    other: Node | None
    """What it is compared with; None is its snapshot."""
    identical: bool
    """Must be identical; else must differ."""
    level: Level
    only_in: tuple[str, ...] = ()
    kernels: int | Mapping[str, int] | None = None
    ops: Mapping[str, int] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    budgets: tuple[Budget, ...] = ()
    references: Mapping[str, Node] = field(default_factory=dict)
    """The programs that budgets name."""
    numerics: Steps | None = None
    """How to compare what the two compute, for a cell that runs them and lowers neither."""
    locked: bool = False
    """Whether its sites must be those of ``relower.lock``; nothing is lowered for it."""

    @property
    def name(self) -> str:
        """As in ``moe: plain+packed = by_hand (dataflow)``."""
        if self.locked:
            return f"{self.lock_name} = lock (sites)"
        if self.numerics is not None and self.other is not None:
            sign = "≈" if self.identical else "≉"
            how = f"numerics, {plural(self.numerics.steps, 'step')}"
            return f"{self.program}: {self.node.name} {sign} {self.other.name} ({how})"
        sign = "=" if self.identical else "≠"
        other = "snapshot" if self.other is None else self.other.name
        return f"{self.program}: {self.node.name} {sign} {other} ({self.level})"

    @property
    def lock_name(self) -> str:
        """The program's name in ``relower.lock``."""
        return f"{self.program}: {self.node.name}"

    @property
    def kind(self) -> Kind:
        """What it expects."""
        if self.locked:
            return "locked"
        if self.numerics is not None:
            return "numerics" if self.identical else "numerics-control"
        if self.other is None:
            return "snapshot"
        return "identical" if self.identical else "differs"

    def nodes(self) -> tuple[Node, ...]:
        """Every program that has to be lowered for it."""
        if self.numerics is not None or self.locked:
            return ()
        other = () if self.other is None else (self.other,)
        return (self.node, *other, *self.references.values())


@dataclass(frozen=True)
class Matrix:
    """All cells of one file."""

    path: Path
    cells: tuple[Cell, ...]
    timeout: float
    controls: bool
    """Whether there must be a negative control."""

    @property
    def folder(self) -> Path:
        """What paths in the file are relative to."""
        return self.path.parent

    def uncontrolled(self) -> str | None:
        """What is missing where no cell shows that a difference would be seen, and one must."""
        if not self.controls or any(not cell.identical for cell in self.cells):
            return None
        return (
            "there is no control: add a cell with differs-from, to show that a difference would be "
            "seen, or set controls = false under [gate]"
        )

    def nodes(self) -> tuple[Node, ...]:
        """Every program that a cell names, once."""
        return tuple(dict.fromkeys(node for cell in self.cells for node in cell.nodes()))
