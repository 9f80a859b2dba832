"""``relower passes``: the catalogue."""

from __future__ import annotations

import argparse

from rich.text import Text

from ..gates.child import Job, run
from ..gates.render import indented
from .options import Subparsers, add_command
from .show import UNDECIDED, console, print_json, status


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "passes", _run, summary)
    parser.add_argument("name", nargs="?", help="one pass, with its code before and after")


def _run(options: argparse.Namespace) -> int:
    from ..lowering.errors import InputError

    with status("loading the passes"):
        catalogue = run(Job("catalogue"))
    found, faults = catalogue["passes"], catalogue["faults"]
    if options.name is not None:
        known = ", ".join(entry["name"] for entry in found)
        found = [entry for entry in found if entry["name"] == options.name]
        if not found:
            hint = "".join(f"; {fault}" for fault in faults)
            raise InputError(f"no pass called {options.name!r}; there are {known}{hint}")
        faults = []
    if options.json:
        print_json("passes", {"passes": found, "faults": faults})
        return UNDECIDED if faults else 0
    out = console()
    for entry in found:
        guest = entry["origin"] != "relower"
        origin = f"  of {entry['origin']}" if guest else ""
        asked = "  only by name" if entry["by_name"] else ""
        title = ((entry["name"], "bold"), "  ", (entry["contract"], "cyan"), origin, asked)
        out.print(Text.assemble(*title))
        indented(out, entry["summary"])
        if entry["requirements"]:
            indented(out, Text("applies where", style="dim"))
            for requirement in entry["requirements"]:
                indented(out, Text(f"• {requirement['sentence']}"), 4)
        if options.name is not None:
            for side in ("before", "after"):
                indented(out, Text(side, style="dim"))
                indented(out, Text(entry[side]), 4)
        out.print()
    for fault in faults:
        out.print(Text("can't be used", style="bold red"))
        indented(out, Text(fault))
    return UNDECIDED if faults else 0
