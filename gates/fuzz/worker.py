"""One process of the fuzzer: checks seeds one after another and prints what became of each.

Started by `relower.gates.fuzz.run`, as ``python -m relower.gates.fuzz.worker REQUEST``, the request
a JSON object; the answer is a JSON object a line.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
import warnings
from collections import Counter
from typing import Any

import jax

from .check import Violation, check, clear, given_to, passes_of
from .lowers import lowers
from .plan import Plan, draw
from .program import function, mesh_of, transformed, values
from .shrink import fewest_passes, shrunk

CLEAR_EVERY = 200
"""Programs after which jax's caches are emptied: what jax.numpy's functions are traced to is used
again and again."""
COLLECT_EVERY = 50
MOST_BYTES = 3 * 2**29
"""Resident memory at which a process ends early; another one goes on."""
SHRINK_SECONDS = 60.0


def main() -> None:
    """Check the seeds of the request on the command line."""
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    gc.disable()  # collecting what jax keeps again and again takes a fifth of the time
    names, owed = tuple(request["passes"]), False
    for number, seed in enumerate(range(request["first"], request["first"] + request["count"])):
        if time.time() > request["until"]:
            break
        _say({"begin": seed})
        every = request["lower_every"]
        owed |= every > 0 and (seed - request["origin"]) % every == 0
        found = one(seed, names, lower=owed)
        owed &= not found.get("lowered", False)
        _say(found)
        if number % CLEAR_EVERY == CLEAR_EVERY - 1:
            clear()
        if number % COLLECT_EVERY == COLLECT_EVERY - 1:
            gc.collect()
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES:
                break


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def one(seed: int, names: tuple[str, ...] = (), lower: bool = False) -> dict[str, Any]:
    """What became of one seed, as plain data."""
    started = time.process_time()
    plan = draw(seed)
    outcome = check(plan, names)
    found: dict[str, Any] = {"seed": seed, "state": outcome.state, "detail": outcome.detail}
    report, violation = outcome.report, outcome.violation
    if report is not None:
        found["equations"] = report.equations
        found["applied"] = dict(Counter(s.pass_name for s in report.applied))
        reasons = Counter((s.pass_name, r.code) for s in report.declined for r in s.reasons)
        found["declined"] = [[*key, n] for key, n in reasons.items()]
    if lower and outcome.state == "held":
        violation = lowers(plan, names)
        found["lowered"] = True
        if violation is not None:
            found["state"] = "violated"
    found["seconds"] = time.process_time() - started
    if violation is not None:
        found["violation"] = _violated(plan, names, violation.property, violation.detail)
    return found


def _violated(plan: Plan, names: tuple[str, ...], name: str, detail: str) -> dict[str, Any]:
    """The violation on the smallest program and with the fewest passes found."""

    def fails(candidate: Plan, among: tuple[str, ...] = names) -> Any:
        try:
            found = (
                lowers(candidate, among)
                if name.startswith("lowers")
                else check(candidate, among).violation
            )
        except Exception:  # while shrinking, only the same violation counts
            return None
        if found is None or found.property != name:
            return None
        # Of a fault in the machinery, the first words tell it from others.
        return found if name == "contract" or found.detail[:30] == detail[:30] else None

    small, tries = shrunk(plan, lambda p: fails(p) is not None, SHRINK_SECONDS)
    among = names or tuple(p.name for p in passes_of(small))
    few = fewest_passes(among, lambda some: fails(small, some) is not None)
    found = fails(small, few)
    if found is None:  # passes named run where they were left out by the plan
        few, found = names, fails(small)
    return {
        "property": name,
        "detail": found.detail if found is not None else detail,
        "first_detail": detail,
        "plan": repr(small),
        "text": str(small),
        "passes": list(few),
        "tries": tries,
        "jaxpr": _jaxpr(small),
    }


def _first_violation(plan: Plan, names: tuple[str, ...]) -> Violation | None:
    return check(plan, names).violation


def _jaxpr(plan: Plan) -> str:
    with mesh_of(plan):
        fn = transformed(plan, function(plan), outside=False)
        return str(jax.make_jaxpr(fn)(*given_to(plan, values(plan, "exact").args)))


if __name__ == "__main__":
    main()
