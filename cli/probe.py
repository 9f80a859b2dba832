"""``relower probe``: whether a case lowers to the same program however it is lowered."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..gates.probe import VARIATIONS, Outcome, ProbeResult, probe, variations
from ..gates.render import indented, show
from ..lowering.change import Verdict
from ..lowering.program import LEVELS
from ..lowering.words import plural
from .options import FILE_HELP, Subparsers, add_command, add_jobs, add_lowering, job
from .show import console, print_json, progress

GROUPS_SHOWN = 5
_MARK = {"stable": ("✓", "green"), "unstable": ("✗", "red"), "undecided": ("?", "yellow")}


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "probe", _run, summary)
    parser.add_argument("case", help=FILE_HELP)
    parser.add_argument(
        "--level",
        action="append",
        choices=LEVELS,
        help="compare at this one only; may be given again",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME",
        help=f"leave one variation out: {', '.join(VARIATIONS)}; may be given again",
    )  # fmt: skip
    add_jobs(parser)
    add_lowering(parser)


def _run(options: argparse.Namespace) -> int:
    levels = tuple(level for level in LEVELS if options.level is None or level in options.level)
    request = job(options, "lower", options.case, levels=levels)
    with progress(1 + len(variations(options.without))) as note:
        found = probe(
            request,
            without=options.without,
            jobs=options.jobs,
            timeout=options.timeout,
            progress=note,
        )
    if options.json:
        print_json("probe", found.to_json())
    else:
        report(console(), found)
    return found.exit_code


def report(out: Console, found: ProbeResult) -> None:
    """Prints every lowering, what isn't stable, and the verdict last."""
    out.print(Text(found.spec, style="bold"))
    out.print(Text("sha256", style="bold"))
    for level, digest in found.digests.items():
        out.print(f"  {level:9} {digest}", soft_wrap=True)
    for outcome in found.outcomes:
        _outcome(out, outcome)
    for reason in found.reasons:
        indented(out, Text.assemble(("? ", "yellow"), reason), 0)
    indented(out, closing(found), 0)


def _outcome(out: Console, outcome: Outcome) -> None:
    mark, style = _MARK[outcome.state]
    indented(out, Text.assemble((f"{mark} ", style), outcome.what), 0)
    if outcome.failure:
        indented(out, Text(outcome.failure), 4)
    differing = [
        level for level, d in outcome.differences.items() if d.verdict is Verdict.DIFFERENT
    ]
    if len(differing) > 1:
        indented(out, Text(f"differs at {', '.join(differing)}"), 4)
    if outcome.shown is not None:
        show(out, outcome.shown, GROUPS_SHOWN, "--json holds all", 4)


def closing(found: ProbeResult) -> Text:
    """The verdict in one line."""
    style = _MARK[found.state][1]
    stable = [level for level in found.digests if found.stable(level)]
    count = plural(1 + len(found.outcomes), "lowering")
    text = Text(found.state.upper(), style=f"bold {style}")
    if len(stable) == len(found.digests):
        return text.append(f": {count}, one program at {_listed(stable)}", style="not bold")
    moving = [level for level in found.digests if level not in stable]
    text.append(f": {count}; not shown to be one program at {_listed(moving)}", style="not bold")
    return text.append(f"; one at {_listed(stable)}", style="not bold") if stable else text


def _listed(levels: Sequence[str]) -> str:
    return "each of " + ", ".join(levels) if len(levels) > 1 else levels[0]
