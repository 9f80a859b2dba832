"""The whole test: every program, every mutant, every variation; each part in a fresh process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...lowering.errors import InputError
from ...lowering.scratch import scratch
from ..child import ChildFailed, Job, run
from ..parallel import in_order
from .elsewhere import CIRCUMSTANCES, lowerings
from .places import PROGRAMS, SOURCE
from .score import Row, Score

Task = Callable[[], list[Row]]
PARTS = 2 * len(PROGRAMS) + 1 + 1 + len(CIRCUMSTANCES)
"""Processes of a run over the own programs, for a progress bar."""


def selftest(
    specs: Sequence[str] = (),
    *,
    sites: int = 1,
    jobs: int = 1,
    timeout: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Score:
    """Judges every mutant and variation.

    Args:
        specs: cases to use in place of the own programs, as ``FILE.py:NAME``. Only what is done to
            a lowered module applies to them.
        sites: at how many places of a program each mutant of a module is made.
        jobs: processes at once.
        timeout: seconds for one process; None waits for ever.
        progress: called with what was just done, once for each of the processes.

    Raises:
        InputError: ``sites`` isn't positive, or a case can't be lowered.
    """
    if sites < 1:
        raise InputError(f"sites: found {sites}, wanted at least 1")
    note = progress or (lambda text: None)
    if specs:
        names, tasks = _of_cases(specs, sites, timeout)
        return _score(in_order(tasks, jobs, lambda i: note(names[i])), specs)
    with scratch() as folder:
        first, *others = lowerings(Path(folder), timeout)
        names, tasks = _of_modules(sites, timeout)
        names += [f"{c.name}" for c in CIRCUMSTANCES]
        first()
        note("lowered as they are")
        found = in_order([*tasks, *others], jobs, lambda i: note(names[i]))
        return _score(found, PROGRAMS)


def _score(found: list[list[Row]], programs: Sequence[str]) -> Score:
    rows = [row for rows in found for row in rows]
    order = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in rows))}
    return Score(tuple(sorted(rows, key=lambda r: (order[r.name], programs.index(r.program)))))


def _of_cases(
    specs: Sequence[str], sites: int, timeout: float | None
) -> tuple[list[str], list[Task]]:
    jobs = [
        Job("selftest", spec=spec, options={"part": "module", "sites": sites, "program": spec})
        for spec in specs
    ]
    return list(specs), [partial(_ask, job, timeout) for job in jobs]


def _of_modules(sites: int, timeout: float | None) -> tuple[list[str], list[Task]]:
    names: list[str] = []
    tasks: list[Task] = []
    for program in reversed(PROGRAMS):  # the largest first, so that all cores end together
        spec = f"{SOURCE}:{program}"
        module = {"part": "module", "sites": sites, "program": program}
        source = {"part": "source", "programs": [program]}
        for options in (module, source):
            job = Job("selftest", spec=spec, options=options)
            names.append(f"{program}, {options['part']}")
            tasks.append(partial(_ask, job, timeout))
    hoisted = Job("selftest", spec="", options={"part": "hoisted", "programs": list(PROGRAMS)})
    names.append("hoisted constants")
    variables = {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    tasks.append(lambda: _only_mutants(_ask(hoisted, timeout, variables)))
    return names, tasks


def _ask(job: Job, timeout: float | None, variables: dict[str, str] | None = None) -> list[Row]:
    try:
        found = run(job, timeout=timeout, variables=variables)
    except ChildFailed as error:
        raise InputError(f"selftest: {error}") from error
    return [Row.from_json(value) for value in found]


def _only_mutants(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "mutant"]
