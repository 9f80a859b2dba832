"""``relower bisect``: which site breaks a check."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ..gates.child import run
from ..gates.render import indented
from ..lowering.words import plural
from .options import FILE_HELP, Subparsers, add_command, add_lowering, count, job
from .progress import following, line
from .show import console, print_json

CODES = {"holds": 0, "found": 1, "fails-without": 2, "flaky": 2, "unfinished": 2}


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "bisect", _run, summary)
    parser.add_argument("case", help=FILE_HELP)
    parser.add_argument(
        "--check", required=True, metavar="bits|numerics|FILE.py:FUNCTION",
        help="what fails: outputs that have other bits, a broken figure of the numerics gate, or a "
        "function that gets the optimized function and raises or returns False",
    )  # fmt: skip
    parser.add_argument(
        "--most", type=count, default=200, metavar="N", help="checks to run at most; default: 200"
    )
    add_lowering(parser, passes="default")


def _run(options: argparse.Namespace) -> int:
    from ..gates.numerics_cell import variables

    def words(checks: int, left: int) -> str:
        return f"{plural(checks, 'check')}, {plural(left, 'site')} left"

    text = f"bisecting {options.case}"
    with line(text, words) as (log, shown), following(log, shown):
        more = {"check": options.check, "most": options.most, "log": str(log)}
        request = replace(job(options, "bisect", options.case), options=more)
        found = run(request, timeout=options.timeout, variables=variables())
    if options.json:
        print_json("bisect", found)
    else:
        show(console(), found, options.case)
    return CODES[found["outcome"]]


def show(out: Console, found: dict[str, Any], case: str) -> None:
    """Prints what a bisection came to."""
    out.print(Text(case, style="bold"))
    text = {
        "found": "the check fails with",
        "holds": "the check holds with all sites on",
        "fails-without": "the check fails with all sites off: no rewrite is to blame",
        "flaky": "the check is flaky: nothing can be said",
        "unfinished": "not finished; the check fails with",
    }[found["outcome"]]
    indented(out, Text(text, style="green" if found["outcome"] == "holds" else "yellow"))
    for site in found["sites"]:
        indented(out, Text(site, style="bold red"), 4)
    if found["outcome"] != "holds" or not found["among"]:
        indented(out, Text(found["said"]), 4)
    if found["rest_holds"] is True:
        indented(out, Text("and holds with all others on: disable these"))
    elif found["rest_holds"] is False:
        indented(out, Text("and fails with all others on as well: other sites break it too"))
    checks = plural(found["checks"], "check")
    out.print(f"{checks}, {plural(found['among'], 'site')}")
