"""Costs and comparisons as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .compare import Comparison
from .model import CYCLE_RUNGS, RUNGS, Cost, OpCost, Total


def cost_json(cost: Cost) -> dict[str, Any]:
    """Everything that a `Cost` holds; cycles are of one device, in one run."""
    return {
        "name": cost.name,
        "target": cost.target,
        "versions": dict(cost.versions),
        "rung": {"name": cost.rung, "is": RUNGS[cost.rung]},
        "clock_hz": cost.chip.clock,
        "total": total_json(cost, cost.total()) if cost.rung in CYCLE_RUNGS else None,
        "floor_cycles": cost.floor,
        "memory": asdict(cost.memory),
        "counts": dict(cost.counts),
        "sorts_by_operands": {str(n): count for n, count in cost.sorts.items()},
        "collectives": [asdict(c) for c in cost.collectives],
        "bounds": dict(cost.bounds()),
        "notes": list(cost.notes),
        "ops": [op_json(op) for op in cost.ops],
    }


def total_json(cost: Cost, total: Total) -> dict[str, Any]:
    """A sum, its rung and what it covers."""
    return {
        **asdict(total),
        "milliseconds": cost.milliseconds(total.cycles),
        "complete": total.complete,
    }


def op_json(op: OpCost) -> dict[str, Any]:
    """One instruction."""
    return {**asdict(op), "figure": op.figure, "bound": op.bound, "total": op.total}


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Both costs, and what could be compared."""
    return {
        "a": cost_json(found.a),
        "b": cost_json(found.b),
        "unlike": found.unlike,
        "before": found.before if found.unlike is None else None,
        "after": found.after if found.unlike is None else None,
        "worse": found.worse,
        "groups": [{**asdict(g), "saving": g.saving} for g in found.groups],
    }
