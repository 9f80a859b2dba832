"""Train steps of the other examples that also return what the numerics gate reads.

Each step goes over micro-batches, sums their gradients and takes a step of plain gradient descent;
beside the new parameters it returns every gradient, and the figures that people watch: tokens kept,
loss, mean log-probability, that of the last micro-batch, entropy. relower.toml compares the steps
with their optimized forms.

Cases for the command line, each a function that takes nothing:

    routed           `routed_moe`, on one device
    routed_sharded   the same over eight devices, experts and tokens in parts
    fused            `fused_moe`, over eight devices
    frozen           `frozen_router`: its own step, the routers' gradients masked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import frozen_router
import fused_moe
import jax
import jax.numpy as jnp
import routed_moe
from jax import lax
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
Logits = Callable[[Params, jax.Array], jax.Array]
MICRO_BATCHES = 2
LEARNING_RATE = 0.1

ROUTED = replace(
    routed_moe.TINY, layers=1, hidden=32, head_dim=16, expert_width=32, batch=8, sequence=16
)
FUSED = replace(fused_moe.TINY, layers=1)
FROZEN = frozen_router.TINY


def loss_and_figures(
    params: Params, tokens: jax.Array, logits: Logits
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean cross-entropy of the next token, ``tokens``: int32[batch, sequence], and figures."""
    log_probs = jax.nn.log_softmax(logits(params, tokens)[:, :-1])
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    figures = {"mean_log_prob": chosen.mean(), "entropy": entropy.mean()}
    return -chosen.mean(), figures


def accumulated(params: Params, batch: jax.Array, logits: Logits) -> dict[str, Any]:
    """Means over ``batch``, int32[micro_batches, batch, sequence]: gradients and figures."""
    both = jax.value_and_grad(loss_and_figures, has_aux=True)

    def step(grads: Params, tokens: jax.Array) -> tuple[Params, Any]:
        (loss, figures), more = both(params, tokens, logits)
        return jax.tree.map(jnp.add, grads, more), {"loss": loss, **figures}

    grads, each = lax.scan(step, jax.tree.map(jnp.zeros_like, params), batch)
    return {
        "grads": jax.tree.map(lambda g: g / batch.shape[0], grads),
        "last_log_prob": each["mean_log_prob"][-1],
        **{name: values.mean() for name, values in each.items()},
    }


def make_step(
    logits: Logits, reduce: Callable[[dict[str, Any]], dict[str, Any]] = lambda x: x
) -> Callable[[Params, jax.Array], tuple[Params, dict[str, Any]]]:
    """``(params, batch) -> (params, figures and gradients)``, not yet jitted."""

    def step(params: Params, batch: jax.Array) -> tuple[Params, dict[str, Any]]:
        made = reduce(accumulated(params, batch, logits))
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, made["grads"])
        return params, made

    return step


def sharded(
    logits: Logits, specs: Callable[[Params], Params], mesh: Any
) -> Callable[[Params, jax.Array], tuple[Params, dict[str, Any]]]:
    """The step with each device on its part of every micro-batch, and of some parameters."""

    def reduce(made: dict[str, Any]) -> dict[str, Any]:
        def mean(spec: P, grad: jax.Array) -> jax.Array:
            own = [name for name in spec if name is not None]
            others = [name for name in mesh.axis_names if name not in own]
            parts = 1
            for name in own:
                parts *= mesh.shape[name]
            # The gradient of a parameter in parts is the sum over the devices that share it.
            return lax.pmean(grad / parts, others) if others else grad / parts

        grads = made.pop("grads")
        return {
            "grads": jax.tree.map(mean, specs(grads), grads),
            **{name: lax.pmean(value, mesh.axis_names) for name, value in made.items()},
        }

    def step(params: Params, batch: jax.Array) -> tuple[Params, dict[str, Any]]:
        lies = specs(params)
        names = ("last_log_prob", "loss", "mean_log_prob", "entropy")
        return jax.shard_map(
            make_step(logits, reduce), mesh=mesh, in_specs=(lies, P(None, mesh.axis_names)),
            out_specs=(lies, {"grads": lies, **dict.fromkeys(names, P())}), check_vma=False,
        )(params, batch)  # fmt: skip

    return step


