"""``relower lock``: write down which sites are rewritten in each locked program of a gate."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.text import Text

from ..gates import lock
from ..gates.config import load_matrix
from ..gates.render import indented
from ..gates.snapshot_files import in_ci
from ..lowering.errors import InputError
from ..lowering.words import plural
from .options import Subparsers, add_command
from .show import console, print_json, progress


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "lock", _run, summary)
    parser.add_argument(
        "file", nargs="?", default="relower.toml", help="the gate's; default: relower.toml"
    )


def _run(options: argparse.Namespace) -> int:
    if in_ci():  # what is accepted there was seen by nobody
        raise InputError(
            "relower lock: CI is set, and the sites to keep are never written there: run it where "
            "you can look at what was lost, and commit the file"
        )
    matrix = load_matrix(options.file)
    nodes = {cell.lock_name: cell.node for cell in matrix.cells if cell.locked}
    if not nodes:
        raise InputError(f"{options.file}: no cell has locked = true: there is nothing to write")
    uncontrolled = matrix.uncontrolled()
    if uncontrolled is not None:  # the gate would say so, whatever is written here
        raise InputError(f"{options.file}: {uncontrolled}")
    path, version = lock.lock_path(matrix.path), lock.jax_version()
    known = {entry.key: entry for entry in lock.read(path)}
    entries = {key: entry for key, entry in known.items() if key[0] in nodes}
    rows: list[dict[str, Any]] = []
    with progress(len(nodes)) as note:
        for name, node in nodes.items():
            report = lock.report_of(node, matrix.folder, matrix.timeout)
            made = lock.locked(name, version, report)
            was = known.get(made.key)
            gone = [] if was is None else [a for a in was.sites if a not in made.sites]
            new = list(made.sites) if was is None else [a for a in made.sites if a not in was.sites]
            rows.append({"program": name, "sites": len(made.sites), "lost": gone, "new": new})
            entries[made.key] = made
            note(name)
    _check_sites(rows)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(lock.written(list(entries.values())), encoding="utf-8")
    os.replace(temporary, path)
    if options.json:
        print_json("lock", {"file": str(path), "jax": version, "programs": rows})
        return 0
    out = console()
    for row in rows:
        said = f"{row['program']}: {plural(row['sites'], 'site')}"
        out.print(Text(f"{said}, {len(row['lost'])} lost, {len(row['new'])} new"))
        for address in row["lost"]:
            indented(out, Text(f"lost {address}", style="red"))
    out.print(f"written to {path.name}, for jax {version}")
    return 0


def _check_sites(rows: list[dict[str, Any]]) -> None:
    """Raises where a program has no site, which the gate takes for undecided."""
    without = [row for row in rows if not row["sites"]]
    if without:
        gone = "; ".join(address for row in without for address in row["lost"])
        lost = f" any more (lost: {gone})" if gone else ""
        raise InputError(
            f"{', '.join(row['program'] for row in without)}: no pass rewrites anything{lost}, and "
            "where no site is locked none can be lost: name other passes, or leave the cell out. "
            "Nothing was written"
        )
