"""What the backward of a grouped SwiGLU computes, and the tiles in which the kernel does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..grouped_swiglu import problem as forward
from ..grouped_swiglu.problem import LANES, Extents, Tiling, fitting


@dataclass(frozen=True)
class Problem:
    """Everything static about one call, apart from the shapes of its operands."""

    out_dtype: Any
    together: bool = False
    """Whether gate and up are the halves of one array."""
    out_together: bool = True
    """Whether their gradients are written as the halves of one array."""
    gate_first: bool = True
    """Of such arrays, whether the first half is the gate's."""
    transpose_rhs: bool = True
    """Whether weights are ``[groups, n, k]``, as the forward has them, or ``[groups, k, n]``."""
    precision: Any = None

    def gemm(self, dtype: Any) -> forward.Problem:
        """The grouped GEMM in it, of a result of this type."""
        return forward.Problem(dtype, dtype, fused=False, transpose_rhs=self.transpose_rhs,
                               precision=self.precision)  # fmt: skip


def extents(problem: Problem, lhs: Any, rhs: Any) -> Extents:
    """The extents of operands ``lhs`` ``[m, k]`` and the weights."""
    return forward.extents(problem.gemm(problem.out_dtype), lhs, rhs)


def choose_tiling(problem: Problem, size: Extents, itemsize: int, saved: int) -> Tiling:
    """Tiles that fit VMEM, waste few rows on small groups, and divide the rows where they can.

    Args:
      problem: what is computed.
      size: the extents.
      itemsize: bytes of an element of the operands.
      saved: bytes of an element of gate and up.

    Raises:
      ValueError: the columns can't be told apart by blocks, or nothing fits.
    """
    if size.n % LANES:
        raise ValueError(f"found {size.n} columns; wanted a multiple of {LANES}")
    mean = max(size.m // max(size.groups, 1), 1)
    # The result is written in whole tiles: rows beyond the last would have to be cut off again.
    rows = next((r for r in (512, 256, 128) if r <= max(mean, 128) and size.m % r == 0), 128)
    least = 32 // min(itemsize, saved, int(np.dtype(problem.out_dtype).itemsize))
    rows = min(rows, -(-size.m // least) * least)
    columns = max(c for c in (128, 256, 384, 512) if size.n % c == 0)
    return fitting(
        size, Tiling(rows, size.k, columns), least,
        lambda tiling, whole_k: vmem_bytes(problem, tiling, itemsize, saved, whole_k),
    )  # fmt: skip


def check_tiling(size: Extents, tiling: Tiling, itemsize: int) -> None:
    """That the kernel can work in these tiles; ``itemsize`` is that of the narrowest array.

    Raises:
      ValueError: an extent that blocks can't have.
    """
    rows = 32 // itemsize
    if tiling.m < 1 or tiling.m % rows:
        raise ValueError(f"found tiles of {tiling.m} rows; wanted a multiple of {rows}")
    if tiling.k < 1 or (tiling.k % LANES and tiling.k != size.k):
        raise ValueError(
            f"found tiles of {tiling.k} along k; wanted a multiple of {LANES}, or all {size.k}"
        )
    if tiling.n < 1 or size.n % tiling.n or tiling.n % LANES:
        raise ValueError(
            f"found tiles of {tiling.n} columns of {size.n}; wanted a multiple of {LANES} that "
            "divides them"
        )


def vmem_bytes(problem: Problem, tiling: Tiling, itemsize: int, saved: int, whole_k: bool) -> int:
    """What double-buffered blocks, the results that are on their way, and the accumulator take."""
    area = tiling.m * tiling.n
    blocks = (tiling.m + tiling.n) * tiling.k * itemsize + 2 * area * saved
    results = 2 * 2 * area * int(np.dtype(problem.out_dtype).itemsize)
    return 2 * blocks + results + area * 4 * (1 if whole_k else 2)
