"""Forward and backward that differentiate what is trained, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..config import MESH, Config
from ..model import Batch, loss_fn, param_specs
from ..parts import Params
from ..trainer import BATCH, FROZEN

KINDS = ("attention", "delta")


def split(params: Params) -> tuple[Params, Params]:
    """What is trained, and the routers."""
    trained = dict(params) | {
        kind: {n: p for n, p in params[kind].items() if n != FROZEN} for kind in KINDS
    }
    return trained, {kind: {FROZEN: params[kind][FROZEN]} for kind in KINDS}


def joined(trained: Params, frozen: Params) -> Params:
    """The parameters again."""
    return dict(trained) | {kind: trained[kind] | frozen[kind] for kind in KINDS}


def make_forward_backward(config: Config, mesh: Any) -> Callable[[Params, Batch], Any]:
    """As `trainer.make_forward_backward`; the routers' gradients are zeros."""

    def on_device(params: Params, batch: Batch) -> Any:
        trained, frozen = split(params)

        def loss_of(trained: Params, batch: Batch) -> jax.Array:
            return loss_fn(joined(trained, frozen), batch, config)

        def add(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            made = jax.value_and_grad(loss_of)(trained, micro_batch)
            return jax.tree.map(jnp.add, sums, made), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained)
        (loss, grads), _ = lax.scan(add, zeros, batch)

        def reduced(spec: P, grad: jax.Array) -> jax.Array:
            return lax.psum(grad, tuple(axis for axis in MESH if axis not in spec))

        grads = jax.tree.map(reduced, param_specs(grads), grads)
        loss = lax.psum(loss, tuple(MESH))
        loss, grads = jax.tree.map(lambda a: a / config.micro_batches, (loss, grads))
        return loss, joined(grads, jax.tree.map(jnp.zeros_like, frozen))

    def forward_backward(params: Params, batch: Batch) -> Any:
        specs = param_specs(params)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, BATCH),
            out_specs=(P(), specs),
            check_vma=False,
        )(params, batch)

    return forward_backward
