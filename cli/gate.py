"""``relower gate``: the matrix of what must be identical and what must differ."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from ..gates.config import load_matrix
from ..gates.matrix import CellResult, GateResult, run_matrix, steps
from ..gates.render import indented, plural, show_groups
from .options import Subparsers, add_command
from .show import console, print_json, progress

_MARK = {"holds": ("✓", "green"), "broken": ("✗", "red"), "undecided": ("?", "yellow")}
GROUPS_SHOWN = 5


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "gate", _run, summary)
    parser.add_argument("file", nargs="?", default="relower.toml", help="default: relower.toml")


def _run(options: argparse.Namespace) -> int:
    matrix = load_matrix(options.file)
    with progress(steps(matrix)) as note:
        result = run_matrix(matrix, note)
    if options.json:
        print_json(result.to_json())
    else:
        show(console(), result)
    return result.exit_code


def show(out: Console, result: GateResult) -> None:
    """Prints every cell, and the closing line."""
    for cell in result.cells:
        _cell(out, cell)
    for guard in result.guards:
        indented(out, Text.assemble(("✗ ", "red"), guard), 0)
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
        show_groups(out, result.difference.groups[:GROUPS_SHOWN], 4)
        rest = len(result.difference.groups) - GROUPS_SHOWN
        if rest > 0:
            what = plural(rest, "more group")
            indented(out, Text(f"… and {what} of differences; --json holds all"), 4)
