"""``relower diff``: two programs compared, each an artifact or a case."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.text import Text

from ..gates.child import run
from ..gates.foreign import is_foreign, read_foreign
from ..gates.render import indented, show
from ..gates.revision import is_case
from ..lowering.artifact import load
from ..lowering.change import Difference
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Level, Program
from ..lowering.scratch import scratch
from ..lowering.words import plural
from .options import CASE_HELP, Subparsers, add_command, add_lowering, job
from .show import console, exit_code, folder_exists, print_json, status, written

GROUPS_SHOWN = 30


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "diff", _run, summary)
    parser.add_argument("a", help=f"an artifact, a file of StableHLO, or {CASE_HELP}")
    parser.add_argument("b", help="likewise")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="exact",
        help="which normal form, from strict to loose (docs/identity.md); default: exact",
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="FIELD",
        help="a field of the stamp that may differ, as in 'jax'; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--passes-b", metavar="A,B", help="as --passes, for B alone; --passes then is for A alone"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as a page here too")
    parser.add_argument("--all", action="store_true", help="print every group of differences")
    add_lowering(parser)


def _run(options: argparse.Namespace) -> int:
    folder_exists("--html", options.html)
    _of_cases(options)
    passes_b = options.passes if options.passes_b is None else options.passes_b
    a, notes_a = program(options, options.a, options.passes)
    b, notes_b = program(options, options.b, passes_b)
    found = diff(a, b, options.level, options.allow)
    if options.json:
        inputs = {"a": notes_a, "b": notes_b}
        print_json("diff", {**found.to_json(), "inputs": inputs})
    else:
        out = console()
        for side, compared, notes in (("a", a, notes_a), ("b", b, notes_b)):
            indented(out, Text(f"{side}: {size_line(compared)}", style="dim"), 0)
            for note in notes:
                indented(out, Text(f"{side}: note: {note}", style="yellow"), 0)
        show(
            out,
            found,
            None if options.all else GROUPS_SHOWN,
            "--all prints them, --json holds all",
        )
    trouble = written("--html", options.html, lambda: _page(found, options, (a, b)))
    return exit_code(found.verdict.value, trouble)


_FOR_CASES = ("passes", "passes_b", "contract", "disable", "frozen", "assume", "arg", "target",
              "route", "mesh")  # fmt: skip
"""Options that say how a case is traced and lowered: an artifact has been."""


def _is_lowered(what: str) -> bool:
    return not is_case(what) or os.path.exists(what)


def _of_cases(options: argparse.Namespace) -> None:
    """Raises where an option is for a case and what it is for is an artifact."""
    artifacts = [what for what in (options.a, options.b) if _is_lowered(what)]
    given = [name for name in _FOR_CASES if getattr(options, name)]
    if len(artifacts) == 1:  # the rest is for the other side
        given = ["passes_b"] if options.passes_b is not None and _is_lowered(options.b) else []
    if artifacts and given:
        raise InputError(
            f"--{given[0].replace('_', '-')} says how a case is lowered, and {artifacts[-1]} has "
            "been: wanted FILE.py:NAME in its place, or no such option"
        )


def _page(found: Difference, options: argparse.Namespace, programs: tuple[Program, Program]) -> str:
    from ..gates.html_report import diff_page

    return diff_page(found, (options.a, options.b), programs)


def program(
    options: argparse.Namespace, what: str, passes: str | None
) -> tuple[Program, list[str]]:
    """The artifact at ``what``, or the case lowered in a process of its own, with notes on it."""
    if _is_lowered(what):
        found = read_foreign(what, options.timeout) if is_foreign(what) else load(what)
        return found, []
    from ..gates.child import passes_from

    level: Level = options.level
    with scratch() as folder:
        path = str(Path(folder, "lowered.program"))
        request = job(
            options, "lower", what, output=path, levels=(level,), passes=passes_from(passes)
        )
        with status(f"lowering {what}"):
            answer = run(request, timeout=options.timeout)
        return load(path), list(answer["notes"])


def size_line(program: Program) -> str:
    """How much was lowered, and how much of that was set aside as noise."""
    calls = sum(program.kernel_calls.values())
    return (
        f"{plural(sum(program.ops.values()), 'operation')}, "
        f"{plural(len(program.kernels), 'kernel')} in {plural(calls, 'call')}, "
        f"{plural(sum(program.ledger.values()), 'detail')} set aside as noise"
    )
