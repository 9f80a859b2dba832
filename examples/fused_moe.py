"""A mixture of experts with fused, quantised weights that are gathered over an fsdp mesh axis.

A small language model: embedding, rematerialised expert layers under `jax.lax.scan`, cross-entropy
over the next token, AdamW; the whole step under `jax.shard_map` on a mesh with one axis "fsdp". It
is written as a model author writes it, and nothing in it knows that relower exists. The experts'
input weights are kept fused, ``[gate | up]`` side by side. Each half is rounded to float8 (e4m3)
with a scale for each of its columns, the gradient passing straight through, is held behind an
optimization barrier so that no compiler moves the rounding past the gather, and is gathered from
all devices; joined again, the two make one grouped matrix multiplication. The rows that come out of
the experts are weighted and added to their tokens, chunk by chunk.

Run it (on a CPU host it makes eight devices):

    python examples/fused_moe.py                   train the tiny model and print the losses
    python examples/fused_moe.py --optimize        the same with `relower.optimize` around the step
    python examples/fused_moe.py --real            trace and lower the real size; allocate nothing

Cases for the command line, each a function that takes nothing:

    tiny         the whole train step over eight devices
    tiny_grad    the loss and its gradients
    tiny_drops   the gradients where each chunk's buffer holds half of its rows
    real         the whole train step at the real size
    real_grad    the loss and its gradients at the real size
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
AXIS = "fsdp"
DEVICES = 8
FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)


@dataclass(frozen=True)
class Config:
    """The sizes of the model, its dtypes and how it trains."""

    vocab: int
    hidden: int
    layers: int
    experts: int
    experts_per_token: int
    width: int
    """Of an expert; its fused input weight has twice as many columns."""
    batch: int
    sequence: int
    chunks: int = 2
    """In how many parts a device's tokens go through a layer's experts."""
    buffer: int | None = None
    """How many rows of a chunk are computed; those of the last experts that don't fit are dropped.
    If None, all."""
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """What activations and matrix multiplications use; parameters are kept in float32."""
    learning_rate: float = 3e-4


TINY = Config(
    vocab=61,
    hidden=64,
    layers=2,
    experts=4,
    experts_per_token=2,
    width=32,
    batch=8,
    sequence=32,
    dtype=jnp.float32,
    learning_rate=3e-3,
)
"""Trains on a CPU in seconds."""

REAL = Config(
    vocab=151_936,
    hidden=4096,
    layers=4,
    experts=64,
    experts_per_token=8,
    width=1024,
    batch=8,
    sequence=4096,
)
"""4,096 tokens a device through layers of a frontier model's size; for tracing and lowering."""


class State(NamedTuple):
    """What a train step takes and returns."""

    step: jax.Array
    params: Params
    optimizer: optax.OptState


# The model


