"""From optimised HLO and the compiler's figures to the costs of its instructions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .chip import Chip
from .flops import flops
from .hlo import Computation, HloModule, Instruction
from .model import OpCost, Rung
from .profile import estimated_cycles, window_cycles
from .traffic import hbm_bytes
from .trips import trip_count

_NO_WORK = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "add-dependency", "opt-barrier", "domain",
}  # fmt: skip
_NO_WORK_TARGETS = {"AllocateBuffer"}
_DEPTH = 100


@dataclass(frozen=True)
class Figures:
    """What the compiler said about instructions, beside the HLO."""

    rung: Rung
    """Where cycles are from; ``counts`` or ``bundles`` where there are none."""
    salvaged: Mapping[str, int]
    """Cycles by instruction, read from the files of an analysis that was cut short."""
    bundles: Mapping[str, int]
    """Bundles of the final schedule by instruction."""


def op_costs(module: HloModule, chip: Chip, figures: Figures) -> tuple[OpCost, ...]:
    """The instructions that do work, loops' bodies included, in scheduled order."""
    return tuple(_walk(module, module.entry, 1, chip, figures, 0))


def unknown_loops(module: HloModule) -> list[str]:
    """The ``while`` instructions whose trip count can't be read: their lines, or their names."""
    return [
        module.source(op) or op.name
        for where in module.computations.values()
        for op in where.instructions.values()
        if op.opcode == "while" and trip_count(module, where, op) is None
    ]


def _walk(
    module: HloModule,
    where: Computation,
    times: int | None,
    chip: Chip,
    figures: Figures,
    depth: int,
) -> Iterator[OpCost]:
    if depth > _DEPTH:
        return
    for op in where.instructions.values():
        if op.opcode == "while":
            trips = trip_count(module, where, op)
            inner = None if trips is None or times is None else times * trips
            for role in ("condition", "body"):
                for part in _called(module, op, role):
                    yield from _walk(module, part, inner, chip, figures, depth + 1)
        elif op.opcode == "conditional":
            yield from _costliest(
                [
                    list(_walk(module, branch, times, chip, figures, depth + 1))
                    for branch in _called(module, op, "branches")
                ]
            )
        elif op.opcode == "call":
            for part in _called(module, op, "to_apply"):
                yield from _walk(module, part, times, chip, figures, depth + 1)
        elif works(op):
            yield _cost(module, where, op, times, chip, figures)


def _costliest(branches: list[list[OpCost]]) -> Iterator[OpCost]:
    """All branches' instructions; those of all but the costliest run no time."""
    sums = [sum(op.total or 0.0 for op in branch) for branch in branches]
    chosen = sums.index(max(sums)) if sums else -1
    for number, branch in enumerate(branches):
        yield from branch if number == chosen else [replace(op, times=0) for op in branch]


def _called(module: HloModule, op: Instruction, role: str) -> list[Computation]:
    names = op.called.get(role, ())
    return [module.computations[name] for name in names if name in module.computations]


def works(op: Instruction) -> bool:
    """Whether an instruction does work that is worth a line.

    Arithmetic on single numbers runs on the scalar unit beside the rest, and is left out.
    """
    if op.opcode in _NO_WORK or op.attributes.get("custom_call_target") in _NO_WORK_TARGETS:
        return False
    scalar = all(shape.elements <= 1 for shape in op.shapes)
    return not (scalar and not op.called and op.opcode != "custom-call")


def overlapped(op: Instruction) -> bool:
    """Whether an instruction only starts, or waits for, what runs beside others."""
    return op.opcode.endswith(("-start", "-done", "-update"))


def _cost(
    module: HloModule,
    where: Computation,
    op: Instruction,
    times: int | None,
    chip: Chip,
    figures: Figures,
) -> OpCost:
    aside = overlapped(op)
    estimate, rung = _estimate(op, figures)
    moved = _moved(module, where, op)
    product = flops(module, where, op)
    by_bytes, by_flops = moved / chip.bytes_per_cycle, product / chip.flops_per_cycle
    return OpCost(
        name=op.name,
        kind=kind_of(module, op),
        shape=_shown(op),
        source=module.source(op),
        scope=op.metadata.get("op_name"),
        times=times,
        estimate=None if aside else estimate,
        rung="counts" if aside else rung,
        hbm_bytes=moved,
        flops=product,
        roofline=max(by_bytes, by_flops),
        window=window_cycles(op.config),
        bundles=figures.bundles.get(op.name),
        overlapped=aside,
        sparse=_sparse_core(module, op),
        custom_call=op.attributes.get("custom_call_target") if op.opcode == "custom-call" else None,
        hbm_bound=by_bytes >= by_flops,
    )


def _moved(module: HloModule, where: Computation, op: Instruction) -> int:
    if op.opcode.endswith(("-done", "-update")):
        return 0
    inner = _called(module, op, "calls") + _called(module, op, "to_apply")
    if op.opcode.endswith("-start") and inner:
        return sum(
            _moved(module, part, each)
            for part in inner
            for each in part.instructions.values()
            if works(each)
        )
    return hbm_bytes(module, where, op)


def _sparse_core(module: HloModule, op: Instruction) -> bool:
    """Whether an instruction starts work on the SparseCore."""
    inner = _called(module, op, "calls") + _called(module, op, "to_apply")
    return op.opcode.endswith("-start") and any(part.thread == "sparsecore" for part in inner)


def _estimate(op: Instruction, figures: Figures) -> tuple[int | None, Rung]:
    if figures.rung == "profile":
        cycles = estimated_cycles(op.config)
    elif figures.rung == "salvaged":
        cycles = figures.salvaged.get(op.name)
    else:
        cycles = None
    return cycles, "counts" if cycles is None else figures.rung


def _shown(op: Instruction) -> str:
    text = ", ".join(map(str, op.shapes[:4]))
    return text + (f", … {len(op.shapes)} in all" if len(op.shapes) > 4 else "")


def kind_of(module: HloModule, op: Instruction) -> str:
    """The operation, and what makes it one of its kind."""
    if op.opcode == "custom-call":
        return f"custom-call {op.attributes.get('custom_call_target', '?')}"
    if op.opcode == "sort":
        return f"sort of {len(op.operands)}"
    inner = _called(module, op, "calls")
    if op.opcode == "fusion" and inner:
        return f"fusion {inner[0].root.opcode}"
    if _sparse_core(module, op):
        return f"SparseCore {_work(module, inner)}"
    if op.opcode == "async-start" and inner:
        return f"async {inner[0].root.opcode}"
    return op.opcode


def _work(module: HloModule, parts: list[Computation], depth: int = 0) -> str:
    """What a SparseCore call does, by the first gather, scatter or sort in it."""
    for part in parts:
        for op in part.instructions.values():
            if op.opcode in ("gather", "scatter", "sort", "dynamic-update-slice"):
                return op.opcode
            inner = _called(module, op, "calls") + _called(module, op, "to_apply")
            found = _work(module, inner, depth + 1) if inner and depth < _DEPTH else "call"
            if found != "call":
                return found
    return "call"
