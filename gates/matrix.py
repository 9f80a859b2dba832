"""Run a gate: lower every program once, judge every cell, guard against showing nothing."""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..lowering.artifact import load
from ..lowering.change import Difference, Verdict
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Program
from .child import ChildFailed, Job, run
from .config import Cell, Matrix, Node
from .containment import strays
from .parallel import in_order
from .shard import Shard
from .vacuity import unmet, work

Status = Literal["holds", "broken", "undecided"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CellResult:
    """What came of one cell."""

    cell: Cell
    status: Status
    messages: tuple[str, ...]
    """Why it is broken or undecided."""
    difference: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cell": self.cell.name,
            "program": self.cell.program,
            "expects": "identical" if self.cell.identical else "differs",
            "status": self.status,
            "messages": list(self.messages),
            "difference": None if self.difference is None else self.difference.to_json(),
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What a part of the matrix doesn't show."""
        if self.shard is None or not self.cells:
            return ()
        return (
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
        for identical, text in ((True, "identical"), (False, "controls differ")):
            kind = [c for c in self.cells if c.cell.identical is identical]
            held = sum(c.status == "holds" for c in kind)
            if kind:
                halves.append(f"{held} of {len(kind)} {text}")
        undecided = sum(c.status == "undecided" for c in self.cells)
        halves += [f"{undecided} undecided"] if undecided else []
        if not self.cells:
            part = f"shard {self.shard} holds none of {self.total} cells"
            halves.append(part if self.shard is not None and self.total else "no cells")
        if self.guards:
            halves.append(f"{len(self.guards)} guard{'s' * (len(self.guards) > 1)} failed")
        if self.shard is not None and self.cells:
            halves.append(f"shard {self.shard}: {len(self.cells)} of {self.total} cells")
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


@dataclass(frozen=True)
class Ready:
    """A lowered program, and what its case expects and doesn't find."""

    program: Program
    unmet: tuple[str, ...] = ()


Lowered = Mapping[Node, Ready | ChildFailed]


def run_matrix(
    matrix: Matrix,
    progress: Progress | None = None,
    *,
    jobs: int = 1,
    shard: Shard | None = None,
) -> GateResult:
    """Lowers and compares everything that ``matrix`` asks for.

    Args:
        matrix: the cells.
        progress: called with what was just done, once for each lowering and once for each cell;
            `steps` says how often that will be.
        jobs: how many programs to lower at once. The result doesn't depend on it.
        shard: the part of the matrix to run; None is the whole.
    """
    note = progress or (lambda text: None)
    part = part_of(matrix, shard)
    lowered = _lower_all(part, note, jobs)
    results = []
    for cell in part.cells:
        results.append(judge(cell, lowered))
        note(cell.name)
    found = guards(matrix, lowered)
    return GateResult(tuple(results), tuple(found), shard, len(matrix.cells))


def part_of(matrix: Matrix, shard: Shard | None) -> Matrix:
    """``matrix`` with the cells of one shard."""
    return matrix if shard is None else replace(matrix, cells=shard.of(matrix.cells))


def steps(matrix: Matrix) -> int:
    """How often `run_matrix` calls its ``progress``."""
    return len({node.work for node in matrix.nodes()}) + len(matrix.cells)


def _lower_all(matrix: Matrix, note: Progress, jobs: int) -> Lowered:
    levels: dict[tuple[Any, ...], set[str]] = {}
    for cell in matrix.cells:
        for node in (cell.node, cell.other):
            levels.setdefault(node.work, set()).add(cell.level)
    first: dict[tuple[Any, ...], Node] = {}
    for node in matrix.nodes():
        first.setdefault(node.work, node)
    nodes = list(first.values())

    def one(node: Node) -> Callable[[], Ready | ChildFailed]:
        wanted = tuple(level for level in LEVELS if level in levels[node.work])
        return lambda: _lower(node, wanted, matrix)

    done = in_order(
        [one(node) for node in nodes],
        jobs,
        lambda index: note(f"{nodes[index].program}: {nodes[index].name}"),
    )
    by_work = dict(zip(first, done, strict=True))
    return {node: by_work[node.work] for node in matrix.nodes()}


def _lower(node: Node, levels: tuple[str, ...], matrix: Matrix) -> Ready | ChildFailed:
    with tempfile.TemporaryDirectory(prefix="relower-gate-") as folder:
        output = Path(folder, "cell.program")
        job = Job(
            "lower",
            spec=node.spec,
            args=node.args,
            passes=node.passes,
            target=node.target,
            route=node.route,
            mesh=None if node.mesh is None else dict(node.mesh),
            levels=levels,
            output=str(output),
        )
        try:
            answer = run(job, timeout=matrix.timeout, cwd=matrix.folder)
            program = load(output)
            return Ready(program, tuple(unmet(program, answer["expect"])))
        except ChildFailed as error:
            return error
        except InputError as error:
            return ChildFailed(str(error), "input")


def judge(cell: Cell, lowered: Lowered) -> CellResult:
    """Compares the two programs of a cell, and checks what else it expects.

    The difference's first side is the program that the cell refers to.
    """
    ours, other = lowered[cell.node], lowered[cell.other]
    failed = [f"{n.name}: {p}" for n, p in ((cell.node, ours), (cell.other, other))
              if isinstance(p, ChildFailed)]  # fmt: skip
    if isinstance(ours, ChildFailed) or isinstance(other, ChildFailed):
        return CellResult(cell, "undecided", tuple(failed))
    sides = ((cell.node.name, ours), (cell.other.name, other))
    vacuous = [
        f"{name} has no operations: nothing was compared"
        for name, ready in sides
        if not work(ready.program)
    ]
    vacuous += [f"{name}: {text}" for name, ready in sides for text in ready.unmet]
    try:
        found = diff(other.program, ours.program, cell.level, cell.allow)
    except InputError as error:
        return CellResult(cell, "undecided", (str(error),))
    messages = [*vacuous, *_expectations(cell, ours.program)]
    undecided = found.verdict is Verdict.UNKNOWN
    if undecided:
        messages += [f"undecided: {reason}" for reason in found.reasons]
    elif cell.identical and found.verdict is not Verdict.IDENTICAL:
        messages.append(f"must be identical, and differs ({len(found.changes)} differences)")
    elif not cell.identical and found.verdict is not Verdict.DIFFERENT:
        messages.append("must differ, and is identical: the control shows nothing")
    elif cell.only_in:
        messages += strays(found, cell.only_in)
    broken = len(messages) > (len(found.reasons) if undecided else 0)
    status: Status = "broken" if broken else "undecided" if undecided else "holds"
    return CellResult(cell, status, tuple(messages), found)


def _expectations(cell: Cell, program: Program) -> list[str]:
    name = cell.node.name
    found = []
    if isinstance(cell.kernels, int):
        calls = sum(program.kernel_calls.values())
        if calls != cell.kernels:
            found.append(f"{name} calls {calls} kernels; wanted {cell.kernels}")
    elif cell.kernels is not None:
        for pattern, wanted in cell.kernels.items():
            calls = sum(
                count
                for key, count in program.kernel_calls.items()
                if fnmatch.fnmatchcase(program.kernels[key].label, pattern)
            )
            if calls != wanted:
                found.append(f"{name} calls kernel {pattern!r} {calls} times; wanted {wanted}")
    for op, wanted in cell.ops.items():
        count = program.ops.get(op, 0)
        if count != wanted:
            found.append(f"{name} has {count} {op}; wanted {wanted}")
    return found


def guards(matrix: Matrix, lowered: Lowered) -> list[str]:
    """What would make a green gate mean nothing.

    ``matrix`` is the whole, of which ``lowered`` may hold a part: what the cells say is judged on
    the whole, and what the programs are, on those at hand.
    """
    if not matrix.cells:
        return ["there are no cells: nothing was compared"]
    found = []
    if matrix.controls and all(cell.identical for cell in matrix.cells):
        found.append(
            "there is no control: add a cell with differs-from, to show that a difference would be "
            "seen, or set controls = false under [gate]"
        )
    return found + _duplicates(matrix, lowered)


def _duplicates(matrix: Matrix, lowered: Lowered) -> list[str]:
    """Programs that are one, though no chain of ``identical-to`` says so."""
    group = {node: node for node in matrix.nodes()}

    def root(node: Node) -> Node:
        while group[node] != node:
            node = group[node]
        return node

    for cell in matrix.cells:
        if cell.identical:
            group[root(cell.node)] = root(cell.other)
    compared = {frozenset((c.node, c.other)) for c in matrix.cells}
    found = []
    nodes = [node for node in matrix.nodes() if node in lowered]
    for index, a in enumerate(nodes):
        for b in nodes[index + 1 :]:
            declared = root(a) == root(b) or frozenset((a, b)) in compared
            if a.program == b.program and not declared and _same(lowered[a], lowered[b]):
                found.append(
                    f"{a.program}: {a.name} and {b.name} lower to one program, and no cell says "
                    "that they are identical"
                )
    return found


def _same(a: Ready | ChildFailed, b: Ready | ChildFailed) -> bool:
    """Whether two programs have one digest at the strictest level that both hold."""
    if isinstance(a, ChildFailed) or isinstance(b, ChildFailed):
        return False
    left, right = a.program.forms, b.program.forms
    for level in LEVELS:
        if level in left and level in right:
            return left[level].digest == right[level].digest
    return False