def init_params(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters; those of the layers are stacked along a leading axis."""
    keys = iter(jax.random.split(key, 5))
    c = config

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / math.sqrt(fan_in)

    return {
        "embedding": normal(c.vocab, c.hidden, fan_in=1),
        "layers": {
            "norm": jnp.ones((c.layers, c.hidden)),
            "router": normal(c.layers, c.hidden, c.experts, fan_in=c.hidden),
            "wi": normal(c.layers, c.experts, c.hidden, 2 * c.width, fan_in=c.hidden),
            "wo": normal(c.layers, c.experts, c.width, c.hidden, fan_in=c.width),
        },
        "unembedding": normal(c.hidden, c.vocab, fan_in=c.hidden),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / rms(x) * scale`` over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


@jax.custom_vjp
def fake_quantise(w: jax.Array) -> jax.Array:
    """``w``, ``[experts, in, out]``, as float8 holds it with a scale for each column.

    The rows, ``in``, are spread over the devices, so that a column's largest is that of all.
    """
    largest = lax.pmax(jnp.max(jnp.abs(w), axis=1, keepdims=True), AXIS)
    scale = jnp.where(largest == 0, 1, largest / LARGEST)
    return (w / scale).astype(FLOAT8).astype(w.dtype) * scale


# Rounding has a gradient of zero almost everywhere; it is taken as the identity.
fake_quantise.defvjp(lambda w: (fake_quantise(w), None), lambda _, g: (g,))


def gathered(w: jax.Array) -> jax.Array:
    """A quantised weight, whole, from its rows on each device."""
    return lax.all_gather(lax.optimization_barrier(fake_quantise(w)), AXIS, axis=1, tiled=True)


def route(router: jax.Array, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Weights and ids, ``[tokens, experts_per_token]``, of each token's experts."""
    probabilities = jax.nn.softmax(x.astype(jnp.float32) @ router, axis=-1)
    weights, ids = lax.top_k(probabilities, config.experts_per_token)
    return (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype), ids


def experts(
    wi: jax.Array, wo: jax.Array, x: jax.Array, weights: jax.Array, ids: jax.Array, config: Config
) -> jax.Array:
    """What the experts add to the tokens ``x``, ``[tokens, hidden]``."""
    order = jnp.argsort(ids.reshape(-1))[: config.buffer]
    sizes = jnp.bincount(ids.reshape(-1), length=config.experts)
    if config.buffer is not None:
        sizes = jnp.diff(jnp.minimum(jnp.cumsum(sizes), config.buffer), prepend=0)
    token = order // config.experts_per_token
    gate, up = jnp.split(lax.ragged_dot(x[token], wi, sizes), 2, axis=-1)
    rows = lax.ragged_dot(jax.nn.silu(gate) * up, wo, sizes)
    rows = rows * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token].add(rows)


def mixture_of_experts(params: Params, x: jax.Array, config: Config) -> jax.Array:
    """The routed experts' weighted sum for each token of ``x``: [tokens, hidden]."""
    wi, width = params["wi"].astype(x.dtype), config.width
    gate, up = gathered(wi[..., :width]), gathered(wi[..., width:])
    wi = jnp.concatenate([gate, up], axis=-1)
    wo = lax.all_gather(params["wo"].astype(x.dtype), AXIS, axis=2, tiled=True)
    weights, ids = route(params["router"], x, config)
    chunks = zip(*(jnp.split(a, config.chunks) for a in (x, weights, ids)), strict=True)
    return jnp.concatenate([experts(wi, wo, *chunk, config) for chunk in chunks])


def forward(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Float32 logits of the next token: [tokens, vocab]."""

    @jax.checkpoint
    def layer(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        return x + mixture_of_experts(params, rms_norm(x, params["norm"]), config), None

    x = params["embedding"].astype(config.dtype)[tokens]
    x, _ = lax.scan(layer, x, params["layers"])
    return (x @ params["unembedding"].astype(x.dtype)).astype(jnp.float32)


def loss_fn(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """The mean cross-entropy of the next token, in nats, on this device's ``[batch, sequence]``."""
    logits = forward(params, tokens[:, :-1].reshape(-1), config)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].reshape(-1))
    return losses.mean()


# Training


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate))


def init_state(key: jax.Array, config: Config) -> State:
    """A fresh state: step 0, random parameters, zero moments."""
    params = init_params(key, config)
    return State(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def param_specs(params: Params) -> Params:
    """How each parameter lies on the mesh: experts by rows or columns, all else everywhere."""
    sharded = {"wi": P(None, None, AXIS), "wo": P(None, None, None, AXIS)}

    def spec(path: tuple[Any, ...], _: Any) -> P:
        return sharded.get(path[-1].key, P())

    return jax.tree_util.tree_map_with_path(spec, params)


def make_gradient(
    config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """``(params, tokens) -> (loss, gradients)``, each device on its part of the batch."""

    def on_device(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, config)

        def mean(spec: P, grad: jax.Array) -> jax.Array:
            # The gradient of a gathered weight is the sum over all devices already.
            return grad / mesh.shape[AXIS] if AXIS in spec else lax.pmean(grad, AXIS)

        return lax.pmean(loss, AXIS), jax.tree.map(mean, param_specs(grads), grads)

    def gradient(params: Params, tokens: jax.Array) -> tuple[jax.Array, Params]:
        specs = param_specs(params)
        parts = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, P(AXIS)),
                              out_specs=(P(), specs), check_vma=False)  # fmt: skip
        return parts(params, tokens)

    return gradient


