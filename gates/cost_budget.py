"""Budgets of what a program costs once the TPU compiler has compiled it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..lowering.compile import StagedModule
from ..lowering.cost.cache import CostCache
from ..lowering.cost.compare import compare
from ..lowering.cost.ladder import measure
from ..lowering.cost.model import Cost
from ..lowering.errors import InputError
from ..lowering.process import Limits
from ..lowering.scratch import scratch
from ..lowering.words import agreeing, plural
from .budget import COMPILED, OTHER, Bound, Budget, Miss, Number, check
from .cells import Cell, Matrix, Node
from .child import Job, run

Costs = Mapping[Node, Cost | str]
"""What programs cost, or one line on why that isn't known."""
_MEMORY = ("temp", "peak", "code")


def is_compiled(budget: Budget) -> bool:
    """Whether a budget is of the compiled program."""
    return budget.metric.partition(".")[0] in COMPILED


def nodes_to_compile(matrix: Matrix) -> tuple[Node, ...]:
    """The programs that budgets of compiled programs are about, each lowering once."""
    found: dict[tuple[object, ...], Node] = {}
    for cell in matrix.cells:
        for budget in filter(is_compiled, cell.budgets):
            for node in (cell.node, *(_referred(cell, bound) for bound in budget.bounds)):
                if node is not None:
                    found.setdefault(node.work, node)
    return tuple(found.values())


def _referred(cell: Cell, bound: Bound) -> Node | None:
    if bound.reference is None:
        return None
    return cell.other if bound.reference == OTHER else cell.references[bound.reference]


def compile_node(node: Node, matrix: Matrix, cache: CostCache | None) -> Cost | str:
    """What a program costs; one line on why that isn't known where it can't be compiled."""
    try:
        with scratch() as folder:
            job = Job(
                "stage",
                spec=node.spec,
                args=node.args,
                **asdict(node.choice),
                target=node.target,
                mesh=None if node.mesh is None else dict(node.mesh),
                output=folder,
            )
            run(job, timeout=matrix.timeout, cwd=matrix.folder)
            staged = StagedModule.load(folder)
        return measure(staged, limits=Limits(matrix.timeout), cache=cache)
    except InputError as error:
        return str(error).removeprefix(f"{node.spec}: ")


def compiled_misses(cell: Cell, costs: Costs) -> list[Miss]:
    """The bounds of the compiled program that don't hold, or can't be decided."""
    other = "" if cell.other is None else cell.other.name
    return [
        miss
        for budget in filter(is_compiled, cell.budgets)
        for bound in budget.bounds
        for miss in _misses(cell, budget.metric, bound, costs, other)
    ]


def _misses(cell: Cell, metric: str, bound: Bound, costs: Costs, other: str) -> Sequence[Miss]:
    referred = _referred(cell, bound)
    known: dict[str | None, Cost] = {}
    for key, node in ((None, cell.node), (bound.reference, referred)):
        cost = None if node is None else costs.get(node)
        if isinstance(cost, str):
            assert node is not None
            return [Miss("undecided", f"{node.name}: {metric} isn't known: {cost}")]
        if cost is not None:
            known[key] = cost
    values: dict[str | None, Number | None] = {}
    why = None
    if metric == "cycles" and None in known:
        names = ("" if referred is None else referred.name, cell.node.name)
        values, why = _cycles(known, bound, names)
    else:
        values = {key: compiled_metric(cost, metric) for key, cost in known.items()}
    if why is not None:
        return [Miss("undecided", f"{cell.node.name}: cycles {bound.text} can't be decided: {why}")]
    return check([Budget(metric, (bound,))], cell.node.name, other, lambda _, key: values.get(key))


def _cycles(
    known: Mapping[str | None, Cost], bound: Bound, names: tuple[str, str]
) -> tuple[dict[str | None, Number | None], str | None]:
    """The cycles to compare, or why they can't be: a sum says nothing of what it leaves out.

    Against another program, operations without a figure don't matter where both have them alike.
    """
    own = known[None]
    if bound.reference is None:
        total = own.total()
        if not own.has_cycles:
            return {}, f"rung {own.rung}: {own.notes[0] if own.notes else 'no cycles'}"
        if not total.complete:
            return {}, f"the sum covers {total.coverage}"
        return {None: total.cycles}, None
    if bound.reference not in known:
        return {}, None
    found = compare(known[bound.reference], own, names)
    if found.unlike is not None:
        return {}, found.unlike
    if found.worse is None:
        count = len(found.undecided)
        return (
            {},
            f"{plural(count, 'place')} changed and {agreeing(count, 'has', 'have')} no figure",
        )
    return {None: found.after, bound.reference: found.before}, None


def compiled_metric(cost: Cost, metric: str) -> Number | None:
    """The value of a metric other than cycles."""
    family, _, rest = metric.partition(".")
    if family in _MEMORY:
        value: int = getattr(cost.memory, family)
        return value
    if family == "sorts":
        return max(cost.sorts, default=0)
    return cost.counts.get(rest, 0) if family == "hlo" else None
