"""Unrelated programs, traced and lowered before the one of interest.

What jax counts and caches while it traces must not reach a program: the numbers of channels,
collectives and names, cached traces of its own functions, and modules that are imported late.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from ..lowering.case import Case, case
from ..lowering.lower import lower


def trace_unrelated(**where: Any) -> None:
    """Lowers small programs with loops, kernels, collectives, random numbers and sorts."""
    for unrelated in (_plain(), _kernel(), _sharded()):
        lower(unrelated, levels=("exact",), **where)


def _plain() -> Case:
    def step(x: Any, key: Any) -> Any:
        def loss(x: Any) -> Any:
            def body(carry: Any, row: Any) -> Any:
                picked = jax.lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row)
                return carry + jnp.where(picked > 0, picked, 0.5), jnp.argsort(row)

            carry, order = jax.lax.scan(jax.checkpoint(body), x[0], x)
            return (carry * jax.random.normal(key, carry.shape)).sum() + order.sum()

        return jax.nn.softmax(jax.grad(loss)(x)), jnp.einsum("ij,kj->ik", x, x)

    return case(step, _struct((4, 128)), jax.eval_shape(lambda: jax.random.key(0)))


def _kernel() -> Case:
    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...]) * 3

    def step(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape)(pl.pallas_call(kernel, out_shape=shape)(x))

    return case(step, _struct((8, 128)))


def _sharded() -> Case:
    def build(mesh: Any) -> Any:
        spec = PartitionSpec("unrelated")

        def inner(x: Any) -> Any:
            total = jax.lax.psum(x, "unrelated")
            return jax.lax.ppermute(total, "unrelated", [(0, 1), (1, 0)]) + jax.lax.all_gather(
                x, "unrelated"
            ).sum(0)

        step = jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return step, (_struct((4, 128)),)

    return case(build, mesh={"unrelated": 2})


def _struct(shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
