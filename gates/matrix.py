"""Run a gate: lower every program once, judge every cell, guard against showing nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..lowering.artifact import load
from ..lowering.change import Verdict
from ..lowering.cost.cache import user_cache
from ..lowering.cost.model import Cost
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Program
from ..lowering.scratch import scratch
from ..lowering.words import plural
from .cache import Cache
from .cells import Cell, Matrix, Node
from .child import ChildFailed, Job, run
from .containment import strays
from .cost_budget import Costs, compile_node, nodes_to_compile
from .expectations import expectations
from .inputs import matched
from .lock import compared, lock_path
from .numerics_cell import answer, verdict
from .parallel import in_order
from .results import CellResult, GateResult, Status
from .revision import kept, split_revision
from .shard import Shard
from .snapshot_files import Kept, Mode, Outcome, check, unused
from .vacuity import unmet, work

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Ready:
    """A lowered program, and what its case expects and doesn't find."""

    program: Program
    unmet: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


Lowered = Mapping[Node, Ready | ChildFailed]


def run_matrix(
    matrix: Matrix,
    progress: Progress | None = None,
    *,
    jobs: int = 1,
    shard: Shard | None = None,
    snapshots: Mode = "check",
    cache: Cache | None = None,
) -> GateResult:
    """Lowers and compares everything that ``matrix`` asks for.

    Args:
        matrix: the cells.
        progress: called with what was just done, once for each lowering and once for each cell;
            `steps` says how often that will be.
        jobs: how many programs to lower at once. The result doesn't depend on it.
        shard: the part of the matrix to run; None is the whole.
        snapshots: what may be written of them.
        cache: where programs that were lowered before may be found; None lowers all.
    """
    note = progress or (lambda text: None)
    part = part_of(matrix, shard)
    with kept():
        lowered = _lower_all(part, note, jobs, cache)
        costs = _compile_all(part, note, cache)
    results = []
    for cell in part.cells:
        results.append(judge(cell, lowered, matrix, snapshots, costs))
        note(cell.name)
    found = guards(matrix, lowered)
    remarks = _remarks(part, lowered, cache)
    return GateResult(tuple(results), tuple(found), shard, len(matrix.cells), remarks)


def _remarks(matrix: Matrix, lowered: Lowered, cache: Cache | None) -> tuple[str, ...]:
    found = {
        f"{node.program}: {node.name}: {note}": None
        for node, ready in lowered.items()
        if isinstance(ready, Ready)
        for note in ready.notes
    }
    if cache is not None:
        found.update(dict.fromkeys(cache.remarks()))
        if cache.reused:
            programs = len({node.work for node in matrix.nodes()})
            found[f"{cache.reused} of {programs} programs from the cache"] = None
    return tuple(found)


def part_of(matrix: Matrix, shard: Shard | None) -> Matrix:
    """``matrix`` with the cells of one shard."""
    return matrix if shard is None else replace(matrix, cells=shard.of(matrix.cells))


def steps(matrix: Matrix) -> int:
    """How often `run_matrix` calls its ``progress``."""
    compiled = len(nodes_to_compile(matrix))
    return len({node.work for node in matrix.nodes()}) + compiled + len(matrix.cells)


def _compile_all(matrix: Matrix, note: Progress, cache: Cache | None) -> Costs:
    """What the programs cost that a budget is about; one at a time, each takes all cores."""
    by_work: dict[tuple[Any, ...], Cost | str] = {}
    answers = None if cache is None else user_cache()
    for node in nodes_to_compile(matrix):
        by_work[node.work] = compile_node(node, matrix, answers)
        note(f"{node.program}: {node.name}, compiled")
    return {node: by_work[node.work] for node in matrix.nodes() if node.work in by_work}


