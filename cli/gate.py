"""``relower gate``: the matrix of what must be identical and what must differ."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.text import Text

from ..gates.cache import Cache, default_folder
from ..gates.config import load_matrix
from ..gates.html_report import gate_page
from ..gates.matrix import part_of, run_matrix, steps
from ..gates.render import indented, show_groups
from ..gates.reports import SUMMARY_BYTES, junit, step_summary
from ..gates.results import CellResult, GateResult
from ..gates.shard import parse_shard
from ..gates.snapshot_files import mode
from ..lowering.words import plural
from .options import Subparsers, add_command, add_jobs
from .show import console, exit_code, folder_exists, print_json, progress, written

_MARK = {"holds": ("✓", "green"), "broken": ("✗", "red"), "undecided": ("?", "yellow")}
GROUPS_SHOWN = 5


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "gate", _run, summary)
    parser.add_argument(
        "file",
        nargs="?",
        default="relower.toml",
        help="which cells there are (docs/gate.md); default: relower.toml",
    )
    add_jobs(parser)
    parser.add_argument(
        "--shard", metavar="I/N", help="run the I-th of N parts of the cells, from 1/N to N/N"
    )
    parser.add_argument("--junit", metavar="FILE", help="write a report in JUnit's XML here too")
    parser.add_argument(
        "--accept", action="store_true",
        help="write the snapshots of this run as those to compare with from now on; not in CI",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true", help="lower every program, also those lowered before"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as a page here too")


def _run(options: argparse.Namespace) -> int:
    shard = None if options.shard is None else parse_shard(options.shard)
    folder_exists("--junit", options.junit)
    folder_exists("--html", options.html)
    snapshots = mode(options.accept, "--accept")
    matrix = load_matrix(options.file)
    # What is accepted is what was lowered just now.
    cache = None if options.no_cache else Cache(default_folder(), fresh=options.accept)
    with progress(steps(part_of(matrix, shard))) as note:
        result = run_matrix(
            matrix, note, jobs=options.jobs, shard=shard, snapshots=snapshots, cache=cache
        )
    if options.json:
        print_json("gate", result.to_json())
    else:
        show(console(), result)
    trouble = [
        *written("--junit", options.junit, lambda: junit(result)),
        *written("--html", options.html, lambda: gate_page(result)),
        *_summarised(result),
    ]
    return exit_code(result.exit_code, trouble)


def _summarised(result: GateResult) -> list[str]:
    """Adds to the summary of a step on GitHub, where this runs in one; returns what went wrong."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return []
    try:
        with open(path, "ab") as out:
            text = step_summary(result, SUMMARY_BYTES - out.tell())
            out.write(text.encode())
    except OSError as error:
        return [f"$GITHUB_STEP_SUMMARY {path}: can't be written: {error.strerror or error}"]
    return [] if text else [f"$GITHUB_STEP_SUMMARY {path}: is full, nothing was added"]


def show(out: Console, result: GateResult) -> None:
    """Prints every cell, and the closing line."""
    for cell in result.cells:
        _cell(out, cell)
    for guard in result.guards:
        indented(out, Text.assemble(("✗ ", "red"), guard), 0)
    for note in result.notes:
        indented(out, Text(note, style="dim"), 0)
    code = result.exit_code
    style = ("green", "red", "yellow")[code]
    out.print(Text(result.closing, style=f"bold {style}"))


def _cell(out: Console, result: CellResult) -> None:
    mark, style = _MARK[result.status]
    indented(out, Text.assemble((f"{mark} ", style), result.cell.name), 0)
    for message in result.messages:
        indented(out, Text(message), 4)
    unwanted = result.status != "holds" and result.difference is not None
    if unwanted and result.difference is not None:
        for side, colour in zip(result.sides, ("red", "green"), strict=True):
            indented(out, Text(side, style=colour), 4)
        show_groups(out, result.difference.groups[:GROUPS_SHOWN], 4)
        rest = len(result.difference.groups) - GROUPS_SHOWN
        if rest > 0:
            what = plural(rest, "more group")
            indented(out, Text(f"… and {what} of differences; --json holds all"), 4)
