"""MLIR that somebody else wrote: StableHLO as text, bytecode or portable artifact, to a `Program`.

MLIR's parsers can be killed by damaged input, so this runs in a process of its own, under
`limit`; nothing of it is reached when artifacts are loaded or compared.
"""

from __future__ import annotations

import resource
from pathlib import Path

from ..compat.mlir import NEWEST, ir, parse_stablehlo
from .errors import InputError
from .normalize import normalize
from .program import FOREIGN, Program, Stamp

_MEMORY_FLOOR = 2 << 30
_MEMORY_PER_BYTE = 200
"""Bytes of memory granted for each byte of the file, above the floor."""
_CPU_SECONDS = 600


def limit(size: int) -> None:
    """Bounds this process's memory and time for a file of ``size`` bytes; forbids core dumps."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    memory = used + max(_MEMORY_FLOOR, _MEMORY_PER_BYTE * size)
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (allowed, hard))


def foreign_program(path: Path) -> Program:
    """The program in the file at ``path``; call `limit` before.

    Its stamp says only that it comes from a file: nothing is known of what made it, nor of how it
    is called.

    Raises:
        InputError: the file isn't StableHLO that this jaxlib can read. One line.
    """
    data = path.read_bytes()
    try:
        module = parse_stablehlo(data)
    except (ir.MLIRError, ValueError, RuntimeError, MemoryError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2])[:200] or type(error).__name__
        raise InputError(f"{path}: not StableHLO that this jaxlib can read: {reason}") from error
    try:
        normal = normalize(module, mosaic_version=NEWEST)
    except (RecursionError, MemoryError) as error:
        raise InputError(f"{path}: too large or too deep: {type(error).__name__}") from error
    if not normal.ops:
        raise InputError(f"{path}: a module without a function that can be called")
    return Program(
        forms=normal.forms,
        kernels=normal.kernels,
        kernel_calls=normal.kernel_calls,
        ops=normal.ops,
        ledger=normal.ledger,
        stamp=Stamp({"origin": FOREIGN}),
        unknowns=normal.unknowns,
        locations=normal.locations,
    )
