"""What a cell expects of its program besides what it is compared with: counts and budgets."""

from __future__ import annotations

from collections.abc import Mapping

from ..lowering.program import Program
from ..lowering.words import plural
from .budget import OTHER, Miss, Number, check, measured
from .cells import Cell, Node
from .cost_budget import Costs, compiled_misses, is_compiled


def expectations(
    cell: Cell, programs: Mapping[Node, Program], costs: Costs | None = None
) -> list[Miss]:
    """The counts and budgets of ``cell`` that don't hold, or can't be decided.

    Args:
        cell: what is expected.
        programs: those of `Cell.nodes`.
        costs: what budgets of compiled programs need.
    """
    name = cell.node.name
    found = []
    for metric, wanted in _exact(cell).items():
        count = measured(programs[cell.node], metric)
        if count is None:
            found.append(Miss("undecided", f"{name}: {_apart(metric)}; wanted {wanted}"))
        elif count != wanted:
            found.append(Miss("broken", f"{name} {_said(metric, count)}; wanted {wanted}"))

    def measure(metric: str, reference: str | None) -> Number | None:
        if reference is None:
            return measured(programs[cell.node], metric)
        node = cell.other if reference == OTHER else cell.references[reference]
        return None if node is None else measured(programs[node], metric)

    other = "" if cell.other is None else cell.other.name
    lowered = [budget for budget in cell.budgets if not is_compiled(budget)]
    return found + check(lowered, name, other, measure) + compiled_misses(cell, costs or {})


def _exact(cell: Cell) -> dict[str, int]:
    kernels = cell.kernels
    if kernels is None:
        kernels = {}
    elif isinstance(kernels, int):
        kernels = {"": kernels}
    counts = {f"kernels.{name}".rstrip("."): count for name, count in kernels.items()}
    return {**counts, **{f"ops.{name}": count for name, count in cell.ops.items()}}


def _apart(metric: str) -> str:
    kernel = metric.partition(".")[2]
    return f"the calls of kernel {kernel!r} can't be counted, for others have the same body"


def _said(metric: str, count: int) -> str:
    family, _, rest = metric.partition(".")
    if family == "ops":
        return f"has {count} {rest}"
    if rest:
        return f"calls kernel {rest!r} {plural(count, 'time')}"
    return f"calls {plural(count, 'kernel')}"
