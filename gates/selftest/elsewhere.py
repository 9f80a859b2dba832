"""The programs lowered under other circumstances, each time in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...lowering.artifact import load
from ...lowering.errors import InputError
from ...lowering.program import LEVELS
from ..child import Job, run
from .places import PROGRAMS, SOURCE
from .score import Row
from .verdicts import compared


@dataclass(frozen=True)
class Circumstance:
    """What is another way round; ``prepare`` is given an empty folder."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    history: bool = False
    moved: bool = False
    prefix: bool = False


CIRCUMSTANCES = (
    Circumstance("another PYTHONHASHSEED", {"PYTHONHASHSEED": "12345"}),
    Circumstance("file moved, lines shifted, another folder", moved=True),
    Circumstance("another virtual environment", prefix=True),
    Circumstance("unrelated traces before", history=True),
)
_BASE = Circumstance("as it is", {"PYTHONHASHSEED": "0"})


def lowerings(folder: Path, timeout: float | None) -> list[Callable[[], list[Row]]]:
    """Tasks, the first of which the others need; each gives a row for each program."""
    return [
        lambda: _lowered(_BASE, folder / "base", timeout),
        *(
            lambda c=c, i=i: _rows(c, folder, folder / f"other_{i}", timeout)
            for i, c in enumerate(CIRCUMSTANCES)
        ),
    ]


def _rows(given: Circumstance, base: Path, folder: Path, timeout: float | None) -> list[Row]:
    _lowered(given, folder, timeout)
    rows = []
    for program in PROGRAMS:
        row = Row(program, given.name, "noise", "matched", levels=LEVELS)
        pair = [load(where / f"{program}.program") for where in (base / "base", folder)]
        rows.append(compared(row, *pair))
    return rows


def _lowered(given: Circumstance, folder: Path, timeout: float | None) -> list[Row]:
    """Lowers every program into ``folder``; checks that the circumstances were as wanted."""
    folder.mkdir()
    source, variables = SOURCE, dict(given.variables)
    if given.moved:
        source = folder / "deep" / "another_name.py"
        source.parent.mkdir()
        source.write_text("\n" * 40 + SOURCE.read_text())
    if given.prefix:
        variables["PYTHONPATH"] = str(_another_prefix(folder))
    options = {"part": "lower", "folder": str(folder), "programs": list(PROGRAMS)}
    job = Job("selftest", spec=str(source), options=options, history=given.history)
    found = run(job, timeout=timeout, cwd=folder, variables=variables)
    if given.prefix and not found["jax"].startswith(variables["PYTHONPATH"]):
        raise InputError(f"selftest: jax came from {found['jax']}, not from the other environment")
    return []


def _another_prefix(folder: Path) -> Path:
    """The folder that holds jax, under another path."""
    import importlib.util

    spec = importlib.util.find_spec("jax")
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent.parent
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    link = folder / "another" / "lib" / version / "site-packages"
    link.parent.mkdir(parents=True)
    os.symlink(home, link)
    return link
