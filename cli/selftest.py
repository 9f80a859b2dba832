"""``relower selftest``: whether the comparison sees what it must see, and nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..gates.render import indented
from ..gates.selftest.report import cell, levels, written
from ..gates.selftest.run import PARTS, selftest
from ..gates.selftest.score import Kind, Score
from ..lowering.errors import InputError
from .options import CASE_HELP, Subparsers, add_command, add_jobs, count, seconds
from .show import console, print_json, progress, tabled

_STYLES = {"✓": "green", "✗": "bold red", "–": "dim"}


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "selftest", _run, summary)
    parser.add_argument(
        "case", nargs="*", help=f"programs to use in place of relower's own: {CASE_HELP}"
    )
    parser.add_argument(
        "--sites", type=count, default=1, metavar="N",
        help="make each mutant at N places of each program; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="for one process; default: none"
    )
    add_jobs(parser)
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--write", metavar="PAGE", help="write the table into this Markdown page")
    page.add_argument("--check", metavar="PAGE", help="fail if the page's table is another one")


def _run(options: argparse.Namespace) -> int:
    page = _page(options.write or options.check)
    with progress(len(options.case) or PARTS) as note:
        score = selftest(
            options.case,
            sites=options.sites,
            jobs=options.jobs,
            timeout=options.timeout,
            progress=note,
        )
    if options.json:
        print_json("selftest", to_json(score))
    else:
        report(console(), score)
    if page is not None:
        return _kept(options, *page, score) or int(not score.holds)
    return int(not score.holds)


def _page(name: str | None) -> tuple[Path, str] | None:
    """A page and its text, read before anything expensive is done."""
    if name is None:
        return None
    try:
        text = Path(name).read_text()
        written(text, Score(()))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error
    return Path(name), text


def _kept(options: argparse.Namespace, path: Path, text: str, score: Score) -> int:
    new = written(text, score)
    if options.write:
        path.write_text(new)
    elif new != text:
        print(f"{path} is stale: run relower selftest --write {path}")
        return 1
    return 0


def to_json(score: Score) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "holds": score.holds,
        "score": score.line(),
        "nowhere": list(score.nowhere),
        "rows": [row.to_json() for row in score.rows],
    }


def report(out: Console, score: Score) -> None:
    """Prints the tables, what failed, and the score last."""
    tabled(out, _table(score, "mutant", "must differ"))
    tabled(out, _table(score, "noise", "must match"))
    for row in score.failures:
        what = f"{row.program}: {row.name} {row.state}: {row.reason}"
        indented(out, Text(what, style="red"), 0)
    for row in score.rows:
        if row.state == "not applicable":
            text = f"{row.program}: {row.name} was not tried: {row.reason}"
            indented(out, Text(text, style="dim"), 0)
    for name in score.nowhere:
        indented(out, Text(f"{name}: applies to no program, so it tests nothing", style="red"), 0)
    indented(out, Text(score.line(), style="bold green" if score.holds else "bold red"), 0)


def _table(score: Score, kind: Kind, title: str) -> Table:
    programs = list(dict.fromkeys(row.program for row in score.rows))
    table = Table(title, "at", *programs, box=None, pad_edge=False)
    rows = [row for row in score.rows if row.kind == kind]
    for name in dict.fromkeys(row.name for row in rows):
        alike = [row for row in rows if row.name == name]
        marks = [cell(alike, program) for program in programs]
        table.add_row(name, levels(alike), *(Text(m, style=_STYLES[m]) for m in marks))
    return table