def with_tokens(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step that also says how many next tokens it has learned from."""

    def counted(params: Params, batch: jax.Array) -> tuple[Params, dict[str, Any]]:
        params, made = step(params, batch)
        return params, {**made, "tokens_kept": jnp.int32(batch[..., 1:].size)}

    return counted


# Cases for relower


def numerics(make_args: Callable[..., tuple[Any, ...]]) -> Any:
    """Where the gate finds what these steps return."""
    import relower

    names = ("tokens_kept", "loss", "mean_log_prob", "last_log_prob", "entropy")
    return relower.Numerics(
        grads="1/grads",
        params="0",
        metrics={**{name: f"1/{name}" for name in names}, "grad_norm": None},
        advance=lambda out, args: (out[0], args[1]),
        args=make_args,
    )


def routed_args(config: routed_moe.Config = ROUTED) -> tuple[Params, jax.Array]:
    keys = jax.random.split(jax.random.key(1), MICRO_BATCHES)
    batches = [routed_moe.synthetic_batch(key, config)["tokens"] for key in keys]
    return routed_moe.init_params(jax.random.key(0), config), jnp.stack(batches)


def routed_logits(params: Params, tokens: jax.Array, config: routed_moe.Config) -> jax.Array:
    return routed_moe.forward(params, {"tokens": tokens}, config)


def routed() -> Any:
    import relower

    step = with_tokens(make_step(partial(routed_logits, config=ROUTED)))
    return relower.case(step, *jax.eval_shape(routed_args), numerics=numerics(routed_args))


def routed_sharded() -> Any:
    import relower

    def build(mesh: Any) -> tuple[Any, Any]:
        specs = partial(routed_moe.param_specs, mesh=mesh)
        step = sharded(partial(routed_logits, config=ROUTED), specs, mesh)
        return with_tokens(step), jax.eval_shape(routed_args)

    mesh = {"data": 2, "expert": 4}
    return relower.case(build, mesh=mesh, numerics=numerics(lambda: routed_args()))


def fused_args(config: fused_moe.Config = FUSED) -> tuple[Params, jax.Array]:
    keys = jax.random.split(jax.random.key(1), MICRO_BATCHES)
    batches = [fused_moe.synthetic_tokens(key, config) for key in keys]
    return fused_moe.init_params(jax.random.key(0), config), jnp.stack(batches)


def fused_logits(params: Params, tokens: jax.Array, config: fused_moe.Config) -> jax.Array:
    logits = fused_moe.forward(params, tokens[:, :-1].reshape(-1), config)
    logits = logits.reshape(*tokens[:, :-1].shape, -1)
    return jnp.pad(logits, ((0, 0), (0, 1), (0, 0)))  # of the last token nothing is asked


def fused() -> Any:
    import relower

    def build(mesh: Any) -> tuple[Any, Any]:
        step = sharded(partial(fused_logits, config=FUSED), fused_moe.param_specs, mesh)
        return with_tokens(step), jax.eval_shape(fused_args)

    mesh = {fused_moe.AXIS: fused_moe.DEVICES}
    return relower.case(build, mesh=mesh, numerics=numerics(lambda: fused_args()))


def frozen() -> Any:
    """The example's own step: it keeps its gradients to itself, so the moments are read."""
    import relower

    def args() -> tuple[Any, Any]:
        state = frozen_router.init_state(jax.random.key(0), FROZEN)
        return state, frozen_router.synthetic_batch(jax.random.key(1), FROZEN)

    return relower.case(
        frozen_router.make_step(FROZEN),
        *jax.eval_shape(args),
        numerics=relower.Numerics(
            grads="0/optimizer",  # running means of the gradients and of their squares
            params="0/params",
            metrics={"loss": "1/loss", "tokens_kept": None, "mean_log_prob": None,
                     "last_log_prob": None, "entropy": None, "grad_norm": None},
            advance=lambda out, args: (out[0], args[1]),
            args=args,
        ),
    )  # fmt: skip
