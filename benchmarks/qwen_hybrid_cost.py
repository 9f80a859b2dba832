"""What the passes save in the hybrid decoder's forward and backward, by pass.

    python benchmarks/qwen_hybrid_cost.py
    python benchmarks/qwen_hybrid_cost.py --limit 120 --json
    python benchmarks/qwen_hybrid_cost.py --passes top_k_by_argmax,argsort_packed_key

Each site that a pass rewrites at the real size is cut out and compiled alone for one TPU7x core, as
it is and as the pass leaves it, by libtpu on this host (install relower[tpu]); a site in a loop
counts as often as the loop runs. What the compiler gives no figure for isn't in the sums, and is
counted with the reason. Exit code 1 where the sum is less than 1.25 times smaller after than
before, 2 where nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from relower.gates.child import Job, passes_from, run
from relower.lowering.cost.measurement import SiteSum, sum_of_sites

CASE = Path(__file__).resolve().parents[1] / "examples" / "qwen_hybrid" / "cases.py"
WANTED = 1.25


def measured(case: str, passes: str, limit: float) -> dict[str, Any]:
    """The report of some passes, or of all that the rounding contract admits; sites measured."""
    how = {"decide": False, "limit": limit, "memory_limit": 16 * 2**30, "cache": True}
    chosen = passes_from(passes)
    frozen = "router" if chosen == "default" or "frozen_gradient" in (chosen or ()) else None
    job = Job("explain", spec=case, passes=chosen, contract="rounding", frozen=frozen,
              options={"measure": how})  # fmt: skip
    report: dict[str, Any] = run(job, timeout=24 * 3600.0)
    return report


def by_pass(report: dict[str, Any]) -> dict[str, SiteSum]:
    """The sites of each pass, those that save most first."""
    names = {s["pass"] for s in report["sites"] if s["status"] == "applied"}
    sums = {
        name: sum_of_sites({"sites": [s for s in report["sites"] if s["pass"] == name]})
        for name in names
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1].saving))


def show(name: str, found: SiteSum) -> None:
    """A line for a pass."""
    ratio = f"{found.before / found.after:6.2f}×" if found.after else "      -"
    print(
        f"{name:26} {found.summed:3} of {found.sites:3} {found.before:16,.0f} {found.after:16,.0f}"
        f" {ratio}"
    )
    for why, count in found.missing.items():
        print(f"    {count} without a figure: {why}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=f"{CASE}:real", help="default: the hybrid decoder")
    parser.add_argument("--passes", default="default", help="names; default: all of the contract")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one compilation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measured(options.case, options.passes, options.limit)
    whole, parts = sum_of_sites(report), by_pass(report)
    if options.json:
        every = {"all": whole, **parts}
        print(json.dumps({name: vars(found) for name, found in every.items()}, indent=1))
    else:
        print(f"{'pass':26}  with figure           before            after")
        for name, found in parts.items():
            show(name, found)
        show("all", whole)
    if not whole.summed or not whole.after:
        return 2
    return 0 if whole.before / whole.after >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
