"""A trainer that accumulates gradients over micro-batches, with its routers frozen.

A decoder of gated experts is fine-tuned while the routers stay as they are. It is written as such
trainers are: one jitted function runs forward and backward over the micro-batches and returns the
summed gradients, another takes them to AdamW, behind a clip of the trainable leaves' global norm
and a mask that freezes the routers. Nothing here knows that relower exists. jax can't know in the
first function what the second will throw away: the routers' gradients are multiplied out, reduced
over the mesh and summed up in every micro-batch.

Run it:

    python examples/frozen_router.py                train the tiny model and print the losses
    python examples/frozen_router.py --optimize     the same, the routers declared frozen
    python examples/frozen_router.py --fsdp 8       the same on eight (CPU) devices, sharded
    python examples/frozen_router.py --real         trace and lower the real size; allocate nothing

Cases for the command line (`relower explain examples/frozen_router.py:tiny --frozen router`):

    tiny, real              forward and backward: losses and gradients, one device
    fsdp, real_fsdp         the same on eight devices: parameters gathered and gradients scattered
                            in every layer of every micro-batch
    deferred                the same with whole parameters on each device, and gradients summed over
                            the devices once, after the last micro-batch
    step, real_step         forward, backward and update in one function: the mask is in sight
    step_with_norm          the same, with the norm of all gradients among its metrics
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
FROZEN = "router"
AXIS = "fsdp"


@dataclass(frozen=True)
class Config:
    """The sizes of the model and how it trains."""

    vocab: int
    hidden: int
    layers: int
    experts: int
    expert_width: int
    micro_batches: int
    batch: int
    """Sequences in a micro-batch."""
    sequence: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16
    """What activations use; parameters and gradients are kept in float32."""
    deferred: bool = False
    """On a mesh, whether parameters lie whole on each device and gradients are reduced at the end
    only, rather than scattered in every micro-batch."""
    norm_of_all: bool = False
    """Whether a step also returns the norm of all gradients, frozen ones included."""
    learning_rate: float = 1e-3


TINY = Config(
    vocab=48,
    hidden=32,
    layers=2,
    experts=8,
    expert_width=16,
    micro_batches=4,
    batch=8,
    sequence=16,
    dtype=jnp.float32,
    learning_rate=1e-2,
)
"""Trains on a CPU in seconds."""

REAL = Config(
    vocab=32_768,
    hidden=4096,
    layers=8,
    experts=64,
    expert_width=512,
    micro_batches=8,
    batch=8,
    sequence=2048,
)
"""For tracing and lowering."""


class State(NamedTuple):
    """What is trained."""

    params: Params
    optimizer: optax.OptState


# The model


def init_params(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters; those of the layers are stacked along a leading axis."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / math.sqrt(fan_in)

    c, stack = config, config.layers
    return {
        "embedding": normal(c.vocab, c.hidden, fan_in=1),
        "layers": {
            "mix": {"kernel": normal(stack, c.hidden, c.hidden, fan_in=c.hidden)},
            "router": {"kernel": normal(stack, c.hidden, c.experts, fan_in=c.hidden)},
            "wi": normal(stack, c.hidden, c.experts * c.expert_width, fan_in=c.hidden),
            "wo": normal(stack, c.experts * c.expert_width, c.hidden, fan_in=c.expert_width),
        },
        "unembedding": normal(c.hidden, c.vocab, fan_in=c.hidden),
    }


def gathered(weight: jax.Array, sharded: bool) -> jax.Array:
    """A parameter whole, of which each device holds a part of the rows."""
    return lax.all_gather(weight, AXIS, tiled=True) if sharded else weight


def layer(x: jax.Array, params: Params, config: Config, sharded: bool) -> jax.Array:
    """Mixing with the token before, then experts, each weighed by the router; ``x``: [b, s, d]."""
    whole = partial(gathered, sharded=sharded)
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    x = x + jnp.tanh(before @ whole(params["mix"]["kernel"]).astype(x.dtype))

    logits = x.astype(jnp.float32) @ whole(params["router"]["kernel"])
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    hidden = jax.nn.silu(x @ whole(params["wi"]).astype(x.dtype))
    hidden = hidden * jnp.repeat(weights, config.expert_width, axis=-1)
    return x + hidden @ whole(params["wo"]).astype(x.dtype)


def loss_fn(params: Params, tokens: jax.Array, config: Config, sharded: bool = False) -> jax.Array:
    """The mean cross-entropy of the next token, in nats; ``tokens``: int32[batch, sequence]."""
    x = gathered(params["embedding"], sharded).astype(config.dtype)[tokens]

    @jax.checkpoint
    def body(x: jax.Array, params: Params) -> tuple[jax.Array, None]:
        return layer(x, params, config, sharded), None

    x, _ = lax.scan(body, x, params["layers"])
    logits = x.astype(jnp.float32) @ gathered(params["unembedding"], sharded)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


# Training


def summed(params: Params, batch: jax.Array, config: Config, sharded: bool = False) -> Any:
    """Loss and gradients, means over ``batch``: int32[micro_batches, batch, sequence]."""

    def step(sums: Any, tokens: jax.Array) -> tuple[Any, None]:
        made = jax.value_and_grad(loss_fn)(params, tokens, config, sharded)
        return jax.tree.map(jnp.add, sums, made), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    sums, _ = lax.scan(step, zeros, batch)
    return jax.tree.map(lambda s: s / batch.shape[0], sums)


def param_specs(params: Params, config: Config) -> Params:
    """How each parameter lies on the mesh: its rows in parts, or everywhere."""

    def spec(path: tuple[Any, ...], _: Any) -> P:
        if config.deferred:
            return P()
        return P(None, AXIS) if path[0].key == "layers" else P(AXIS)

    return jax.tree_util.tree_map_with_path(spec, params)


def make_forward_backward(config: Config, mesh: Any = None) -> Callable[[Params, jax.Array], Any]:
    """``(params, batch) -> (loss, grads)``, not yet jitted.

    With a ``mesh`` of one axis, each device takes its part of every micro-batch.
    """
    if mesh is None:
        return lambda params, batch: summed(params, batch, config)
    devices = mesh.shape[AXIS]

    def on_device(params: Params, batch: jax.Array) -> Any:
        loss, grads = summed(params, batch, config, sharded=not config.deferred)
        if config.deferred:
            grads = jax.tree.map(lambda g: lax.psum(g, AXIS), grads)
        # Where parameters are gathered, jax has summed their gradients over the devices.
        return lax.pmean(loss, AXIS), jax.tree.map(lambda g: g / devices, grads)

    def forward_backward(params: Params, batch: jax.Array) -> Any:
        specs = param_specs(params, config)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, P(None, AXIS)),
            out_specs=(P(), specs),
            check_vma=False,  # Sums start from zeros, which are the same everywhere.
        )(params, batch)

    return forward_backward


def is_trained(path: str) -> bool:
    """Whether the parameter of a path is trained."""
    return FROZEN not in path


def make_optimizer(config: Config, params: Params) -> optax.GradientTransformation:
    """AdamW behind a clip of the norm, for what is trained; nothing for the rest."""

    def label(path: tuple[Any, ...], _: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "trained" if is_trained(name) else "frozen"

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


def make_step(config: Config, mesh: Any = None) -> Callable[[State, jax.Array], Any]:
    """Both in one: ``(state, batch) -> (state, metrics)``."""
    forward_backward, update = make_forward_backward(config, mesh), make_update(config)

    def step(state: State, batch: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        loss, grads = forward_backward(state.params, batch)
        metrics = {"loss": loss}
        if config.norm_of_all:
            metrics["norm"] = optax.global_norm(grads)
        return update(state, grads), metrics

    return step


def init_state(key: jax.Array, config: Config) -> State:
    """Random parameters, zero moments."""
    params = init_params(key, config)
    return State(params, make_optimizer(config, params).init(params))


def synthetic_batch(key: jax.Array, config: Config) -> jax.Array:
    """Sequences in which each token is an affine function of the one before."""
    token = jax.random.randint(key, (config.micro_batches, config.batch), 0, config.vocab)
    step = lambda token, _: ((5 * token + 3) % config.vocab, token)
    _, tokens = lax.scan(step, token, length=config.sequence)
    return jnp.moveaxis(tokens, 0, -1)


def train(
    config: Config, forward_backward: Callable[..., Any], steps: int, seed: int = 0
) -> tuple[list[float], State]:
    """Train a fresh model in two jits on synthetic batches; the losses and the last state."""
    key, init = jax.random.split(jax.random.key(seed))
    state = jax.jit(init_state, static_argnums=1)(init, config)
    make_batch = jax.jit(synthetic_batch, static_argnums=1)
    run, update = jax.jit(forward_backward), jax.jit(make_update(config), donate_argnums=0)
    losses = []
    for i in range(steps):
        loss, grads = run(state.params, make_batch(jax.random.fold_in(key, i), config))
        state = update(state, grads)
        losses.append(float(loss))
    return losses, state


# Cases for relower


def abstract_inputs(config: Config) -> tuple[State, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a state and a batch; nothing is allocated."""
    return jax.eval_shape(
        lambda: (init_state(jax.random.key(0), config), synthetic_batch(jax.random.key(0), config))
    )


