"""Costs and comparisons as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .attribute import Attribution
from .compare import Comparison
from .measurement import SiteSum
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


def comparison_json(
    found: Comparison, attribution: Attribution | None = None, sites: SiteSum | None = None
) -> dict[str, Any]:
    """Both costs, what could be compared, and the change by rewrite where B is A rewritten."""
    return {
        "a": cost_json(found.a),
        "b": cost_json(found.b),
        "unlike": found.unlike,
        "before": found.before if found.unlike is None else None,
        "after": found.after if found.unlike is None else None,
        "worse": found.worse,
        "groups": [{**asdict(g), "saving": g.saving} for g in found.groups],
        "rewrites": None if attribution is None else attribution_json(attribution),
        "sites": None if sites is None else {**asdict(sites), "saving": sites.saving},
    }


def attribution_json(found: Attribution) -> dict[str, Any]:
    """Cycles saved by rewrite, and elsewhere."""
    return {
        "saving": found.saving,
        "elsewhere": found.elsewhere,
        "share": found.share,
        "sites": [
            {
                "passes": sorted({site.name for site in s.sites}),
                "count": len(s.sites),
                "sources": sorted({site.source for site in s.sites if site.source is not None}),
                "places": list(s.places),
                "before": s.before,
                "saving": s.saving,
                "undecided": s.undecided,
            }
            for s in found.savings
        ],
    }
