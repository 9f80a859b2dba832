"""Programs around Pallas TPU kernels, as cases to lower and to compare.

Two kernels from the jax wheel, each forward and with its gradients, each with another tile size;
and a pair of kernels of one operation, which differ in that operation alone. All are for a TPU:
none runs on a CPU outside Pallas' interpret mode.

Cases for the command line (`relower diff examples/kernels.py:gmm examples/kernels.py:gmm_wide`),
each a function that takes nothing:

    gmm, gmm_wide                                       megablox grouped matrix multiplication
    gmm_grad, gmm_grad_wide                             the same with its gradients
    flash_attention, flash_attention_wide               causal flash attention
    flash_attention_grad, flash_attention_grad_wide     the same with its gradients
    add, mul                                            one elementwise kernel
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import megablox

ROWS, IN, OUT, EXPERTS = 4096, 1024, 2048, 16
HEADS, SEQUENCE, HEAD_DIM = 8, 1024, 128


def grouped_matmul(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, tiling: tuple[int, int, int]
) -> jax.Array:
    """bf16[ROWS, OUT]: consecutive groups of rows, each times its expert's matrix."""
    return megablox.gmm(rows, weights, sizes, jnp.bfloat16, tiling)


def grouped_matmul_grad(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, tiling: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the mean square of `grouped_matmul` for rows and weights."""

    def loss(rows: jax.Array, weights: jax.Array) -> jax.Array:
        y = grouped_matmul(rows, weights, sizes, tiling=tiling)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))(rows, weights)


def block_sizes(block: int) -> flash.BlockSizes:
    """Flash attention's tiles, all of ``block``; its backward wants each stated."""
    return flash.BlockSizes(
        block_q=block,
        block_k_major=block,
        block_k=block,
        block_b=1,
        block_q_major_dkv=block,
        block_k_major_dkv=block,
        block_k_dkv=block,
        block_q_dkv=block,
        block_k_major_dq=block,
        block_k_dq=block,
        block_q_dq=block,
    )


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """bf16[1, HEADS, SEQUENCE, HEAD_DIM]: causal attention."""
    return flash.flash_attention(
        q, k, v, causal=True, sm_scale=HEAD_DIM**-0.5, block_sizes=block_sizes(block)
    )


def attention_grad(
    q: jax.Array, k: jax.Array, v: jax.Array, *, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the mean square of `attention` for q, k and v."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(attention(q, k, v, block=block).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def add_kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    """``out = x + y``."""
    out_ref[...] = x_ref[...] + y_ref[...]


def mul_kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    """``out = x * y``."""
    out_ref[...] = x_ref[...] * y_ref[...]


def elementwise(x: jax.Array, y: jax.Array, *, kernel: Callable[..., None]) -> jax.Array:
    """f32[64, 256]: one kernel over blocks of 8 rows."""
    block = pl.BlockSpec((8, 256), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[block, block],
        out_specs=block,
        name="elementwise",
    )(x, y)


# Cases for relower


def _case(fn: Callable[..., Any], *args: Any, kernels: int, **options: Any) -> Any:
    from relower.lowering.case import case

    bound = partial(fn, **options)
    bound.__name__ = fn.__name__  # type: ignore[attr-defined]
    return case(jax.jit(bound), *args, expect={"kernels": kernels})


def _gmm_case(fn: Callable[..., Any], tiling: tuple[int, int, int], kernels: int) -> Any:
    rows = jax.ShapeDtypeStruct((ROWS, IN), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((EXPERTS, IN, OUT), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    return _case(fn, rows, weights, sizes, kernels=kernels, tiling=tiling)


def _attention_case(fn: Callable[..., Any], block: int, kernels: int) -> Any:
    x = jax.ShapeDtypeStruct((1, HEADS, SEQUENCE, HEAD_DIM), jnp.bfloat16)
    return _case(fn, x, x, x, kernels=kernels, block=block)


def _elementwise_case(kernel: Callable[..., None]) -> Any:
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return _case(elementwise, x, x, kernels=1, kernel=kernel)


def gmm() -> Any:
    return _gmm_case(grouped_matmul, (128, 128, 128), kernels=1)


def gmm_wide() -> Any:
    return _gmm_case(grouped_matmul, (512, 512, 512), kernels=1)


def gmm_grad() -> Any:
    return _gmm_case(grouped_matmul_grad, (128, 128, 128), kernels=3)


def gmm_grad_wide() -> Any:
    return _gmm_case(grouped_matmul_grad, (512, 512, 512), kernels=3)


def flash_attention() -> Any:
    return _attention_case(attention, 128, kernels=1)


def flash_attention_wide() -> Any:
    return _attention_case(attention, 256, kernels=1)


def flash_attention_grad() -> Any:
    return _attention_case(attention_grad, 128, kernels=3)


def flash_attention_grad_wide() -> Any:
    return _attention_case(attention_grad, 256, kernels=3)


def add() -> Any:
    return _elementwise_case(add_kernel)


def mul() -> Any:
    return _elementwise_case(mul_kernel)
