"""The trainer, in two jitted functions: forward and backward, and the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .config import MESH, Config
from .model import Batch, init_params, loss_fn, param_specs
from .parts import Params

FROZEN = "router"
BATCH = P(None, ("fsdp", "expert"), "context")
"""How ``[micro_batches, batch, sequence]`` lies on the mesh."""


class State(NamedTuple):
    """What is trained."""

    params: Params
    optimizer: optax.OptState


def make_mesh() -> jax.sharding.Mesh:
    """A mesh of eight devices."""
    kinds = (jax.sharding.AxisType.Auto,) * len(MESH)
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=kinds)


def make_forward_backward(config: Config, mesh: Any) -> Callable[[Params, Batch], Any]:
    """``(params, batch) -> (loss, grads)``, not yet jitted: means over all micro-batches."""

    def on_device(params: Params, batch: Batch) -> Any:
        def add(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            made = jax.value_and_grad(loss_fn)(params, micro_batch, config)
            return jax.tree.map(jnp.add, sums, made), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = lax.scan(add, zeros, batch)

        def reduced(spec: P, grad: jax.Array) -> jax.Array:
            # Where a parameter is gathered, jax has summed its gradient along the axis.
            return lax.psum(grad, tuple(axis for axis in MESH if axis not in spec))

        grads = jax.tree.map(reduced, param_specs(params), grads)
        loss = lax.psum(loss, tuple(MESH))
        return jax.tree.map(lambda a: a / config.micro_batches, (loss, grads))

    def forward_backward(params: Params, batch: Batch) -> Any:
        specs = param_specs(params)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, BATCH),
            out_specs=(P(), specs),
            check_vma=False,  # Sums start from zeros, which are the same everywhere.
        )(params, batch)

    return forward_backward


def make_optimizer(config: Config, params: Params) -> optax.GradientTransformation:
    """AdamW behind a clip of the norm, for what is trained; nothing for the routers."""

    def label(path: tuple[Any, ...], _: Any) -> str:
        return "frozen" if path[-1].key == FROZEN else "trained"

    trained = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate))
    labels = jax.tree_util.tree_map_with_path(label, params)
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)


def make_update(config: Config) -> Callable[[State, Params], State]:
    """``(state, grads) -> state``, not yet jitted."""

    def update(state: State, grads: Params) -> State:
        optimizer = make_optimizer(config, state.params)
        updates, after = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), after)

    return update


def init_state(key: jax.Array, config: Config) -> State:
    """Random parameters, zero moments."""
    params = init_params(key, config)
    return State(params, make_optimizer(config, params).init(params))


def synthetic_batch(key: jax.Array, config: Config) -> Batch:
    """Sequences of random lengths in which each token is an affine function of the one before."""
    first, lengths = jax.random.split(key)
    shape = config.micro_batches, config.batch
    token = jax.random.randint(first, shape, 0, config.vocab)
    step = lambda token, _: ((5 * token + 3) % config.vocab, token)
    _, tokens = lax.scan(step, token, length=config.sequence + 1)
    tokens = jnp.moveaxis(tokens, 0, -1)
    length = jax.random.randint(lengths, shape, config.sequence // 2, config.sequence + 1)
    mask = jnp.arange(config.sequence) < length[..., None]
    return {"tokens": tokens[..., :-1], "targets": tokens[..., 1:], "mask": mask}


def shardings(tree: Any, mesh: Any) -> Any:
    """How parameters, or a whole state, lie on the mesh: moments as their parameters."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(tree))


def train(
    config: Config, forward_backward: Callable[..., Any], mesh: Any, steps: int, seed: int = 0
) -> tuple[list[float], State]:
    """Train a fresh model in two jits on synthetic batches; the losses and the last state."""
    key, init = jax.random.split(jax.random.key(seed))
    state = jax.jit(init_state, static_argnums=1)(init, config)
    state = jax.device_put(state, shardings(state, mesh))
    make_batch = jax.jit(synthetic_batch, static_argnums=1)
    run = jax.jit(forward_backward)
    update = jax.jit(make_update(config), donate_argnums=0, out_shardings=shardings(state, mesh))
    losses = []
    for i in range(steps):
        loss, grads = run(state.params, make_batch(jax.random.fold_in(key, i), config))
        state = update(state, grads)
        losses.append(float(loss))
    return losses, state
