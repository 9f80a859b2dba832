"""``relower diff``: two programs compared, each an artifact or a case."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..gates.child import run
from ..lowering.artifact import load
from ..lowering.change import Change, Difference, Group, Verdict
from ..lowering.diff import diff
from ..lowering.program import LEVELS, Level, Program
from .options import CASE_HELP, Subparsers, add_command, add_lowering, job
from .show import console, indented, plural, print_json, source, status

GROUPS_SHOWN = 30
_CASE = re.compile(r".+\.py:[^:/\\]+")
_STYLE = {Verdict.IDENTICAL: "green", Verdict.DIFFERENT: "red", Verdict.UNKNOWN: "yellow"}


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "diff", _run, summary)
    what = f"an artifact, or {CASE_HELP}"
    parser.add_argument("a", help=what)
    parser.add_argument("b", help=what)
    parser.add_argument(
        "--level", choices=LEVELS, default="exact", help="which normal form; default: exact"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="FIELD",
        help="a field of the stamp that may differ, as in 'jax'; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--passes-b", metavar="A,B", help="as --passes, for B alone; then --passes is for A alone"
    )
    parser.add_argument("--all", action="store_true", help="print every group of differences")
    add_lowering(parser)


def _run(options: argparse.Namespace) -> int:
    passes_b = options.passes if options.passes_b is None else options.passes_b
    a = program(options, options.a, options.passes)
    b = program(options, options.b, passes_b)
    found = diff(a, b, options.level, options.allow)
    if options.json:
        print_json(found.to_json())
    else:
        out = console()
        for side, compared in (("a", a), ("b", b)):
            indented(out, Text(f"{side}: {size_line(compared)}", style="dim"), 0)
        show(out, found, None if options.all else GROUPS_SHOWN)
    return found.verdict.value


def program(options: argparse.Namespace, what: str, passes: str | None) -> Program:
    """The artifact at ``what``, or the case lowered in a process of its own."""
    if not _CASE.fullmatch(what) or os.path.exists(what):
        return load(what)
    from ..gates.child import passes_from

    level: Level = options.level
    with tempfile.TemporaryDirectory(prefix="relower-") as folder:
        path = str(Path(folder, "lowered.program"))
        request = job(
            options, "lower", what, output=path, levels=(level,), passes=passes_from(passes)
        )
        with status(f"lowering {what}"):
            run(request, timeout=options.timeout)
        return load(path)


def show(out: Console, found: Difference, limit: int | None = GROUPS_SHOWN) -> None:
    """Prints a difference: what and where first, the verdict last."""
    groups = found.groups[:limit]
    show_groups(out, groups)
    if len(groups) < len(found.groups):
        rest = plural(len(found.groups) - len(groups), "more group")
        out.print(f"… and {rest} of differences; --all prints them, --json holds all")
    for note in found.notes:
        indented(out, Text(f"note: {note}", style="yellow"), 0)
    for reason in found.reasons:
        indented(out, Text(reason), 0)
    if found.verdict is Verdict.DIFFERENT:
        for side, unknown in found.unknowns:
            text = f"unknown in {side}: {unknown.construct}: {unknown.reason}"
            indented(out, Text(text, style="yellow"), 0)
    if found.allowed:
        out.print(f"allowed to differ: {', '.join(found.allowed)}")
    out.print(verdict_line(found))


def verdict_line(found: Difference) -> Text:
    """The verdict in one line."""
    name = found.verdict.name
    text = Text.assemble((name, f"bold {_STYLE[found.verdict]}"), f" at level {found.level}")
    if found.verdict is Verdict.IDENTICAL:
        text.append(f"  sha256 {found.digests[0][:16]}…")
    elif found.changes:
        kernels = found.touched().kernels
        text.append(f": {plural(len(found.changes), 'difference')}")
        if kernels:
            text.append(f", in kernels {', '.join(sorted(kernels))} among others"
                        if any(c.section_kind != "kernel" for c in found.changes)
                        else f", all in kernels {', '.join(sorted(kernels))}")  # fmt: skip
    return text


def size_line(program: Program) -> str:
    """How much was lowered, and how much of that was set aside as noise."""
    calls = sum(program.kernel_calls.values())
    return (
        f"{plural(sum(program.ops.values()), 'operation')}, "
        f"{plural(len(program.kernels), 'kernel')} called {plural(calls, 'time')}, "
        f"{plural(sum(program.ledger.values()), 'detail')} set aside as noise"
    )


def show_groups(out: Console, groups: Sequence[Group], by: int = 0) -> None:
    """Prints groups under the names of their functions and kernels."""
    section = ""
    for group in groups:
        title = f"{group.first.section_kind} {group.first.section}"
        if title != section:
            section = title
            indented(out, Text(title, style="bold"), by)
        show_group(out, group, by + 2)


def show_group(out: Console, group: Group, by: int = 2) -> None:
    """Prints one group: what differs, both sides, the source, and how many are alike."""
    change = group.first
    name, path = change.op, change.path
    if change.op in ("argument", "result") and path:
        name, path = path[-1], path[:-1]  # "argument 3" says it all
    head = Text()
    head.append("".join(f"{outer} › " for outer in path), style="dim")
    head.append(name, style="bold")
    head.append(f"  {_what(change)}")
    indented(out, head, by)
    for sign, side, style in (("-", change.a, "red"), ("+", change.b, "green")):
        if side:
            indented(out, Text(f"{sign} {side}", style=style), by + 2)
    for place in _places(change):
        indented(out, Text(place, style="cyan"), by + 2)
    if len(group.changes) > 1:
        indented(out, Text(_alike(group), style="dim"), by + 2)


def _what(change: Change) -> str:
    if change.kind in ("added", "removed"):
        side = "b" if change.kind == "added" else "a"
        return f"only in {side}" + (f", {change.detail}" if change.detail else "")
    if change.kind == "operation":
        return "is another operation"
    if change.kind == "moved":
        return "stands at another place among its neighbours"
    return (
        f"{change.detail} differs" if not change.detail.startswith("operands ") else change.detail
    )


def _places(change: Change) -> list[str]:
    found = []
    for where in (change.where_a, change.where_b):
        text = source(where)
        scope = where.scope if where is not None and where.scope else ""
        line = f"{text}  {scope}".strip()
        if line and line not in found:
            found.append(line)
    return found


def _alike(group: Group) -> str:
    sections = len(group.sections)
    count = len(group.changes)
    if sections == 1:
        return f"{count} times alike"
    kind = group.first.section_kind
    times = f"{count} times alike " if count != sections else ""
    return f"{times}in {sections} {kind}s alike"
