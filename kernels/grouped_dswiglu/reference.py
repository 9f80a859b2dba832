"""The backward of a grouped SwiGLU in plain jnp: what the kernel must compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..grouped_swiglu.reference import boundaries, gemm
from .problem import Problem


def dswiglu(dh: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate and up of ``silu(gate) * up``, as jax's own rules compute them."""
    sigmoid = lax.logistic(gate)
    slope = sigmoid * (1 - sigmoid)
    of_silu = dh * up
    return of_silu * sigmoid + gate * of_silu * slope, gate * sigmoid * dh


def parts_of(problem: Problem, saved: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Gate and up, ``[m, n]`` each, of what the forward left."""
    if not problem.together:
        gate, up = saved
        return gate, up
    (both,) = saved
    n = both.shape[1] // 2
    first, second = lax.split(both, (n, n), axis=1)
    return (first, second) if problem.gate_first else (second, first)


def laid_out(problem: Problem, d_gate: jax.Array, d_up: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients as the result has them."""
    if not problem.out_together:
        return d_gate, d_up
    return (lax.concatenate([d_gate, d_up] if problem.gate_first else [d_up, d_gate], 1),)


def grouped_dswiglu(
    problem: Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    saved: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """``(both,)`` ``[m, 2 · n]``, or ``(d_gate, d_up)``."""
    bounds = boundaries(group_sizes, group_offset, rhs.shape[0], lhs.shape[0])
    row = lax.broadcasted_iota(jnp.int32, (lhs.shape[0], 1), 0)
    mine = (row >= bounds[1]) & (row < bounds[-2])
    gate, up = (p.astype(jnp.float32) for p in parts_of(problem, saved))
    # Selected here too: what lies between keeps the pass that substitutes this function from
    # finding its pattern in it again.
    dh = jnp.where(mine, multiplied(problem, lhs, rhs, group_sizes, group_offset, jnp.float32), 0)
    parts = (jnp.where(mine, d, 0).astype(problem.out_dtype) for d in dswiglu(dh, gate, up))
    return laid_out(problem, *parts)


def multiplied(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, offset: Any, dtype: Any
) -> jax.Array:
    """The grouped GEMM alone."""
    return gemm(problem.gemm(dtype), lhs, rhs, sizes, offset, dtype)
