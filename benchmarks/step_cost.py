"""What `relower.optimize` saves in a whole train step, as a sum over the rewritten sites.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --case FILE.py:NAME --contract rounding --json

The TPU compiler's static analysis aborts on most whole train steps, so no rung gives both programs
cycles. Each site is cut out of the step instead and compiled alone for one TPU7x core, as it is and
as its pass leaves it, by libtpu on this host (install relower[tpu]); a site in a loop counts as
often as the loop runs. The whole step is compiled too, before and after, for its memory, its sorts
and collectives, and for the share of its HBM bytes that the sites cover. Where both whole programs
do have a profile, the sites' sum is held against their change. Exit code 1 where it explains less
than 90 % of that, 2 where something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import relower
from relower.lowering.case import Case
from relower.lowering.cost.compare import compare
from relower.lowering.cost.measurement import SiteSum, sum_of_sites
from relower.lowering.cost.model import Cost
from relower.lowering.errors import InputError
from relower.lowering.load import load_case
from relower.passes.base import Measured

STEP = Path(__file__).resolve().parents[1] / "examples" / "routed_moe.py"
EXPLAINED = 0.9


def whole(case: Case, limit: float, analysis: bool) -> Cost | str:
    try:
        return relower.cost(case, limit=limit, analysis=analysis)
    except InputError as error:
        return str(error)


def rewritten(case: Case, contract: str, choose: Measured) -> Case:
    assert case.fn is not None
    return replace(case, fn=relower.optimize(case.fn, contract=contract, choose=choose))


def described(cost: Cost | str) -> dict[str, Any]:
    if isinstance(cost, str):
        return {"error": cost}
    total = cost.total()
    return {
        "rung": cost.rung,
        "cycles": total.cycles if cost.has_cycles else None,
        "coverage": total.coverage,
        "bytes": total.bytes_of,
        "temp": cost.memory.temp,
        "peak": cost.memory.peak,
        "sorts": dict(cost.sorts),
        "collectives": {c.kind: c.count for c in cost.collectives},
        "notes": list(cost.notes),
    }


def show_sites(report: relower.Report) -> None:
    for site in report.applied:
        found = site.measured
        runs = "?" if found is None or found.runs is None else f"{found.runs}"
        place = Path(site.source or "?").name
        print(f"  {site.pass_name:22} {site.shape:18} × {runs:3} {place:22} {found}")
    declined = [s for s in report.declined if s.reasons[0].code.startswith("measured")]
    for site in declined:
        print(f"  declined: {site.pass_name} at {Path(site.source or '?').name}: {site.reasons[0]}")
    for note in report.notes:
        print(f"  note: {note}")


def show(found: Mapping[str, Any]) -> None:
    sites = SiteSum(**found["sum"])
    print(sites)
    for name in ("before", "after"):
        side = found[name]
        if "error" in side:
            print(f"whole step {name}: {side['error']}")
            continue
        cycles = "no cycles" if side["cycles"] is None else f"{side['cycles']:,.0f} cycles"
        print(
            f"whole step {name}: rung {side['rung']}, {cycles} ({side['coverage']}); "
            f"temp {side['temp']:,}, peak {side['peak']:,} bytes; sorts by operands "
            f"{side['sorts']}; {side['collectives'] or 'no collectives'}"
        )
        for note in side["notes"]:
            print(f"  note: {note}")
    if "bytes" in found["before"]:
        print(
            f"the sites, each alone, move {sites.bytes:,} HBM bytes; the step before moves at "
            f"least {found['before']['bytes']:,}"
        )
    if found["explained"] is not None:
        print(f"the sites' sum explains {found['explained']:.1%} of the whole program's change")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=f"{STEP}:real", help="default: the routed example")
    parser.add_argument("--contract", default="rounding", help="as for relower.optimize")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one compilation")
    parser.add_argument("--decide", action="store_true", help='as choose="measured" does')
    parser.add_argument("--sites-only", action="store_true", help="don't compile the whole step")
    parser.add_argument(
        "--no-analysis", action="store_true", help="of the whole step: counts and memory only"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        case = load_case(options.case)
        if case.build is not None:
            raise InputError(f"{options.case}: has a mesh; wanted a case for one device")
    except InputError as error:
        parser.error(str(error))
    choose = Measured(limit=options.limit, decide=options.decide)
    report = relower.explain(
        case.fn, *case.args, contract=options.contract, choose=choose, **case.kwargs
    )
    if not options.json:
        show_sites(report)
    found: dict[str, Any] = {"sum": asdict(sum_of_sites(report.to_json()))}
    costs: list[Cost | str] = ["not compiled"] * 2
    if not options.sites_only:
        analysis = not options.no_analysis
        costs = [whole(case, options.limit, analysis)]
        costs.append(whole(rewritten(case, options.contract, choose), options.limit, analysis))
    found["before"], found["after"] = map(described, costs)
    found["explained"] = None
    a, b = costs
    if isinstance(a, Cost) and isinstance(b, Cost):
        change = compare(a, b)
        if change.worse is not None and a.rung == "profile" and change.before != change.after:
            found["explained"] = (found["sum"]["before"] - found["sum"]["after"]) / (
                change.before - change.after
            )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if found["explained"] is not None and found["explained"] < EXPLAINED:
        return 1
    return 2 if found["sum"]["summed"] < found["sum"]["sites"] else 0


if __name__ == "__main__":
    sys.exit(main())