def _lower_all(matrix: Matrix, note: Progress, jobs: int, cache: Cache | None) -> Lowered:
    levels: dict[tuple[Any, ...], set[str]] = {}
    for cell in matrix.cells:
        for node in cell.nodes():
            levels.setdefault(node.work, set()).add(cell.level)
    first: dict[tuple[Any, ...], Node] = {}
    for node in matrix.nodes():
        first.setdefault(node.work, node)
    nodes = list(first.values())

    def one(node: Node) -> Callable[[], Ready | ChildFailed]:
        wanted = tuple(level for level in LEVELS if level in levels[node.work])
        return lambda: _lower(node, wanted, matrix, cache)

    done = in_order(
        [one(node) for node in nodes],
        jobs,
        lambda index: note(f"{nodes[index].program}: {nodes[index].name}"),
    )
    by_work = dict(zip(first, done, strict=True))
    return {node: by_work[node.work] for node in matrix.nodes()}


def _lower(
    node: Node, levels: tuple[str, ...], matrix: Matrix, cache: Cache | None
) -> Ready | ChildFailed:
    with scratch() as folder:
        output = Path(folder, "cell.program")
        job = Job(
            "lower",
            spec=node.spec,
            args=node.args,
            **asdict(node.choice),
            target=node.target,
            route=node.route,
            mesh=None if node.mesh is None else dict(node.mesh),
            levels=levels,
            output=str(output),
            record=cache is not None,
        )
        try:
            files = matched(node.inputs, matrix.folder)
            key = None if cache is None else cache.key(job, matrix.folder, files)
            known = None if cache is None or key is None else cache.find(key)
            if known is not None:
                program, answer = known
            else:
                answer = run(job, timeout=matrix.timeout, cwd=matrix.folder)
                program = load(output)
                if cache is not None and key is not None:
                    cache.store(key, job, output, answer)
            return Ready(program, tuple(unmet(program, answer["expect"])), tuple(answer["notes"]))
        except ChildFailed as error:
            return error
        except InputError as error:
            return ChildFailed(str(error), "input")


def judge(
    cell: Cell,
    lowered: Lowered,
    matrix: Matrix,
    snapshots: Mode,
    costs: Costs | None = None,
) -> CellResult:
    """Compares the two programs of a cell, and checks what else it expects.

    The difference's sides are the cell's, as its name reads: left first.
    """
    if cell.numerics is not None:
        return _numbers(cell, matrix)
    if cell.locked:
        return _sites(cell, matrix)
    failed = {f"{n.name}: {p}": None for n in cell.nodes()
              if isinstance(p := lowered[n], ChildFailed)}  # fmt: skip
    if failed:
        return CellResult(cell, "undecided", tuple(failed))
    ready = {node: p for node in cell.nodes() if isinstance(p := lowered[node], Ready)}
    sides = [node for node in (cell.node, cell.other) if node is not None]
    broken = [
        f"{node.name} has no operations: nothing was compared"
        for node in sides
        if not work(ready[node].program)
    ]
    broken += [f"{node.name}: {text}" for node in sides for text in ready[node].unmet]
    programs = {node: found.program for node, found in ready.items()}
    missed = expectations(cell, programs, costs)
    broken += [miss.text for miss in missed if miss.kind == "broken"]
    unclear = [miss.text for miss in missed if miss.kind == "undecided"]
    if cell.other is None:
        how = "check" if broken and snapshots == "accept" else snapshots
        return _against_snapshot(cell, programs[cell.node], matrix, how, broken, unclear)
    try:
        found = diff(programs[cell.node], programs[cell.other], cell.level, cell.allow)
    except InputError as error:
        return CellResult(cell, "undecided", (str(error),))
    if found.verdict is Verdict.UNKNOWN:
        unclear += [f"undecided: {reason}" for reason in found.reasons] or ["undecided"]
    elif cell.identical and found.verdict is not Verdict.IDENTICAL:
        broken.append(
            f"must be identical, and differs ({plural(len(found.changes), 'difference')})"
        )
    elif not cell.identical and found.verdict is not Verdict.DIFFERENT:
        broken.append("must differ, and is identical: the control shows nothing")
    elif cell.only_in:
        broken += strays(found, cell.only_in)
    return CellResult(cell, _status(broken, unclear), (*broken, *unclear), found)


