"""The grouped SwiGLU in plain jnp: what the kernel must compute, and what runs off TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .problem import Problem

_DOTS = {
    False: lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)),
    True: lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,)),
}


def activation(problem: Problem, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` of float32 accumulators, rounded once."""
    return (jax.nn.silu(gate) * up).astype(problem.out_dtype)


def halves(problem: Problem, both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gate's and up's columns of ``[m, 2 · n]``."""
    n = both.shape[1] // 2
    first, second = lax.split(both, (n, n), axis=1)
    return (first, second) if problem.gate_first else (second, first)


def gemm(
    problem: Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """The plain grouped GEMM ``[m, k] · [groups, k, n]``; rows of no group are zero.

    Off TPU, `lax.ragged_dot` multiplies rows of other groups by zeros and adds them, as XLA does
    not know groups there; it leaves no row unwritten.
    """
    mine = group_sizes
    if group_offset is not None or group_sizes.shape[0] != rhs.shape[0]:
        bounds = boundaries(group_sizes, group_offset, rhs.shape[0], lhs.shape[0])
        first, mine = bounds[1], bounds[2:-1] - bounds[1:-2]
        # Rows before the first group go where ragged_dot has none: behind the last.
        lhs = jnp.roll(lhs, -first, axis=0)
    out = lax.ragged_dot_general(
        lhs, rhs, mine, _DOTS[problem.transpose_rhs],
        precision=problem.precision, preferred_element_type=dtype,
    )  # fmt: skip
    return out if mine is group_sizes else jnp.roll(out, first, axis=0)


def boundaries(
    group_sizes: jax.Array, group_offset: jax.Array | None, groups: int, m: int
) -> jax.Array:
    """Where segments of rows begin: those before the groups, each group, those after; and ``m``.

    Args:
      group_sizes: int ``[all groups]``, of consecutive rows.
      group_offset: int ``[]``, the first of the groups whose weights are here; None for 0.
      groups: how many these are.
      m: rows.

    Returns:
      int32 ``[groups + 3]``, rising from 0 to ``m``.
    """
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = lax.concatenate([jnp.zeros_like(ends[:1]), ends], 0)
    # Groups beyond the last are empty.
    starts = lax.concatenate([starts, jnp.broadcast_to(ends[-1], (groups,))], 0)
    at = 0 if group_offset is None else group_offset.astype(jnp.int32)
    mine = jnp.minimum(lax.dynamic_slice_in_dim(starts, at, groups + 1), m)
    return lax.concatenate([jnp.zeros_like(mine[:1]), mine, jnp.full_like(mine[:1], m)], 0)


def grouped_swiglu(
    problem: Problem,
    lhs: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """``(out,)``, or ``(out, gate, up)`` where asked for."""
    bounds = boundaries(group_sizes, group_offset, weights[0].shape[0], lhs.shape[0])
    row = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0)
    mine = (row >= bounds[1]) & (row < bounds[-2])
    # Said here and not left to the GEMM, which writes zeros to other rows only off TPU. It also
    # keeps the pass that substitutes this function from finding its pattern in it again.
    outs = [
        jnp.where(mine, gemm(problem, lhs, w, group_sizes, group_offset, jnp.float32), 0)
        for w in weights
    ]
    gate, up = halves(problem, outs[0]) if problem.fused else outs
    out = activation(problem, gate, up)
    if not problem.with_gemm:
        return (out,)
    return out, gate.astype(problem.gemm_dtype), up.astype(problem.gemm_dtype)
