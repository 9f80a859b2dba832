"""``relower lower``: the normal form of a program, as an artifact."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..gates.child import run
from ..gates.foreign import is_foreign, read_foreign
from ..gates.render import indented, relative, source
from ..lowering.artifact import load, save
from ..lowering.program import Program
from ..lowering.scratch import scratch
from .options import CASE_HELP, Subparsers, add_command, add_lowering, job
from .show import console, print_json, status

OPS_SHOWN = 12


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "lower", _run, summary)
    parser.add_argument("case", help=f"{CASE_HELP}. Or a file of StableHLO")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the artifact here")
    add_lowering(parser)


def _run(options: argparse.Namespace) -> int:
    with status(f"lowering {options.case}"):
        program, notes = _program(options)
    if options.output is not None:
        save(program, options.output)
    if options.json:
        print_json("program", {**summary(program), "notes": notes})
    else:
        out = console()
        show(out, program, options.case)
        for note in notes:
            indented(out, Text(f"note: {note}", style="yellow"), 0)
        if options.output is not None:
            print(f"written to {relative(options.output)}")
    return 0


def _program(options: argparse.Namespace) -> tuple[Program, list[str]]:
    """What the case or file holds, and notes on where it came from."""
    if is_foreign(options.case):
        return read_foreign(options.case, options.timeout), []
    with scratch() as folder:
        path = str(Path(folder, "lowered.program"))
        answer = run(job(options, "lower", options.case, output=path), timeout=options.timeout)
        return load(path), answer["notes"]


def summary(program: Program) -> dict[str, Any]:
    """What a program holds, without its text."""
    return {
        "digests": {level: form.digest for level, form in program.forms.items()},
        "functions": {level: len(form.sections) for level, form in program.forms.items()},
        "ops": dict(program.ops),
        "kernels": [
            {
                "name": name,
                "label": section.label,
                "digest": section.digest,
                "calls": program.kernel_calls.get(name, 0),
                "ops": sum('"(' in line for line in section.text.split("\n")),
            }
            for name, section in program.kernels.items()
        ],
        "ledger": dict(program.ledger),
        "unknowns": [{"construct": u.construct, "reason": u.reason} for u in program.unknowns],
        "stamp": dict(program.stamp.fields),
        "queries": list(program.stamp.queries),
    }


def show(out: Console, program: Program, title: str) -> None:
    """Prints what a program holds."""
    held = summary(program)
    out.print(Text(title, style="bold"))
    out.print(Text("sha256", style="bold"))
    for level, digest in held["digests"].items():
        out.print(f"  {level:9} {digest}", soft_wrap=True)
    _counts(out, "operations", held["ops"], OPS_SHOWN)
    if held["kernels"]:
        out.print(Text("kernels", style="bold"))
        for kernel in held["kernels"]:
            times = f"called {kernel['calls']} times" if kernel["calls"] != 1 else "called once"
            line = f"{kernel['label'] or 'kernel'}  {times}, {kernel['ops']} operations"
            indented(out, Text.assemble(line, "  ", (kernel["digest"][:12], "dim")))
    _counts(out, "set aside as noise", held["ledger"], None)
    _stamp(out, held["stamp"])
    if held["queries"]:
        out.print(Text("asked for its platform while traced", style="bold"))
        for query in held["queries"]:
            indented(out, Text(query))
    if program.unknowns:
        out.print(Text("unknown: no comparison can end in IDENTICAL", style="bold red"))
        for unknown in program.unknowns:
            place = source(unknown.where)
            end = f" ({place})" if place else ""
            indented(out, Text(f"{unknown.construct}: {unknown.reason}{end}"))


def _stamp(out: Console, fields: dict[str, str]) -> None:
    """A field a line; of the flags, which are many, one a line each."""
    out.print(Text("stamp", style="bold"))
    width = max(map(len, fields), default=0) + 2
    for name, value in fields.items():
        items = value.split(", ") if name == "flags" else [value]
        for number, item in enumerate(items if value else []):
            indented(out, Text(f"{name if number == 0 else '':{width}}{item}"), hang=width)


def _counts(out: Console, title: str, counts: dict[str, int], limit: int | None) -> None:
    total = sum(counts.values())
    out.print(Text.assemble((title, "bold"), f"  {total:,}"))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ranked if limit is None else ranked[:limit]
    width = max((len(f"{count:,}") for _, count in shown), default=1)
    for name, count in shown:
        indented(out, Text(f"{count:>{width},}  {name}"))
    if len(shown) < len(ranked):
        rest = sum(count for _, count in ranked[len(shown) :])
        indented(out, Text(f"{rest:>{width},}  of {len(ranked) - len(shown)} other kinds"))