def make_step(
    config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """The train step, not yet jitted: ``(state, tokens) -> (state, loss)``."""
    gradient = make_gradient(config, mesh)

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = gradient(state.params, tokens)
        updates, optimizer = make_optimizer(config).update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, optimizer), loss

    return step


def synthetic_tokens(key: jax.Array, config: Config) -> jax.Array:
    """``[batch, sequence]`` in which each token is an affine function of the one before."""
    token = jax.random.randint(key, (config.batch,), 0, config.vocab)

    def following(token: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return (5 * token + 3) % config.vocab, token

    return lax.scan(following, token, length=config.sequence + 1)[1].T


def abstract_inputs(config: Config) -> tuple[State, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a state and its tokens; nothing is allocated."""
    key = jax.random.key(0)
    return jax.eval_shape(lambda: (init_state(key, config), synthetic_tokens(key, config)))


def train(config: Config, step: Callable[..., Any], steps: int, seed: int = 0) -> list[float]:
    """Train a fresh model with a jitted ``step``; the losses, one a step."""
    key, init = jax.random.split(jax.random.key(seed))
    state = jax.jit(init_state, static_argnums=1)(init, config)
    losses = []
    for i in range(steps):
        state, loss = step(state, synthetic_tokens(jax.random.fold_in(key, i), config))
        losses.append(float(loss))
    return losses


# Cases for relower


def step_case(config: Config) -> Any:
    """The train step as a `relower.case`."""
    from relower.lowering.case import case

    return case(lambda mesh: (make_step(config, mesh), abstract_inputs(config)),
                mesh={AXIS: DEVICES})  # fmt: skip


def grad_case(config: Config) -> Any:
    """The loss and its gradients as a `relower.case`."""
    from relower.lowering.case import case

    state, tokens = abstract_inputs(config)
    return case(lambda mesh: (make_gradient(config, mesh), (state.params, tokens)),
                mesh={AXIS: DEVICES})  # fmt: skip


def tiny() -> Any:
    return step_case(TINY)


def tiny_grad() -> Any:
    return grad_case(TINY)


def tiny_drops() -> Any:
    return grad_case(replace(TINY, buffer=16))


def real() -> Any:
    return step_case(REAL)


def real_grad() -> Any:
    return grad_case(REAL)


# The command


def describe(config: Config) -> None:
    """Trace and lower a train step from shapes alone; print its size."""
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((DEVICES,), (AXIS,), axis_types=kinds)
    state, tokens = abstract_inputs(config)
    lowered = jax.jit(make_step(config, mesh)).trace(state, tokens).lower(
        lowering_platforms=("tpu",)
    )  # fmt: skip
    print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}")
    print(f"StableHLO   {len(lowered.as_text().splitlines()):,} lines")


def main(config: Config = TINY, real: Config = REAL) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="train steps (default: 60)")
    parser.add_argument("--optimize", action="store_true", help="wrap relower.optimize round it")
    parser.add_argument("--real", action="store_true", help="trace and lower the real size only")
    options = parser.parse_args()
    if options.real:
        describe(real)
        return

    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    step = make_step(config, mesh)
    if options.optimize:
        import relower

        step = relower.optimize(step, contract="rounding")
    losses = train(config, jax.jit(step, donate_argnums=0), options.steps)
    for i, loss in enumerate(losses):
        if i % 10 == 0 or i == len(losses) - 1:
            print(f"step {i:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
