"""``relower explain``: every site that a pass looked at, applied or declined, and why."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from ..gates.child import run
from .options import CASE_HELP, Subparsers, add_command, add_lowering, job
from .show import console, indented, plural, print_json, source_text, status


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "explain", _run, summary)
    parser.add_argument("case", help=CASE_HELP)
    add_lowering(parser)


def _run(options: argparse.Namespace) -> int:
    request = job(options, "explain", options.case)
    with status(f"tracing {options.case}"):
        report = run(request, timeout=options.timeout)
    if options.json:
        print_json(report)
    else:
        show(console(), report, options.case)
    return 0


def show(out: Console, report: dict[str, Any], case: str) -> None:
    """Prints a report of sites."""
    passes = ", ".join(report["passes"])
    out.print(Text(case, style="bold"))
    indented(out, Text(f"passes: {passes or 'none'}", style="dim"))
    for status_name, style in (("applied", "green"), ("declined", "yellow")):
        sites = [site for site in report["sites"] if site["status"] == status_name]
        if sites:
            out.print()
            out.print(Text(f"{status_name} ({len(sites)})", style=f"bold {style}"))
        for site in sites:
            _site(out, site)
    if report["coverage"]:
        out.print()
        out.print(Text("not looked into", style="bold"))
        for entry in report["coverage"]:
            what = f"{entry['count']} × {entry['primitive']}.{entry['param']}: {entry['reason']}"
            indented(out, Text(what))
    if report.get("superseded"):
        out.print()
        indented(out, Text("gave way to another pass: " + ", ".join(report["superseded"])), 0)
    for note in report.get("notes", ()):
        indented(out, Text(f"note: {note}"), 0)
    out.print()
    out.print(
        f"{report['applied']} applied, {report['declined']} declined; "
        f"{plural(report['equations'], 'equation')} in {report['bodies']} bodies, "
        f"{plural(report['rounds'], 'round')}"
    )


def _site(out: Console, site: dict[str, Any]) -> None:
    calls = f"  run by {site['calls']} equations" if site["calls"] > 1 else ""
    head = f"{site['primitive']} → {site['type']}{calls}"
    indented(out, Text.assemble((site["pass"], "bold"), "  ", head))
    indented(out, Text(source_text(site["source"]), style="cyan"), 4)
    if site["scope"]:
        indented(out, Text(site["scope"], style="dim"), 4)
    for reason in site["reasons"]:
        indented(out, Text.assemble((reason["code"], "yellow"), f": {reason['sentence']}"), 4)
        for name in ("found", "wanted"):
            if reason[name]:
                indented(out, Text(f"{name:6} {reason[name]}"), 6)
