"""FLOPs of the matrix products in an instruction; a multiply-add counts two."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .hlo import Computation, HloModule, Instruction

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def flops(module: HloModule, where: Computation, op: Instruction) -> int:
    """FLOPs of the dots and convolutions in ``op``, those of its fused computation included.

    A TPU program writes batched products as convolutions over a dilated window; only positions
    that fall on an element count, so this is a lower bound of the work.
    """
    names = op.called.get("calls", ())
    inner = module.computations.get(names[0]) if op.opcode == "fusion" and names else None
    if inner is not None:
        return sum(flops(module, inner, i) for i in inner.instructions.values())
    operands = [where.instructions.get(name) for name in op.operands[:2]]
    left, right = [*operands, None, None][:2]
    if left is None or right is None or not (left.shapes and right.shapes and op.shapes):
        return 0
    if op.opcode == "dot":
        dims = op.attributes.get("lhs_contracting_dims", "").strip("{}").split(",")
        depth = math.prod(left.shapes[0].dims[int(d)] for d in dims if d.strip().isdecimal())
        return 2 * op.shapes[0].elements * depth
    if op.opcode == "convolution":
        return _convolution(op, left.shapes[0].dims, right.shapes[0].dims)
    return 0


def _convolution(op: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    match = _LABELS.search(op.attributes.get("dim_labels", ""))
    if match is None:
        return 0
    lhs, rhs, out = match.groups()
    dims = op.shapes[0].dims
    if (len(lhs), len(rhs), len(out)) != (len(left), len(right), len(dims)):
        return 0
    work = 2 * dims[out.index("b")] * dims[out.index("f")] * right[rhs.index("i")]
    windows = _windows(op.attributes.get("window", ""), sum(c.isdecimal() for c in out))
    for number, window in enumerate(windows):
        label = str(number)
        work *= _pairs(
            left[lhs.index(label)], right[rhs.index(label)], dims[out.index(label)], window
        )
    return work


@dataclass(frozen=True)
class _Window:
    stride: int = 1
    pad: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def _windows(text: str, count: int) -> list[_Window]:
    """One window for each spatial dimension, from ``{size=3x3 pad=1_1x1_1 …}``."""
    fields = dict(re.findall(r"(\w+)=(\S+?)(?=[\s}]|$)", text.strip("{}")))

    def values(name: str, default: int) -> list[int]:
        found = [int(part.split("_")[0]) for part in fields.get(name, "").split("x") if part]
        return found if len(found) == count else [default] * count

    rows = zip(
        values("stride", 1), values("pad", 0), values("lhs_dilate", 1), values("rhs_dilate", 1)
    )
    return [_Window(*row) for row in rows]


def _pairs(size: int, kernel: int, out: int, window: _Window) -> int:
    """Pairs of output position and kernel position that fall on an element of the input."""
    last = (size - 1) * window.lhs_dilate
    offsets = (k * window.rhs_dilate - window.pad for k in range(kernel))
    return sum(_hits(window.stride, c, window.lhs_dilate, last, out) for c in offsets)


def _hits(stride: int, offset: int, dilate: int, last: int, out: int) -> int:
    """How many o of 0 … out-1 have o·stride + offset a multiple of ``dilate`` in 0 … last."""
    common = math.gcd(stride, dilate)
    if offset % common:
        return 0
    period = dilate // common
    first = -(offset // common) * pow(stride // common, -1, period) % period
    low = max(0, -(offset // stride))
    high = min(out - 1, (last - offset) // stride)
    low += (first - low) % period
    return max(0, (high - low) // period + 1)
