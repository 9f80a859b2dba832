"""``relower explain``: every site that a pass looked at, applied or declined, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ..gates.child import run
from ..gates.render import indented, source_text
from ..gates.suggested import Suggested, suggested
from ..lowering.cost.measurement import Measurement
from ..lowering.errors import InputError
from ..lowering.words import UNADDRESSED, plural
from .options import CASE_HELP, Subparsers, add_command, add_lowering, job, seconds
from .show import console, print_json, status

ADDRESSES_SHOWN = 3


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "explain", _run, summary)
    parser.add_argument("case", help=CASE_HELP)
    add_lowering(parser, passes="default")
    parser.add_argument(
        "--counts", action="store_true", help="how many sites each pass has, without the sites"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="decide by estimated TPU cycles: compile each site as it is and in each way",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="for each compilation of --measure; default: 300",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="of --measure: compile also what was compiled before",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="say what to write in the source instead, with a patch where that is mechanical",
    )
    parser.add_argument(
        "--cases",
        metavar="NAME,…",
        help="of --suggest: which other cases of the same file the patch must be right for, as in "
        "'small,large[wide]', or 'none'; default: all",
    )
    parser.add_argument(
        "--patch", metavar="FILE", help="write the patch of --suggest there, not to the terminal"
    )


def _run(options: argparse.Namespace) -> int:
    request = job(options, "explain", options.case)
    asked: dict[str, Any] = {}
    if options.measure:
        asked["measure"] = {"limit": options.limit, "cache": not options.no_cache}
    if options.suggest or options.patch is not None:
        if "@" in options.case.rpartition(":")[2]:
            raise InputError(f"{options.case}: --suggest is for the files of the work tree")
        asked["suggest"] = True
    elif options.cases is not None:
        raise InputError("--cases is for --suggest or --patch: found neither")
    if options.counts and options.json and "suggest" in asked:
        raise InputError("--counts --json leaves the sites out, of which --suggest and --patch "
                         "speak: leave one of them out")  # fmt: skip
    request = replace(request, options=asked)
    if options.passes == "none":
        request = replace(request, passes=())  # where nothing is said, those that run unasked
    doing = "measuring" if options.measure else "tracing"
    with status(f"{doing} {options.case}"):
        report = run(request, timeout=options.timeout)
    made = None
    if "suggest" in asked:
        made = suggested(
            request, report, status, cases=_cases(options.cases), timeout=options.timeout
        )
        report |= made.to_json()
        for name in ("expressions", "cases"):  # the patch says it better
            report.pop(name, None)
    if options.patch is not None:
        _write(options.patch, report["patch"])
    if options.json and options.counts:
        print_json("counts", counted(report))
    elif options.json:
        print_json("report", report)
    else:
        shown = counts if options.counts else show
        shown(console(), report, options.case)
        if made is not None:
            _patch(console(), made, options.patch)
    return 0


def _cases(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [] if text == "none" else [name.strip() for name in text.split(",")]


def _write(file: str, text: str) -> None:
    with open(file, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def _patch(out: Console, made: Suggested, file: str | None) -> None:
    """Prints what can be written by a machine, for which cases, and why not the rest."""
    out.print()
    where = "" if file is None else f", written to {file}"
    changed = f"patch: {plural(made.patch.edited, 'expression')}{where}"
    out.print(Text(changed, style="bold"))
    for line in made.patch.given:
        indented(out, Text(f"taken as given: {line}", style="dim"))
    same = ", ".join(case for case, differs in made.checks.items() if differs is None)
    if same:
        text = "rewritten, the patched files lower to the same program (level dataflow): "
        indented(out, Text(text + same, style="green"))
    for case, differs in made.checks.items():
        if differs is not None:
            no = f"not shown: {case}: rewritten, the patched files don't lower to the same program"
            indented(out, Text(f"{no}: {differs}", style="bold red"))
    for line in made.patch.left:
        indented(out, Text(f"not in it: {line}", style="yellow"))
    for case, why in made.unchecked.items():
        indented(out, Text(f"not held against it: {case}: {why}", style="yellow"))
    if file is None:
        out.print(Text(made.patch.text), soft_wrap=True)


def show(out: Console, report: dict[str, Any], case: str) -> None:
    """Prints a report of sites."""
    passes = ", ".join(report["passes"])
    out.print(Text(case, style="bold"))
    indented(out, Text(f"passes: {passes or 'none'}", style="dim"))
    beaten = [site for site in report["sites"] if site["taken_by"]]
    for status_name, style in (("applied", "green"), ("declined", "yellow")):
        here = [s for s in report["sites"] if s["status"] == status_name and not s["taken_by"]]
        if here:
            out.print()
            out.print(Text(f"{status_name} ({len(here)})", style=f"bold {style}"))
        for alike in _grouped(here):
            _sites(out, alike)
            _instead(out, alike, beaten)
    _frozen(out, report.get("frozen", ()))
    _coverage(out, report)
    if report.get("superseded"):
        out.print()
        indented(out, Text("gave way to another pass: " + ", ".join(report["superseded"])), 0)
    _notes(out, report)


def counts(out: Console, report: dict[str, Any], case: str) -> None:
    """Prints how many sites each pass has, those that had one at all."""
    out.print(Text(case, style="bold"))
    width = max(map(len, report["passes"]), default=0)
    out.print(Text(f"{'pass':{width}}  applied  declined", style="bold"))
    for row in counted(report)["passes"]:
        if row["applied"] or row["declined"]:
            out.print(Text(f"{row['pass']:{width}}  {row['applied']:7}  {row['declined']:8}"))
    _notes(out, report)


_TOTALS = ("name", "applied", "declined", "taken", "equations", "bodies", "rounds", "notes")


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """How many sites each pass has, without the sites."""
    found = {name: {"applied": 0, "declined": 0, "taken": 0} for name in report["passes"]}
    for site in report["sites"]:
        found[site["pass"]]["taken" if site["taken_by"] else site["status"]] += 1
    passes = [{"pass": name, **row} for name, row in found.items()]
    return {**{name: report[name] for name in _TOTALS}, "passes": passes}


def _coverage(out: Console, report: dict[str, Any]) -> None:
    if report["coverage"]:
        out.print()
        out.print(Text("not looked into", style="bold"))
        for entry in report["coverage"]:
            what = f"{entry['count']} × {entry['primitive']}.{entry['param']}: {entry['reason']}"
            indented(out, Text(what))


def _notes(out: Console, report: dict[str, Any]) -> None:
    """The notes, and the closing line."""
    for note in report.get("notes", ()):
        indented(out, Text(f"note: {note}"), 0)
    out.print()
    out.print(
        f"{report['applied']} applied, {report['declined']} declined; "
        f"{plural(report['equations'], 'equation')} in "
        f"{plural(report['bodies'], 'body', 'bodies')}, "
        f"{plural(report['rounds'], 'round')}"
    )


def _frozen(out: Console, leaves: Sequence[dict[str, Any]]) -> None:
    """The frozen parameters as a tree."""
    if not leaves:
        return
    from ..passes.frozen_tree import frozen_tree

    out.print()
    head, *lines = frozen_tree(leaves)
    out.print(Text(head, style="bold"))
    for line in lines:
        indented(out, Text(line))


_PLACE = ("primitive", "type", "source", "scope")


def _instead(out: Console, done: list[dict[str, Any]], beaten: list[dict[str, Any]]) -> None:
    """Which other passes looked at the equations that one has rewritten, and why they didn't."""
    places = {tuple(site[name] for name in _PLACE) for site in done}
    said = {
        (site["pass"], ", ".join(reason["code"] for reason in site["reasons"])): None
        for site in beaten
        if site["taken_by"] == done[0]["pass"] and tuple(site[n] for n in _PLACE) in places
    }
    for name, codes in said:
        indented(out, Text(f"instead of {name}: {codes}", style="dim"), 4)


