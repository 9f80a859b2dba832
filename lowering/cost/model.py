"""The `Cost` of a program: plain figures, each with the rung of the ladder it stands on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..words import plural
from .chip import Chip

Rung = Literal["profile", "salvaged", "fragment", "bundles", "counts"]
RUNGS: Mapping[Rung, str] = {
    "profile": "static bundle analysis of the whole program",
    "salvaged": "what the analysis had written when it was cut short, joined by instruction name",
    "fragment": "static bundle analysis of the operation compiled alone",
    "bundles": "VLIW bundles in the final schedule: code size, not cycles",
    "counts": "counts of operations and bytes of memory; no cycles",
}
"""From the best rung down; figures of two rungs are never added or compared."""

CYCLE_RUNGS: tuple[Rung, ...] = ("profile", "salvaged", "fragment")

Bound = Literal["estimate", "HBM", "FLOPs", "unknown"]


@dataclass(frozen=True)
class OpCost:
    """One instruction of the compiled program that does work."""

    name: str
    kind: str
    """The HLO operation; for a fusion with its kind, for a custom call with its target."""
    shape: str
    source: str | None
    """``file:line`` in the user's code."""
    scope: str | None
    """The name-scope path."""
    times: int | None
    """How often one run of the program executes it; None where a loop's trip count is unknown."""
    estimate: int | None
    """Cycles of one execution by the compiler's static analysis; None: not available."""
    rung: Rung
    """Where ``estimate`` is from; ``counts`` where there is none."""
    hbm_bytes: int
    """Moved by one execution, at least."""
    flops: int
    """Of matrix products, in one execution."""
    roofline: float
    """Cycles that bytes and FLOPs take at least, at the stated clock."""
    window: int | None = None
    """The window heuristic's cycles: shown, never summed or compared."""
    bundles: int | None = None
    """VLIW bundles in the final schedule of this instruction's code."""
    overlapped: bool = False
    """Starts or ends something that runs beside other instructions (a copy, a collective)."""
    sparse: bool = False
    """Starts work on the SparseCore, which no rung has a figure for."""
    custom_call: str | None = None
    """A custom call's target; ``tpu_custom_call`` is a Mosaic kernel."""
    hbm_bound: bool = True
    """Whether bytes, not FLOPs, make the roofline."""

    @property
    def figure(self) -> float | None:
        """Cycles of one execution: the larger of estimate and roofline; None without estimate."""
        return None if self.estimate is None else max(float(self.estimate), self.roofline)

    @property
    def bound(self) -> Bound:
        """What the figure is: the compiler's estimate, or a limit of the chip above it."""
        if self.estimate is None:
            return "unknown"
        if self.roofline <= self.estimate:
            return "estimate"
        return "HBM" if self.hbm_bound else "FLOPs"

    @property
    def total(self) -> float | None:
        """Cycles in one run of the program; None where estimate or count is unknown."""
        return None if self.figure is None or self.times is None else self.figure * self.times

    @property
    def total_estimate(self) -> int | None:
        """As `total`, of the compiler's estimate alone."""
        if self.estimate is None or self.times is None:
            return None
        return self.estimate * self.times


@dataclass(frozen=True)
class Total:
    """A sum over the instructions with a figure on one rung, and what it covers."""

    rung: Rung
    cycles: float
    """Each instruction by the larger of estimate and roofline."""
    estimate: int
    """The compiler's estimates alone."""
    ops: int
    """Instructions summed."""
    ops_of: int
    """Instructions that do work, on the TensorCore or the SparseCore; copies and collectives that
    run beside them are left out."""
    bytes: int
    """HBM bytes of the instructions summed."""
    bytes_of: int
    """Of all; executions of unknown number count once."""
    flops: int
    """FLOPs of matrix products in the instructions summed."""
    flops_of: int

    @property
    def coverage(self) -> str:
        """As in ``12 of 14 operations, 93 % of HBM bytes``, and of FLOPs where there are any."""
        parts = [f"{self.ops:,} of {plural(self.ops_of, 'operation')}"]
        for name, have, of in (
            ("HBM bytes", self.bytes, self.bytes_of),
            ("FLOPs", self.flops, self.flops_of),
        ):
            if of:
                parts.append(f"{_percent(have, of)} of {name}")
        return ", ".join(parts)

    @property
    def complete(self) -> bool:
        """Whether every instruction that does work has a figure."""
        return self.ops == self.ops_of and self.ops > 0


