"""``relower verify``: every rewrite of a program, run against what it replaces."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ..gates.child import Job, run
from ..gates.render import indented, source_text
from ..gates.verify.host import variables
from ..gates.verify.verdict import remarks
from ..lowering.errors import InputError
from ..lowering.words import UNADDRESSED, plural
from .options import (
    CASE_HELP,
    Subparsers,
    add_command,
    add_lowering,
    count,
    gibibytes,
    job,
    seconds,
)
from .progress import bar, following
from .show import console, print_json

_STYLES = {"VERIFIED": "green", "VIOLATION": "bold red", "UNKNOWN": "yellow"}


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "verify", _run, summary)
    parser.add_argument(
        "case",
        nargs="?",
        help=f"{CASE_HELP}. Without one, with --mutants: the passes' own examples",
    )
    parser.add_argument(
        "--mutants", action="store_true",
        help="break each rewrite in many ways: the same inputs must show every one",
    )  # fmt: skip
    parser.add_argument(
        "--pass", action="append", default=[], metavar="NAME", dest="only",
        help="verify this pass's sites only, and run it beside 'default'; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--facts", action="store_true",
        help="also run the whole program, and see whether what rewrites take as known holds",
    )  # fmt: skip
    parser.add_argument(
        "--seeds",
        type=count,
        default=2,
        metavar="N",
        help="fill each kind of input N times; default: 2",
    )
    parser.add_argument(
        "--limit", type=seconds, default=60.0, metavar="SECONDS", help="for each site; default: 60"
    )
    parser.add_argument(
        "--memory-limit", type=gibibytes, default=1.0, metavar="GIB",
        help="bytes that a site reads and makes; a larger one is run at smaller shapes, or "
        "unknown; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--repro", metavar="FOLDER", default="relower-repro",
        help="where scripts that show violations are put; default: relower-repro",
    )  # fmt: skip
    add_lowering(parser, passes="default")


def _run(options: argparse.Namespace) -> int:
    found = verified(options)
    if options.json:
        print_json("verify", found)
    else:
        show(console(), found, options.case or "the passes' own examples")
    return int(found["exit_code"])


def verified(options: argparse.Namespace) -> dict[str, Any]:
    """What the child says of the case."""
    if options.case is None and not options.mutants:
        raise InputError("verify: wanted FILE.py:NAME, or --mutants for the passes' own examples")
    if options.case is None and (options.passes or options.arg or options.mesh):
        raise InputError("verify: --passes, --arg and --mesh are for a case; found none")
    passes = options.passes or "default"
    request = job(
        argparse.Namespace(**{**vars(options), "passes": passes}), "verify", options.case or ""
    )
    asked = {
        "only": options.only,
        "mutants": options.mutants,
        "facts": options.facts,
        "seeds": options.seeds,
        "seconds": options.limit,
        "repro": options.repro,
        "again": shlex.join(["relower", *sys.argv[1:]]),
        "bytes": int(options.memory_limit * 2**30),
    }
    return with_bar(request, asked, options.timeout)


def with_bar(request: Job, asked: Mapping[str, Any], timeout: float | None) -> dict[str, Any]:
    """Runs a child, with a bar on standard error while it works."""
    with bar() as (place, shown), following(place, shown):
        found: dict[str, Any] = run(
            replace(request, options={**asked, "progress": str(place)}),
            timeout=timeout,
            variables=variables(os.environ),
        )
    return found


def show(out: Console, found: Mapping[str, Any], title: str) -> None:
    """Prints the verdict on each site, those alike together, and the score last."""
    out.print(Text(title, style="bold"))
    for alike in _grouped(found["sites"]):
        _sites(out, alike)
    if found["facts"] is not None:
        for text in found["facts"]["broken"]:
            indented(out, Text(f"facts: {text}", style="bold red"), 0)
        for text in remarks(found["facts"]):
            indented(out, Text(f"facts: {text}", style="bold yellow"), 0)
    for note in found["notes"]:
        indented(out, Text(f"note: {note}"), 0)
    out.print()
    style = _STYLES[found["verdict"]]
    out.print(Text(f"{found['verdict']}: {found['score']}", style=style))


def _grouped(sites: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Sites of one pass at one line that ended alike, in the order found."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for site in sites:
        survivors = tuple(m["name"] for m in site["mutants"] if not m["killed"])
        alone = site["site"] if site["verdict"] != "VERIFIED" or survivors else ""
        key = (site["pass"], site["primitive"], site["source"], site["verdict"], alone)
        found.setdefault(key, []).append(site)
    return list(found.values())


def _sites(out: Console, sites: list[dict[str, Any]]) -> None:
    site = sites[0]
    style = _STYLES[site["verdict"]]
    head = Text.assemble((site["verdict"], style), "  ", (site["site"], "bold"))
    if len(sites) > 1:
        head.append(f" and {len(sites) - 1} more", "bold")
    types = ", ".join(dict.fromkeys(s["type"] for s in sites))
    head.append(f"  {site['primitive']} → {types}")
    indented(out, head, 0)
    if site["source"] is not None:
        indented(out, Text(source_text(site["source"]), style="cyan"), 4)
    if site["site"].endswith("#?"):
        indented(out, Text(UNADDRESSED), 4)
    if site["verdict"] == "VERIFIED":
        indented(out, Text(_how(site), style="dim"), 4)
    else:
        indented(out, Text(site["reason"], style=style), 4)
    for note in dict.fromkeys(n for s in sites for n in s["notes"] if not n.startswith("no deriv")):
        indented(out, Text(note, style="yellow"), 4)
    example = site["counterexample"]
    if example is not None:
        indented(out, Text("on " + ", ".join(example["inputs"])), 4)
    if site["repro"] is not None:
        indented(out, Text(f"python {site['repro']} shows it"), 4)
    _mutants(out, [m for s in sites for m in s["mutants"]])


def _mutants(out: Console, mutants: list[dict[str, Any]]) -> None:
    """How many were caught; by name those that weren't, and those that are the same program."""
    if not mutants:
        return
    real = [m for m in mutants if not m["equivalent"]]
    killed = sum(m["killed"] for m in real)
    style = "dim" if killed == len(real) else "bold red"
    indented(out, Text(f"{killed} of {plural(len(real), 'mutant')} killed", style=style), 4)
    for m in real:
        if not m["killed"]:
            indented(out, Text(f"survived: {m['name']}: {m['how']}", style="bold red"), 6)
    for name, how in dict.fromkeys((m["name"], m["how"]) for m in mutants if m["equivalent"]):
        indented(out, Text(f"the same program: {name}: {how}", style="dim"), 6)


def _how(site: Mapping[str, Any]) -> str:
    said = [f"{site['contract']} on {plural(site['runs'], 'input')}"]
    if site["derivatives"]:
        said.append(f"derivative on {site['derivatives']}")
    if site["producers"]:
        said.append(f"with {plural(site['producers'], 'producer')}")
    if site["error_ratios"] is not None:
        said.append(f"errors at most {max(site['error_ratios']):.3f} times the original's")
    said.append("shrunk shapes" if site["shrunk"] else "the program's shapes")
    return ", ".join(said)
