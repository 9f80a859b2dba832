"""What a grouped SwiGLU computes, and the tiles in which the kernel does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LANES = 128
"""Elements of the minor dimension that a block must be a multiple of, or else hold all of."""
VMEM_BUDGET = 26 << 20
"""Bytes of double-buffered blocks and accumulators that the heuristic fills at most."""
VMEM_LIMIT = 32 << 20
"""What the kernel's body is allowed. libtpu 0.0.52 adds the double-buffered blocks to that, and has
63.94 MiB for both on a TensorCore of TPU7x."""


@dataclass(frozen=True)
class Problem:
    """Everything static about one call, apart from the shapes of its operands."""

    gemm_dtype: Any
    """Of ``gate`` and ``up`` as the plain GEMM would write them."""
    out_dtype: Any
    with_gemm: bool = False
    """Whether ``gate`` and ``up`` are written too."""
    fused: bool = True
    """Whether one array holds both weights, side by side along the output dimension."""
    gate_first: bool = True
    """Of a fused array, whether the first half is the gate's."""
    transpose_rhs: bool = False
    """Whether weights are ``[groups, n, k]`` rather than ``[groups, k, n]``."""
    precision: Any = None


@dataclass(frozen=True)
class Tiling:
    """The extents of one block: rows, contracted elements, output columns."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class Extents:
    """The extents of one call."""

    m: int
    k: int
    n: int
    """Columns of the result, half of a fused weight's."""
    groups: int


def extents(problem: Problem, lhs: Any, rhs: Any) -> Extents:
    """The extents of operands ``lhs`` ``[m, k]`` and one weight."""
    groups, *rest = rhs.shape
    k, n = reversed(rest) if problem.transpose_rhs else rest
    return Extents(lhs.shape[0], k, n // 2 if problem.fused else n, groups)


def choose_tiling(problem: Problem, size: Extents, itemsize: int) -> Tiling:
    """Tiles that fit VMEM, divide a fused weight's halves, and waste few rows on small groups.

    A visit computes a whole tile of rows for one group, so that a tile far taller than the mean
    group wastes most of it. The contracted dimension is whole where it fits: a group's weights then
    stay while its rows go by.

    Args:
      problem: what is computed.
      size: the extents.
      itemsize: bytes of an element of the operands.

    Raises:
      ValueError: the halves of a fused weight can't be told apart by blocks.
    """
    mean = max(size.m // max(size.groups, 1), 1)
    rows = min(max(_power_of_two(mean), 128), 512)
    rows = min(rows, _up(size.m, 32 // itemsize))
    columns = _columns(problem, size.n)
    return fitting(
        size, Tiling(rows, size.k, columns), 32 // itemsize,
        lambda tiling, whole_k: vmem_bytes(problem, tiling, itemsize, whole_k),
    )  # fmt: skip


def fitting(
    size: Extents, first: Tiling, least_rows: int, taken: Callable[[Tiling, bool], int]
) -> Tiling:
    """The first tiles that fit `VMEM_BUDGET`: the longest along k, then fewer columns, then rows.

    Args:
      size: the extents.
      first: the most rows and columns to try.
      least_rows: of a tile.
      taken: bytes of VMEM that tiles take; the second argument is whether k is whole.

    Raises:
      ValueError: none fit.
    """
    rows, columns = first.m, first.n
    while True:
        for k in _divisors(size.k):
            tiling = Tiling(rows, k, columns)
            if taken(tiling, k == size.k) <= VMEM_BUDGET:
                return tiling
        if columns > LANES and columns % (2 * LANES) == 0:
            columns //= 2
        elif rows > least_rows:
            rows = _up(rows // 2, least_rows)
        else:
            raise ValueError(
                f"no tiles of {size} fit {VMEM_BUDGET} bytes of VMEM; pass a tiling, or pad the "
                f"contracted dimension to a multiple of {LANES}"
            )


def check_tiling(problem: Problem, size: Extents, tiling: Tiling, itemsize: int) -> None:
    """That the kernel can work in these tiles.

    Raises:
      ValueError: an extent that blocks can't have.
    """
    rows = 32 // itemsize
    if tiling.m < 1 or tiling.m % rows:
        raise ValueError(f"found tiles of {tiling.m} rows; wanted a multiple of {rows}")
    for name, tile, whole in (("k", tiling.k, size.k), ("n", tiling.n, size.n)):
        if tile < 1 or (tile % LANES and tile != whole):
            raise ValueError(
                f"found tiles of {tile} along {name}; wanted a multiple of {LANES}, or all {whole}"
            )
    if problem.fused and (size.n % tiling.n or tiling.n % LANES):
        raise ValueError(
            f"found tiles of {tiling.n} columns of {size.n} in each half of a fused weight; wanted "
            f"a multiple of {LANES} that divides them; pass the two weights apart otherwise"
        )


def vmem_bytes(problem: Problem, tiling: Tiling, itemsize: int, whole_k: bool) -> int:
    """What double-buffered blocks and the accumulators take."""
    area = tiling.m * tiling.n
    outs = int(np.dtype(problem.out_dtype).itemsize)
    if problem.with_gemm:
        outs += 2 * int(np.dtype(problem.gemm_dtype).itemsize)
    blocks = (tiling.m * tiling.k + 2 * tiling.k * tiling.n) * itemsize + area * outs
    return 2 * blocks + area * 4 * (2 if whole_k else 4)


def _divisors(k: int) -> list[int]:
    """All of it, and then multiples of `LANES` that divide it, longest first."""
    if k % LANES:
        return [k]
    return [k // d for d in range(1, k // LANES + 1) if (k // LANES) % d == 0]


def _columns(problem: Problem, n: int) -> int:
    if n % LANES:
        if problem.fused:
            raise ValueError(
                f"found {n} columns in each half of a fused weight; wanted a multiple of {LANES}; "
                "pass the two weights apart otherwise"
            )
        return n if n < 512 else 512
    return max(c for c in (128, 256, 384, 512) if n % c == 0)


def _power_of_two(x: int) -> int:
    return 1 << math.floor(math.log2(x))


def _up(x: int, to: int) -> int:
    return -(-x // to) * to