def _percent(have: int, of: int) -> str:
    """Rounded towards what is missing: 100 % is all of it, 0 % none."""
    share = 100 * have / of
    if have != of and share > 99:
        return ">99 %"
    return "<1 %" if have and share < 1 else f"{share:.0f} %"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int
    outputs: int
    alias: int
    """Outputs that take an argument's place."""
    temp: int
    code: int
    peak: int
    """As the compiler says; arguments + outputs − alias + temp where it doesn't."""


@dataclass(frozen=True)
class Collective:
    """A collective, estimated apart from the core's cycles."""

    kind: str
    count: int
    bytes: int
    """That leave one device in one run, over all of them."""
    seconds: float
    """``bytes`` over the device's link bandwidth: a lower bound, overlap not considered."""


def _of_run(op: OpCost, amount: int) -> int:
    """An amount of one execution, for one run; an unknown number of executions counts as one."""
    return amount * (1 if op.times is None else op.times)


@dataclass(frozen=True)
class Cost:
    """What one program costs on one device of the target."""

    name: str
    target: str
    chip: Chip
    rung: Rung
    """The best rung that gave this program figures."""
    ops: tuple[OpCost, ...] = field(repr=False)
    memory: Memory
    counts: Mapping[str, int] = field(repr=False)
    """Instructions of the compiled program by kind, fused ones included."""
    sorts: Mapping[int, int]
    """Sorts by their number of operands."""
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]
    """Why a rung wasn't reached, and what the figures leave out."""
    versions: Mapping[str, str]
    """jax, jaxlib and libtpu."""
    seconds: float = field(default=0.0, compare=False)
    """Spent in the compiler."""

    def total(self, rung: Rung | None = None) -> Total:
        """The sum over one rung: the program's own where none is named."""
        rung = rung or self.rung
        real = [op for op in self.ops if op.sparse or not op.overlapped]
        summed = [op for op in real if op.rung == rung and op.total is not None]
        return Total(
            rung=rung,
            cycles=sum(op.total or 0.0 for op in summed),
            estimate=sum(op.total_estimate or 0 for op in summed),
            ops=len(summed),
            ops_of=len(real),
            bytes=sum(_of_run(op, op.hbm_bytes) for op in summed),
            bytes_of=sum(_of_run(op, op.hbm_bytes) for op in real),
            flops=sum(_of_run(op, op.flops) for op in summed),
            flops_of=sum(_of_run(op, op.flops) for op in real),
        )

    def within(self, scope: str) -> Cost:
        """The same program, cut down to the operations whose name scope has a component ``scope``.

        Memory and counts stay those of the whole.
        """
        parts = re.compile(rf"(^|[/(]){re.escape(scope)}([/)]|$)")
        return replace(self, ops=tuple(op for op in self.ops if parts.search(op.scope or "")))

    @property
    def floor(self) -> float:
        """Cycles that one run takes at least: all HBM bytes, or all FLOPs, at the chip's best."""
        moved = sum(_of_run(op, op.hbm_bytes) for op in self.ops)
        work = sum(_of_run(op, op.flops) for op in self.ops)
        return max(moved / self.chip.bytes_per_cycle, work / self.chip.flops_per_cycle)

    @property
    def has_cycles(self) -> bool:
        """Whether the program's rung is one of cycles."""
        return self.rung in CYCLE_RUNGS

    def milliseconds(self, cycles: float) -> float:
        """Cycles as milliseconds at the stated clock."""
        return 1000 * cycles / self.chip.clock

    def duration(self, cycles: float) -> str:
        """Cycles as a time at the stated clock: ``0.6387 ms``, ``0.3 µs``."""
        milliseconds = self.milliseconds(cycles)
        if 0 < milliseconds < 1e-3:
            return f"{1000 * milliseconds:.3g} µs"
        return f"{milliseconds:.4g} ms"

    @property
    def kernels(self) -> tuple[OpCost, ...]:
        """The Mosaic kernels."""
        return tuple(op for op in self.ops if op.custom_call == "tpu_custom_call")

    def bounds(self) -> Mapping[str, int]:
        """How many operations on the core are bound by what."""
        return dict(Counter(op.bound for op in self.ops if not op.overlapped))

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        from .to_json import cost_json

        return cost_json(self)
