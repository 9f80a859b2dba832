"""The rung below the whole program's: what a piece of it costs, compiled alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..compile import StagedModule
from ..process import Limits
from .cache import CostCache
from .ladder import measure
from .model import Cost

_SHOWN = 4
"""Kinds of operations that a reason names."""


def measure_fragment(
    staged: StagedModule, *, limits: Limits | None = None, cache: CostCache | None = None
) -> Cost:
    """The cost of a fragment, from `relower.lowering.fragment.stage_fragment`.

    Its cycles stand on the rung ``fragment``: what surrounds it in its program may be fused with
    it there, so they aren't compared with those of a whole program.

    Raises:
        CompileFailed: as `ladder.measure`.
    """
    found = measure(staged, limits=limits, cache=cache)
    if found.rung != "profile":
        return found
    ops = tuple(replace(op, rung="fragment") if op.rung == "profile" else op for op in found.ops)
    return replace(found, rung="fragment", ops=ops)


def comparable(costs: tuple[Cost, ...]) -> str | None:
    """Why the sums of some fragments that do the same can't be compared; None where they can.

    Operations without a figure don't matter where all of the fragments have them alike.
    """
    rungs = {cost.rung for cost in costs}
    if len(rungs) > 1:
        return f"they stand on different rungs: {', '.join(sorted(rungs))}"
    for cost in costs:
        if not cost.has_cycles:
            return f"there are no cycles on the rung {cost.rung!r}"
    unknown = [_without_figure(cost) for cost in costs]
    for counter in unknown[1:]:
        if counter != unknown[0]:
            kinds = sorted({kind for kind, _ in (counter - unknown[0]) + (unknown[0] - counter)})
            named = ", ".join([*kinds[:_SHOWN], *(["…"] if kinds[_SHOWN:] else [])])
            if costs[0].rung == "salvaged":
                return f"the analysis was cut short, without a figure for: {named}"
            return f"no figure on any rung for: {named}"
    return None


def _without_figure(cost: Cost) -> Counter[tuple[str, str]]:
    """The operations that do work and have no figure."""
    return Counter(
        (op.kind, op.shape)
        for op in cost.ops
        if (op.sparse or not op.overlapped) and op.times != 0 and op.total is None
    )
