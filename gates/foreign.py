"""Files of MLIR on the command line: recognised here, parsed in a process with limits."""

from __future__ import annotations

from pathlib import Path

from ..lowering.artifact import load
from ..lowering.errors import InputError
from ..lowering.program import Program
from ..lowering.scratch import scratch
from .child import Job, run

MAX_FILE_BYTES = 1 << 30
TIMEOUT = 30.0
"""Seconds for a small file, where the user states none; a large one has more, by its size."""
BYTES_A_SECOND = 100_000
_SUFFIXES = (".mlir", ".mlirbc", ".stablehlo", ".vhlo")
_BYTECODE = b"ML\xefR"


def is_foreign(path: str) -> bool:
    """Whether ``path`` is a file of MLIR: by its first bytes, else by its suffix."""
    file = Path(path)
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            head = opened.read(len(_BYTECODE))
    except (OSError, ValueError):
        return False
    return head == _BYTECODE or (file.suffix in _SUFFIXES and not head.startswith(b"PK"))


def read_foreign(path: str, timeout: float | None = None) -> Program:
    """The program in a file of MLIR, parsed in a spawned process of bounded memory and time.

    Raises:
        InputError: too large a file, no StableHLO, or the parser died or didn't end. One line.
    """
    size = Path(path).stat().st_size
    if size > MAX_FILE_BYTES:
        raise InputError(f"{path}: {size} bytes; a file of MLIR has at most {MAX_FILE_BYTES}")
    with scratch() as folder:
        output = str(Path(folder, "read.program"))
        limit = timeout or TIMEOUT + size / BYTES_A_SECOND
        run(Job("foreign", spec=path, output=output), timeout=limit)
        return load(output)
