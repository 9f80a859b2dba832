"""``relower explain --suggest``: a patch that is right for every case of the file, and shown to be.

A size or a range of one case is not that of the next. So each other case of the file is looked at
under the same passes: an expression that it runs too is rewritten only where it asks for the same,
and the text that comes of it is lowered for each case that runs some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ..lowering.errors import InputError
from .child import Job, run
from .patch import Patch, patch, shown

Note = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Suggested:
    """A patch and what is known of it."""

    patch: Patch
    checks: Mapping[str, str | None]
    """By case that runs what is changed: None where it lowers to the same program; else why not."""
    unchecked: Mapping[str, str]
    """Cases of the file that the patch wasn't held against, and why."""

    def to_json(self) -> dict[str, Any]:
        """What it adds to a report."""
        return {
            "patch": self.patch.text,
            "patch_given": list(self.patch.given),
            "not_patched": list(self.patch.left),
            "patch_differs": next((f"{c}: {w}" for c, w in self.checks.items() if w), None),
            "patch_cases": [{"case": c, "differs": why} for c, why in self.checks.items()],
            "patch_unchecked": [{"case": c, "why": why} for c, why in self.unchecked.items()],
        }


def suggested(
    request: Job,
    report: Mapping[str, Any],
    note: Note,
    *,
    cases: Sequence[str] | None = None,
    timeout: float | None = None,
) -> Suggested:
    """The patch for a case's report, held against the other cases of its file.

    Args:
      request: how the report was made, suggestions included.
      report: `relower.Report.to_json`'s, with ``cases``: the others of the file.
      note: says what is being done, around it.
      cases: names of those of the file to look at, as ``NAME`` or ``NAME[KEY]``; None for all.
      timeout: seconds for each trace and each lowering.

    Raises:
      InputError: a case that was asked for is not in the file.
    """
    others, unchecked = _chosen(request.spec, report["cases"], cases)
    reports: dict[str, Any] = {}
    jobs = {request.spec: replace(request, options={})}
    if patch(report).edited:
        # Arguments, a mesh and single sites are of the case that was asked about.
        alike = replace(request, args=(), mesh=None, disable=_passes(request.disable))
        for number, spec in enumerate(others, 1):
            with note(f"tracing {spec} ({number} of {len(others)} other cases of the file)"):
                try:
                    reports[_name(spec)] = run(replace(alike, spec=spec), timeout=timeout)
                except InputError as error:
                    unchecked[_name(spec)] = str(error)
            jobs[spec] = replace(alike, spec=spec, options={})
    made = patch(report, others=reports)
    checks: dict[str, str | None] = {}
    for spec, job in jobs.items():
        if made.edited and (spec == request.spec or _name(spec) in made.reached):
            with note(f"lowering {spec} as it is and as it would be"):
                how = replace(job, passes=job.passes or "default")
                checks[_name(spec)] = shown(made, how, timeout=timeout)
    return Suggested(made, checks, unchecked)


def _chosen(
    spec: str, found: Sequence[str], cases: Sequence[str] | None
) -> tuple[list[str], dict[str, str]]:
    """The other cases to look at, and those not to, with the reason."""
    if cases is None:
        return list(found), {}
    known = [_name(other) for other in found]
    for name in cases:
        if name not in (*known, _name(spec)):
            raise InputError(
                f"--cases: no case {name!r} beside {_name(spec)}; wanted of "
                f"{', '.join(known) or 'none'}, by name and with commas between, or 'none'"
            )
    left = {name: "--cases leaves it out" for name in known if name not in cases}
    return [other for other in found if _name(other) in cases], left


def _name(spec: str) -> str:
    return spec.rpartition(":")[2]


def _passes(disabled: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in disabled if "@" not in name)