def forward_backward_case(config: Config, devices: int | None = None) -> Any:
    """Forward and backward as a `relower.case`."""
    from relower.lowering.case import case

    state, batch = abstract_inputs(config)
    if devices is None:
        return case(make_forward_backward(config), state.params, batch)
    return case(
        lambda mesh: (make_forward_backward(config, mesh), (state.params, batch)),
        mesh={AXIS: devices},
    )


def step_case(config: Config) -> Any:
    """The whole step as a `relower.case`."""
    from relower.lowering.case import case

    return case(jax.jit(make_step(config), donate_argnums=0), *abstract_inputs(config))


def tiny() -> Any:
    return forward_backward_case(TINY)


def real() -> Any:
    return forward_backward_case(REAL)


def fsdp() -> Any:
    return forward_backward_case(TINY, 8)


def real_fsdp() -> Any:
    return forward_backward_case(REAL, 8)


def deferred() -> Any:
    return forward_backward_case(replace(TINY, deferred=True), 8)


def step() -> Any:
    return step_case(TINY)


def real_step() -> Any:
    return step_case(REAL)


def step_with_norm() -> Any:
    return step_case(replace(TINY, norm_of_all=True))


# The command


def describe(config: Config) -> None:
    """Trace and lower forward and backward from shapes alone; print their size."""
    state, batch = abstract_inputs(config)
    run = jax.jit(make_forward_backward(config))
    lowered = run.trace(state.params, batch).lower(lowering_platforms=("tpu",))
    print(f"parameters  {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,}")
    print(f"StableHLO   {len(lowered.as_text().splitlines()):,} lines")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="train steps (default: 40)")
    parser.add_argument("--optimize", action="store_true", help="declare the routers frozen")
    parser.add_argument("--fsdp", type=int, metavar="N", help="train on N devices")
    parser.add_argument("--real", action="store_true", help="trace and lower the real size only")
    options = parser.parse_args()
    if options.real:
        describe(REAL)
        return
    mesh = None
    if options.fsdp:
        devices = f"--xla_force_host_platform_device_count={options.fsdp}"
        os.environ.setdefault("XLA_FLAGS", devices)  # read when the first device is asked for
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((options.fsdp,), (AXIS,), axis_types=auto)
    forward_backward = make_forward_backward(TINY, mesh)
    if options.optimize:
        import relower

        frozen = relower.Frozen(FROZEN, grads=lambda out: out[1])
        forward_backward = relower.optimize(forward_backward, frozen=frozen)
    losses, _ = train(TINY, forward_backward, options.steps)
    for i, loss in enumerate(losses):
        if i % 10 == 0 or i == len(losses) - 1:
            print(f"step {i:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
