"""What the grouped SwiGLU kernel costs on TPU7x by libtpu's estimate, with and without its outputs.

    python benchmarks/grouped_swiglu_cycles.py

The kernel's grid is dynamic, of as many visits as group sizes make, and libtpu doesn't know that
number: here it is fixed to that of equal groups. A `lax.ragged_dot` has no figure, as the analysis
aborts on it, so nothing here compares the two.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import relower
from relower.kernels.grouped_swiglu import tpu
from relower.kernels.grouped_swiglu.problem import Extents, Problem, choose_tiling

SIZES = ((8192, 4096, 1024, 64), (65536, 4096, 1024, 16))
"""Rows, contracted, columns of each half, groups."""


def activation(both: jax.Array) -> jax.Array:
    """What the kernel takes in: SwiGLU of a GEMM's result."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def kernel(problem: Problem, count: int) -> Callable[..., Any]:
    """The kernel with a number of visits that is known."""

    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        dynamic = tpu.visits
        try:
            tpu.visits = lambda *a: (*dynamic(*a)[:2], count)
            return tpu.grouped_swiglu(problem, x, (w,), sizes, None)
        finally:
            tpu.visits = dynamic

    return run


def original(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """What the pass gmm_swiglu rewrites."""
    return activation(lax.ragged_dot(x, w, sizes))


def main() -> None:
    """Print a line for each size."""
    struct, bf16 = jax.ShapeDtypeStruct, jnp.dtype(jnp.bfloat16)
    for m, k, n, groups in SIZES:
        args = (struct((m, k), bf16), struct((groups, k, 2 * n), bf16),
                struct((groups,), jnp.int32))  # fmt: skip
        print(f"{m} rows, {k} contracted, 2 · {n} columns, {groups} groups, bfloat16")
        done = relower.cost(activation, struct((m, 2 * n), bf16))
        print(f"  activation alone: {done.total().cycles:,.0f} cycles ({done.rung})")
        whole = relower.cost(original, *args)
        print(f"  original: {whole.memory.temp:,} bytes of temporaries ({whole.rung})")
        for with_gemm in (False, True):
            problem = Problem(bf16, bf16, with_gemm=with_gemm)
            tiling = choose_tiling(problem, Extents(m, k, n, groups), 2)
            cost = relower.cost(kernel(problem, m // tiling.m), *args)
            (op,) = [op for op in cost.ops if op.custom_call]
            what = "with gate and up" if with_gemm else "kernel"
            print(f"  {what}: {op.estimate:,} cycles ({cost.rung}), {cost.memory.temp:,} bytes, "
                  f"{tiling}")  # fmt: skip


if __name__ == "__main__":
    main()
