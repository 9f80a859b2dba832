"""A violation as a script: the inputs, what both sides made of them, how to run it again."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ...compat import jaxprs
from ...lowering.errors import InputError
from .problem import Problem
from .verdict import Counterexample

_SCRIPT = """# {title}
#
# {reason}
#
# Prints where the two differ. The inputs are input0, input1, … of {stem}.npz, as words of
# their types. With --again, verifies the site anew:
#
#     {again}
#
{listing}

import pathlib
import subprocess
import sys

import numpy as np

if "--again" in sys.argv:
    sys.exit(subprocess.run({command}).returncode)
data = np.load(pathlib.Path(__file__).parent / "{stem}.npz")
for i, kind in enumerate({types}):
    print(f"input {{i}}:", kind, list(data[f"input{{i}}"].shape))
differs = False
for i in range({outputs}):
    before, after = data[f"before{{i}}"], data[f"after{{i}}"]
    wrong = np.argwhere(before != after)
    print(f"output {{i}}: {{len(wrong)}} of {{before.size}} words differ")
    for at in wrong[:8]:
        print(" ", at.tolist(), hex(before[tuple(at)]), "became", hex(after[tuple(at)]))
    differs |= len(wrong) > 0
sys.exit(int(differs))
"""


def save(
    folder: Path, stem: str, title: str, reason: str, again: str, problem: Problem,
    example: Counterexample,
) -> str:  # fmt: skip
    """Writes the script and its data; the script's path.

    Raises:
        InputError: the folder can't be written to.
    """
    arrays = [np.ascontiguousarray(a) for a in example.arrays]
    stored = {f"input{i}": _words(a) for i, a in enumerate(arrays)}
    count = len(problem.before.outputs)
    for name, side in (("before", problem.before), ("after", problem.after)):
        try:
            outs = problem.run(side, arrays)
        except Exception:
            outs, count = [], 0
        stored |= {f"{name}{i}": _words(o) for i, o in enumerate(outs)}
    command = again or "relower.verify(fn, *args)"
    script = _SCRIPT.format(
        title=_line(title), reason=_line(reason), again=_line(command), stem=stem, outputs=count,
        types=[str(a.dtype) for a in arrays], listing=_listing(problem),
        command=repr(shlex.split(again) if again else ["relower", "verify", "--help"]),
    )  # fmt: skip
    path = folder / f"{stem}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{stem}.npz", **stored)
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: can't be written: {error.strerror or error}") from error
    return str(path)


def check_writable(folder: Path) -> None:
    """Whether scripts can be saved in a folder, before anything is run for them; it isn't made.

    Raises:
        InputError: it, or what it would be made in, is no folder, or can't be written to.
    """
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    what = "can't be written to" if there.is_dir() else "isn't a folder"
    raise InputError(
        f"{folder}: no scripts of violations can be put there, since {there} {what}; wanted a "
        "folder to write to, as in --repro FOLDER"
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def _words(a: Any) -> Any:
    """An array's words as integers: numpy's files don't hold bfloat16."""
    a = np.ascontiguousarray(a)
    if a.dtype == np.bool_:
        return a.astype(np.uint8)
    return a.view(f"uint{min(a.dtype.itemsize, 8) * 8}")  # of a complex128, both parts


def _listing(problem: Problem) -> str:
    """Both sides' equations as comments, a line each."""
    names: dict[Any, str] = {}

    def name(atom: Any) -> str:
        if jaxprs.is_literal(atom):
            return _line(str(atom.val))
        return names.setdefault(atom, f"v{len(names)}:{atom.aval.str_short(short_dtypes=True)}")

    lines = ["inputs  " + ", ".join(map(name, problem.before.inputs))]
    for title, side in (("before", problem.before), ("after", problem.after)):
        lines.append(title)
        for eqn in side.eqns:
            made, read = (", ".join(map(name, atoms)) for atoms in (eqn.outvars, eqn.invars))
            lines.append(f"  {made} = {eqn.primitive.name} {read}")
        lines.append("  gives " + ", ".join(map(name, side.outputs)))
    return "\n".join(f"# {line}" for line in lines)