def _sites(cell: Cell, matrix: Matrix) -> CellResult:
    """Compares the sites of a program with those of the lock file."""
    path = lock_path(matrix.path)
    try:
        broken, unclear, notes = compared(
            cell.lock_name, cell.node, path, matrix.folder, matrix.timeout
        )
    except InputError as error:
        return CellResult(cell, "undecided", (str(error),))
    return CellResult(cell, _status(broken, unclear), (*broken, *unclear, *notes))


def _numbers(cell: Cell, matrix: Matrix) -> CellResult:
    """Runs the two programs of a cell and compares what they compute."""
    assert cell.numerics is not None
    assert cell.other is not None
    found = answer(cell.other, cell.node, cell.numerics, matrix.folder, matrix.timeout)
    if isinstance(found, ChildFailed):
        return CellResult(cell, "undecided", (str(found),))
    broken, unclear, notes = verdict(found, cell.numerics, not cell.identical)
    said = (*broken, *unclear, *notes)
    return CellResult(cell, _status(broken, unclear), said, numerics=found)


def _status(broken: Sequence[str], unclear: Sequence[str]) -> Status:
    return "broken" if broken else "undecided" if unclear else "holds"


def _against_snapshot(
    cell: Cell,
    program: Program,
    matrix: Matrix,
    how: Mode,
    broken: list[str],
    unclear: list[str],
) -> CellResult:
    try:
        found = check(snapshot_of_cell(cell, matrix), program, how, f"{cell.program}: "
                      f"{cell.node.name}")  # fmt: skip
    except InputError as error:
        found = Outcome("undecided", (str(error),))
    missing = found.state == "missing" and how == "check"
    if found.state == "different" or missing:
        broken += found.messages
        if found.state == "different" and split_revision(cell.node.spec)[1] is None:
            level = "" if cell.level == "exact" else f" --level {cell.level}"
            broken.append(
                f"`relower diff {cell.node.spec}@REV {cell.node.spec}{level}` shows where"
            )
    elif found.state != "holds":
        unclear += found.messages
    said = found.messages if found.state == "holds" else ()
    return CellResult(cell, _status(broken, unclear), (*broken, *unclear, *said))


def snapshot_of_cell(cell: Cell, matrix: Matrix) -> Kept:
    """Where the snapshots of a cell are: in ``relower.snapshots`` beside ``relower.toml``."""
    folder = matrix.path.with_suffix(".snapshots")
    return Kept(folder, f"{cell.program}.{cell.node.name}", cell.level)


def guards(matrix: Matrix, lowered: Lowered) -> list[str]:
    """What would make a green gate mean nothing.

    ``matrix`` is the whole, of which ``lowered`` may hold a part: what the cells say is judged on
    the whole, and what the programs are, on those at hand.
    """
    if not matrix.cells:
        return ["there are no cells: nothing was compared"]
    known = [snapshot_of_cell(cell, matrix) for cell in matrix.cells if cell.kind == "snapshot"]
    stray = unused(matrix.path.with_suffix(".snapshots"), known)
    found = [f"{path}: no cell has this snapshot; delete it" for path in _seen(stray, matrix)]
    uncontrolled = matrix.uncontrolled()
    if uncontrolled is not None:
        found.append(uncontrolled)
    return found + _duplicates(matrix, lowered)


def _seen(paths: Sequence[Path], matrix: Matrix) -> list[str]:
    return [str(path.relative_to(matrix.folder)) for path in paths]


def _duplicates(matrix: Matrix, lowered: Lowered) -> list[str]:
    """Programs that are one, though no chain of ``identical-to`` says so."""
    group = {node: node for node in matrix.nodes()}

    def root(node: Node) -> Node:
        while group[node] != node:
            node = group[node]
        return node

    for cell in matrix.cells:
        if cell.identical and cell.other is not None and cell.numerics is None:
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
