"""Counts of a compiled program's instructions by kind, and its collectives."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from .chip import Chip
from .hlo import Computation, HloModule, Instruction
from .model import Collective
from .trips import trip_count

_NOT_COUNTED = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_GROUPS = re.compile(r"\{\{([\d,]*)\}")
_MESH_GROUPS = re.compile(r"mesh\[([^\]]*)\]\s*\{([^{}]*)\}")
_EXTENT = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_IOTA_GROUPS = re.compile(r"\[(\d+),(\d+)\]<=")


def counts(module: HloModule) -> tuple[dict[str, int], dict[int, int]]:
    """Instructions by kind, fused ones included, each counted once; sorts by operands.

    What runs in two halves counts once, under its own name. A sort's or a reduction's comparison
    isn't counted.
    """
    kinds: Counter[str] = Counter()
    sorts: Counter[int] = Counter()
    for where, _ in _reached(module, module.entry, 1, set()):
        for op in where.instructions.values():
            if op.opcode in _NOT_COUNTED or op.opcode.endswith(("-done", "-update")):
                continue
            kinds[op.opcode.removesuffix("-start")] += 1
            if op.opcode == "sort":
                sorts[len(op.operands)] += 1
    return dict(sorted(kinds.items())), dict(sorted(sorts.items()))


def collectives(module: HloModule, chip: Chip) -> tuple[Collective, ...]:
    """The collectives by kind; a loop of unknown count is taken once."""
    number: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for where, times in _reached(module, module.entry, 1, set()):
        for op in where.instructions.values():
            kind = op.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                number[kind] += times
                moved[kind] += times * _sent(kind, where, op)
    return tuple(
        Collective(kind, number[kind], moved[kind], moved[kind] / chip.link_bandwidth)
        for kind in sorted(number)
    )


def _reached(
    module: HloModule, where: Computation, times: int, inside: set[str]
) -> Iterator[tuple[Computation, int]]:
    """Every computation that runs, and how often; comparators and reducers left out."""
    if where.name in inside:
        return
    yield where, times
    for op in where.instructions.values():
        trips = trip_count(module, where, op) if op.opcode == "while" else 1
        inner = times * (1 if trips is None else trips)
        roles: tuple[str, ...] = ("calls", "body", "condition", "branches")
        if op.opcode in ("call", "call-start"):
            roles += ("to_apply",)
        for role in roles:
            for name in op.called.get(role, ()):
                if name in module.computations:
                    yield from _reached(
                        module, module.computations[name], inner, inside | {where.name}
                    )


def _sent(kind: str, where: Computation, op: Instruction) -> int:
    """Bytes that one device sends at least, by the best algorithm on a ring."""
    operands = [where.instructions.get(name) for name in op.operands]
    given = sum(s.bytes for o in operands if o is not None for s in o.shapes)
    n = _group_size(op)
    if n is None:
        return given
    match kind:
        case "all-gather":
            return given * (n - 1)
        case "all-reduce":
            return 2 * given * (n - 1) // n
        case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
            return given * (n - 1) // n
        case _:
            return given


def _group_size(op: Instruction) -> int | None:
    text = op.attributes.get("replica_groups", "")
    iota = _IOTA_GROUPS.match(text)
    if iota is not None:
        return int(iota[2])
    listed = _GROUPS.match(text)
    if listed is not None and listed[1]:
        return listed[1].count(",") + 1
    over_mesh = _MESH_GROUPS.match(text)
    if over_mesh is None:
        return None
    extents = {name: int(extent) for name, extent in _EXTENT.findall(over_mesh[1])}
    axes = _AXIS.findall(over_mesh[2])
    return math.prod(int(part or extents.get(name, 1)) for name, part in axes) if axes else None
