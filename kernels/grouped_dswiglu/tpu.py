"""The backward of a grouped SwiGLU as a Pallas TPU kernel.

The grid is that of the forward kernel: for each tile of columns, every pair of a tile of rows and a
segment of rows that share a row, in order. A visit multiplies the tile of cotangents with the
segment's weights, reads the tiles of gate and up that lie there, and keeps the two tiles of
gradients. A whole pair of tiles goes to its two places in one array, which no block of Pallas'
own pipeline could be, by copies that the kernel starts itself: while they run the next tile is
computed in another buffer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...compat import vma
from ..grouped_swiglu.problem import VMEM_LIMIT, Extents, Tiling
from ..grouped_swiglu.reference import boundaries
from ..grouped_swiglu.tpu import (
    products,
    rows_spec,
    summed,
    varying_alike,
    visits,
    weights_spec,
    when,
)
from .problem import Problem, check_tiling, choose_tiling, extents
from .reference import dswiglu

_BUFFERS = 2


def grouped_dswiglu(
    problem: Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    saved: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `reference.grouped_dswiglu`.

    Raises:
      ValueError: tiles that the kernel can't work in.
    """
    size = extents(problem, lhs, rhs)
    width, kept = lhs.dtype.itemsize, saved[0].dtype.itemsize
    tiling = tiling or choose_tiling(problem, size, width, kept)
    check_tiling(size, tiling, min(width, kept, jnp.dtype(problem.out_dtype).itemsize))
    tiles_m = pl.cdiv(size.m, tiling.m)
    bounds = boundaries(group_sizes, group_offset, size.groups, size.m)
    segments, tiles, count = visits(bounds, size.m, tiling.m)
    steps_k = pl.cdiv(size.k, tiling.k)
    both = saved * 2 if problem.together else saved
    operands = varying_alike(bounds, segments, tiles, lhs, rhs, *both)
    rows = tiles_m * tiling.m
    shapes = [(rows, 2 * size.n)] if problem.out_together else [(rows, size.n)] * 2
    like = jax.typeof(operands[0])
    columns = pl.cdiv(size.n, tiling.n)
    call = pl.pallas_call(
        functools.partial(_kernel, problem, size, tiling),
        out_shape=[vma.shape_struct(s, problem.out_dtype, like) for s in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(columns, count, steps_k),
            in_specs=[
                rows_spec(tiling),
                weights_spec(problem.gemm(problem.out_dtype), size, tiling),
                *(_saved_spec(tiling, columns * at) for at in halves(problem, problem.together)),
            ],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(shapes),
            scratch_shapes=[
                pltpu.VMEM((_BUFFERS, 2, tiling.m, tiling.n), problem.out_dtype),
                pltpu.SemaphoreType.DMA((_BUFFERS, 2)),
                *([pltpu.VMEM((tiling.m, tiling.n), jnp.float32)] if steps_k > 1 else []),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            # In this order: buffers are freed by waiting for the copies of earlier tiles.
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=_cost(problem, size, tiling, width, kept),
        interpret=interpret,
        name="grouped_dswiglu",
    )
    return tuple(out if rows == size.m else out[: size.m] for out in call(*operands))


def halves(problem: Problem, together: bool) -> tuple[int, int]:
    """Which half of an array is the gate's, and which the up's; both 0 of two arrays."""
    if not together:
        return 0, 0
    return (0, 1) if problem.gate_first else (1, 0)


def _saved_spec(tiling: Tiling, first: int) -> pl.BlockSpec:
    """The blocks of gate or up, of which the first is the one of this number in each row."""
    return pl.BlockSpec((tiling.m, tiling.n), lambda n, v, k, b, s, t: (t[v], n + first))


def _kernel(problem: Problem, size: Extents, tiling: Tiling, *refs: Any) -> None:
    bounds, segments, tiles, lhs, rhs, gate, up, *rest = refs
    number = 1 if problem.out_together else 2
    outs, (kept, semaphores, *accumulators) = rest[:number], rest[number:]
    column, visit, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    segment, tile = segments[visit], tiles[visit]
    first_row = tile * tiling.m
    start, end = bounds[segment] - first_row, bounds[segment + 1] - first_row
    is_last = step == pl.cdiv(size.k, tiling.k) - 1
    tiles_m = pl.cdiv(size.m, tiling.m)
    turn = column * tiles_m + tile
    buffer = lax.rem(turn, _BUFFERS)
    copies = functools.partial(_copies, problem, size, tiling, kept, semaphores, outs)

    @when(is_last & (start <= 0) & (turn >= _BUFFERS))
    def _() -> None:
        for copy in copies(buffer, turn - _BUFFERS):
            copy.wait()

    def store(dh: jax.Array) -> None:
        wide = (x[...].astype(jnp.float32) for x in (gate, up))
        _store(dswiglu(dh, *wide), kept, buffer, start, end)

    is_group = (segment > 0) & (segment <= size.groups)

    @when(is_group)
    def _() -> None:
        made = products(problem.gemm(problem.out_dtype), size, tiling, step, lhs, rhs)
        summed(made, accumulators, step, lambda: is_last, store)

    @when(jnp.logical_not(is_group) & is_last)
    def _() -> None:
        zeros = jnp.zeros((tiling.m, tiling.n), jnp.float32)
        _store((zeros, zeros), kept, buffer, start, end)

    @when(is_last & (end >= jnp.minimum(tiling.m, size.m - first_row)))
    def _() -> None:
        for copy in copies(buffer, turn):
            copy.start()

        final = pl.cdiv(size.n, tiling.n) * tiles_m - 1

        @when(turn == final)
        def _() -> None:
            for back in range(min(_BUFFERS, final + 1)):
                for copy in copies((final - back) % _BUFFERS, final - back):
                    copy.wait()


def _copies(
    problem: Problem,
    size: Extents,
    tiling: Tiling,
    kept: Any,
    semaphores: Any,
    outs: Any,
    buffer: Any,
    turn: Any,
) -> list[Any]:
    """The copies of both gradients' tiles to where they belong; ``turn`` counts tiles."""
    tiles_m = pl.cdiv(size.m, tiling.m)
    row, column = lax.rem(turn, tiles_m) * tiling.m, lax.div(turn, tiles_m) * tiling.n
    made = []
    for part, half in enumerate(halves(problem, problem.out_together)):
        out = outs[0 if problem.out_together else part]
        at = pl.multiple_of(column, tiling.n) + half * size.n
        place = out.at[pl.ds(pl.multiple_of(row, tiling.m), tiling.m), pl.ds(at, tiling.n)]
        made.append(
            pltpu.make_async_copy(kept.at[buffer, part], place, semaphores.at[buffer, part])
        )
    return made


def _store(values: tuple[jax.Array, ...], kept: Any, buffer: Any, start: Any, end: Any) -> None:
    """Keep the segment's rows of both tiles, and leave the others as they are."""
    row = lax.broadcasted_iota(jnp.int32, values[0].shape, 0)
    mine = (row >= start) & (row < end)
    for part, value in enumerate(values):
        rounded = value.astype(kept.dtype).astype(jnp.float32)
        old = kept[buffer, part].astype(jnp.float32)
        kept[buffer, part] = jnp.where(mine, rounded, old).astype(kept.dtype)


def _cost(
    problem: Problem, size: Extents, tiling: Tiling, itemsize: int, saved: int
) -> pl.CostEstimate:
    reads = size.m * size.k * pl.cdiv(size.n, tiling.n) + size.groups * size.k * size.n
    area = size.m * size.n
    written = 2 * area * jnp.dtype(problem.out_dtype).itemsize
    return pl.CostEstimate(
        flops=2 * area * size.k,
        bytes_accessed=reads * itemsize + 2 * area * saved + written,
        transcendentals=area,
    )
