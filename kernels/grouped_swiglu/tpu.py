"""The grouped SwiGLU as a Pallas TPU kernel.

The grid visits, for each tile of columns, every pair of a tile of rows and a segment of rows that
share a row, in order. A segment is a group, or the rows before or after all groups: since segments
cover all rows, every element of the result is written by some visit, zeros included, and nothing
has to be cleared before. How many pairs there are depends on the group sizes: that extent of the
grid is dynamic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...compat import vma
from .problem import VMEM_LIMIT, Extents, Problem, Tiling, check_tiling, choose_tiling, extents
from .reference import boundaries

_BOUNDS, _SEGMENTS, _TILES = range(3)


def visits(bounds: jax.Array, m: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pairs of segment and tile of rows to visit.

    Args:
      bounds: int32 ``[segments + 1]`` from `boundaries`.
      m: rows.
      rows: of a tile.

    Returns:
      The segment and the tile of each visit, int32 ``[most]``, and their number, int32 ``[]``.
    """
    starts, ends = bounds[:-1], bounds[1:]
    first = starts // rows
    count = jnp.where(ends > starts, (ends - 1) // rows - first + 1, 0)
    until = jnp.cumsum(count)
    segments = bounds.shape[0] - 1
    most = pl.cdiv(m, rows) + segments - 1
    visit = lax.iota(jnp.int32, most)
    segment = jnp.sum(until[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, segments - 1)
    mine = segment[:, None] == lax.iota(jnp.int32, segments)
    start = jnp.sum(jnp.where(mine, first - until + count, 0), axis=1)
    # Of visits that don't take place, anything that is a tile.
    return segment, jnp.clip(start + visit, 0, pl.cdiv(m, rows) - 1), until[-1]


def grouped_swiglu(
    problem: Problem,
    lhs: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `reference.grouped_swiglu`.

    Raises:
      ValueError: tiles that the kernel can't work in.
    """
    size = extents(problem, lhs, weights[0])
    itemsize = lhs.dtype.itemsize
    tiling = tiling or choose_tiling(problem, size, itemsize)
    check_tiling(problem, size, tiling, itemsize)
    bounds = boundaries(group_sizes, group_offset, size.groups, size.m)
    segments, tiles, count = visits(bounds, size.m, tiling.m)
    steps_k = pl.cdiv(size.k, tiling.k)
    half = size.n // tiling.n if problem.fused else 0
    first, second = (0, half) if problem.gate_first else (half, 0)
    gate_rhs, up_rhs = weights * 2 if problem.fused else weights
    out = pl.BlockSpec((tiling.m, tiling.n), lambda n, v, k, b, s, t: (t[v], n))
    dtypes = [problem.out_dtype] + [problem.gemm_dtype] * (2 * problem.with_gemm)
    operands = varying_alike(bounds, segments, tiles, lhs, gate_rhs, up_rhs)
    call = pl.pallas_call(
        functools.partial(_kernel, problem, size, tiling),
        out_shape=[vma.shape_struct((size.m, size.n), d, jax.typeof(operands[0])) for d in dtypes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(size.n, tiling.n), count, steps_k),
            in_specs=[
                rows_spec(tiling),
                weights_spec(problem, size, tiling, first),
                weights_spec(problem, size, tiling, second),
            ],
            out_specs=[out] * len(dtypes),
            scratch_shapes=[pltpu.VMEM((tiling.m, tiling.n), jnp.float32)] * 2
            if steps_k > 1
            else [],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=_cost(problem, size, tiling, itemsize),
        interpret=interpret,
        name="grouped_swiglu",
    )
    return tuple(call(*operands))


def varying_alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands of a kernel, which under a shard_map must all vary over the same axes."""
    varying = frozenset().union(*(vma.varying(jax.typeof(x)) for x in operands))
    return tuple(vma.pvary(x, varying - vma.varying(jax.typeof(x))) for x in operands)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when` with a type."""

    def run(body: Callable[[], None]) -> None:
        pl.when(condition)(body)

    return run


def rows_spec(tiling: Tiling) -> pl.BlockSpec:
    """The blocks of the rows that are multiplied."""
    return pl.BlockSpec((tiling.m, tiling.k), lambda n, v, k, b, s, t: (t[v], k))


def weights_spec(
    problem: Problem, size: Extents, tiling: Tiling, start: int | None = None
) -> pl.BlockSpec:
    """The blocks of the weights, or of one half of them; ``start`` is the half's first block."""

    def at(n: Any, v: Any, k: Any, bounds: Any, segments: Any, tiles: Any) -> tuple[Any, ...]:
        # Rows of no group need no weights: those of a neighbour, which are there or come next.
        group = jnp.clip(segments[v] - 1, 0, size.groups - 1)
        column = n if start is None else n + start
        return (group, column, k) if problem.transpose_rhs else (group, k, column)

    block = (tiling.n, tiling.k) if problem.transpose_rhs else (tiling.k, tiling.n)
    return pl.BlockSpec((None, *block), at)


def _kernel(problem: Problem, size: Extents, tiling: Tiling, *refs: Any) -> None:
    bounds, segments, tiles, lhs, gate_rhs, up_rhs, *rest = refs
    outs, accumulators = rest[: 1 + 2 * problem.with_gemm], rest[1 + 2 * problem.with_gemm :]
    visit, step = pl.program_id(1), pl.program_id(2)
    segment = segments[visit]
    is_group = (segment > 0) & (segment <= size.groups)
    first_row = tiles[visit] * tiling.m
    start, end = bounds[segment] - first_row, bounds[segment + 1] - first_row
    last = pl.cdiv(size.k, tiling.k) - 1

    def store(gate: jax.Array, up: jax.Array) -> None:
        values = [(jax.nn.silu(gate) * up).astype(problem.out_dtype)]
        if problem.with_gemm:
            values += [gate.astype(problem.gemm_dtype), up.astype(problem.gemm_dtype)]
        _store(values, outs, start, end)

    @when(is_group)
    def _() -> None:
        made = products(problem, size, tiling, step, lhs, gate_rhs, up_rhs)
        summed(made, accumulators, step, lambda: step == last, store)

    @when(jnp.logical_not(is_group) & (step == last))
    def _() -> None:
        _store([jnp.zeros(o.shape, o.dtype) for o in outs], outs, start, end)


def summed(
    made: list[jax.Array],
    accumulators: Sequence[Any],
    step: Any,
    is_last: Callable[[], Any],
    store: Callable[..., None],
) -> None:
    """Add up products over the steps along k, and store the sums at the last.

    Args:
      made: this step's products.
      accumulators: a reference for each; none where there is one step only.
      step: its number.
      is_last: whether it is the last one.
      store: takes the sums.
    """
    if not accumulators:
        store(*made)
        return

    @when(step == 0)
    def _() -> None:
        for accumulator, value in zip(accumulators, made):
            accumulator[...] = value

    @when(step > 0)
    def _() -> None:
        for accumulator, value in zip(accumulators, made):
            accumulator[...] += value

    @when(is_last())
    def _() -> None:
        store(*(accumulator[...] for accumulator in accumulators))


def products(
    problem: Problem, size: Extents, tiling: Tiling, step: Any, lhs: Any, *weights: Any
) -> list[jax.Array]:
    """The tile's product with each of some weights, in float32."""
    contracted = 1 if problem.transpose_rhs else 0
    # Products of bfloat16 are exact in float32, and Mosaic has no other kind for them.
    precision = problem.precision if lhs.dtype == jnp.float32 else None
    left = without_rest(lhs[...], 1, size.k, tiling.k, step)
    return [
        lax.dot_general(
            left,
            without_rest(w[...], contracted, size.k, tiling.k, step),
            (((1,), (contracted,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        for w in weights
    ]


def without_rest(x: jax.Array, axis: int, whole: int, tile: int, step: Any) -> jax.Array:
    """A block whose elements beyond the end of the contracted dimension are zero."""
    if whole % tile == 0:
        return x
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis) + step * tile
    return jnp.where(position < whole, x.astype(jnp.float32), 0).astype(x.dtype)


def _store(values: list[jax.Array], outs: Any, start: Any, end: Any) -> None:
    """Write the segment's rows of a tile, and no others'."""
    rows = outs[0].shape[0]
    whole = (start <= 0) & (end >= rows)

    @when(whole)
    def _() -> None:
        for out, value in zip(outs, values):
            out[...] = value

    @when(jnp.logical_not(whole))
    def _() -> None:
        row = lax.broadcasted_iota(jnp.int32, outs[0].shape, 0)
        mine = (row >= start) & (row < end)
        for out, value in zip(outs, values):
            wide = jnp.where(mine, value.astype(jnp.float32), out[...].astype(jnp.float32))
            out[...] = wide.astype(out.dtype)


def _cost(problem: Problem, size: Extents, tiling: Tiling, itemsize: int) -> pl.CostEstimate:
    outs = jnp.dtype(problem.out_dtype).itemsize
    if problem.with_gemm:
        outs += 2 * jnp.dtype(problem.gemm_dtype).itemsize
    reads = size.m * size.k * pl.cdiv(size.n, tiling.n) + 2 * size.groups * size.k * size.n
    return pl.CostEstimate(
        flops=4 * size.m * size.k * size.n,
        bytes_accessed=reads * itemsize + size.m * size.n * outs,
        transcendentals=size.m * size.n,
    )
