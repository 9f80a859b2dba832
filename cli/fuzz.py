"""``relower fuzz``: random programs with the passes' patterns, and what must be true of them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..gates.child import passes_from
from ..gates.fuzz.run import BY_ROUNDING, LOWER_EVERY, Asked, Found, fuzz, save
from ..gates.render import indented
from ..lowering.words import plural
from .options import Subparsers, add_command, add_jobs, count, natural, seconds
from .show import UNDECIDED, console, folder_exists, print_json, progress, tabled

INTERRUPTED = 130
DEFAULT_COUNT = 200
MOST_CODES = 4
"""Reasons shown for each pass; ``--json`` has all."""


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "fuzz", _run, summary)
    parser.add_argument(
        "--count", type=count, metavar="N",
        help=f"how many programs; default: {DEFAULT_COUNT}, or as many as --seconds allows",
    )  # fmt: skip
    parser.add_argument("--seconds", type=seconds, metavar="S", help="stop after this time")
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="K", help="of the first program; default: 0"
    )
    parser.add_argument(
        "--passes", metavar="A,B", help="run these in every program; default: each draws its own"
    )
    parser.add_argument(
        "--lower-every", type=natural, default=LOWER_EVERY, metavar="N",
        help=f"lower one of N programs for the TPU, too; 0 for none; default: {LOWER_EVERY}",
    )  # fmt: skip
    parser.add_argument(
        "--save",
        default=".",
        metavar="FOLDER",
        help="where scripts that show violations go; default: here",
    )
    add_jobs(parser)


def _run(options: argparse.Namespace) -> int:
    folder_exists("--save", str(Path(options.save) / "script"))
    count = options.count
    if count is None and options.seconds is None:
        count = DEFAULT_COUNT
    asked = Asked(
        seed=options.seed,
        count=count,
        seconds=options.seconds,
        passes=tuple(_names(options.passes)),
        jobs=options.jobs,
        lower_every=options.lower_every,
    )
    with progress(count) as note:
        found = fuzz(asked, note)
    scripts = [save(v, Path(options.save)) for v in found.violations]
    if options.json:
        print_json("fuzz", to_json(found, scripts))
    else:
        report(console(), found, scripts)
    if found.violations:
        return 1
    if found.interrupted:
        return INTERRUPTED
    return UNDECIDED if found.vacuous() else 0


def _names(text: str | None) -> list[str]:
    found = passes_from(text)
    return [] if found is None or isinstance(found, str) else list(found)


def to_json(found: Found, scripts: list[Path | None]) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "holds": not found.violations and not found.vacuous(),
        "checked": found.checked,
        "states": dict(found.states),
        "lowered": found.lowered,
        "equations": found.equations,
        "seconds": round(found.seconds, 1),
        "cpu_seconds": round(found.cpu, 1),
        "passes": [
            {
                "name": name,
                "applied": found.applied[name],
                "programs": found.programs[name],
                "declined": dict(_codes(found, name)),
            }
            for name in found.passes
        ],
        "vacuous": found.vacuous(),
        "refusals": dict(found.refusals),
        "violations": [
            {**v, "script": None if s is None else str(s)}
            for v, s in zip(found.violations, scripts, strict=True)
        ],
    }


def _codes(found: Found, name: str) -> list[tuple[str, int]]:
    return Counter({c: n for (p, c), n in found.declined.items() if p == name}).most_common()


def report(out: Console, found: Found, scripts: list[Path | None]) -> None:
    """Prints the table, every violation, and what was run last."""
    table = Table("pass", "applied", "declined", "reasons", box=None, pad_edge=False)
    for name in found.passes:
        codes = _codes(found, name)
        shown = ", ".join(f"{code} {n:,}" for code, n in codes[:MOST_CODES])
        more = f", {len(codes) - MOST_CODES} more" if len(codes) > MOST_CODES else ""
        table.add_row(name, f"{found.applied[name]:,}", f"{sum(n for _, n in codes):,}",
                      escape(shown + more))  # fmt: skip
    tabled(out, table)
    for violation, script in zip(found.violations, scripts, strict=True):
        _violation(out, violation, script)
    for line in found.vacuous():
        indented(out, Text(line, style="red"), 0)
    for line, n in found.refusals.most_common(5):
        indented(out, Text(f"{n} × {line}", style="dim"), 0)
    whole = sum(found.states.values())
    each = found.cpu / whole if whole else 0.0
    text = (f"{plural(found.checked, 'program')} checked of {plural(whole, 'seed')}, "
            f"{plural(found.equations, 'equation')}, {found.lowered} lowered for the TPU; "
            f"{plural(len(found.violations), 'violation')}, "
            f"{found.states[BY_ROUNDING]} decided by rounding; "
            f"{found.seconds:,.0f} s, {each:.2f} s CPU each")  # fmt: skip
    holds = not found.violations and not found.vacuous()
    indented(out, Text(text, style="bold green" if holds else "bold red"), 0)


def _violation(out: Console, violation: dict[str, Any], script: Path | None) -> None:
    head = f"seed {violation['seed']} breaks: {violation['property']}"
    indented(out, Text(head, style="bold red"), 0)
    indented(out, Text(violation["detail"]), 2)
    indented(out, Text(f"passes: {', '.join(violation['passes']) or 'of the plan'}"), 2)
    for line in violation["text"].splitlines():
        indented(out, Text(line, style="cyan"), 2)
    for line in violation["jaxpr"].splitlines():
        indented(out, Text(line, style="dim"), 2)
    if script is not None:
        indented(out, Text(f"shown again by: python {script}"), 2)