def _grouped(sites: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Sites of one pass at one source line that end alike, in the order found."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for site in sites:
        codes = tuple(reason["code"] for reason in site["reasons"])
        figures = json.dumps(site.get("measured"))  # those that differ stand apart
        key = (site["pass"], site["primitive"], site["source"], codes, figures)
        found.setdefault(key, []).append(site)
    return list(found.values())


def _sites(out: Console, sites: list[dict[str, Any]]) -> None:
    first = sites[0]
    types = ", ".join(dict.fromkeys(site["type"] for site in sites))
    places = sum(site["calls"] for site in sites)
    head = Text.assemble((first["pass"], "bold"), f"  {first['primitive']} → {types}")
    if places > 1:
        head.append(f"  {places} equations")
    indented(out, head)
    indented(out, Text(source_text(first["source"]), style="cyan"), 4)
    addresses = list(dict.fromkeys(a for site in sites for a in site["addresses"]))
    for address in addresses[:ADDRESSES_SHOWN]:
        indented(out, Text(address, style="dim"), 4)
    rest = len(addresses) - ADDRESSES_SHOWN
    if rest > 0:
        indented(out, Text(f"and {rest} more address{'es' * (rest > 1)}; --json has all", "dim"), 4)
    if any(address.endswith("#?") for address in addresses):
        indented(out, Text(UNADDRESSED, "dim"), 4)
    for index, reason in enumerate(first["reasons"]):
        indented(out, Text.assemble((reason["code"], "yellow"), f": {reason['sentence']}"), 4)
        for name in ("found", "wanted"):
            values = dict.fromkeys(site["reasons"][index][name] for site in sites)
            text = "; or ".join(value for value in values if value)
            if text:
                indented(out, Text(f"{name:6} {text}"), 6)
    for said in dict.fromkeys(s["suggestion"]["sentence"] for s in sites if "suggestion" in s):
        indented(out, Text.assemble(("in the source", "green"), f": {said}"), 4)
    measured = first.get("measured")
    if measured is not None:
        style = "yellow" if measured["why"] is not None else "green"
        indented(out, Text(str(Measurement(**measured)), style=style), 4)
