"""The trainer's two functions as cases for relower.

Each case is a function that takes nothing: `relower explain examples/qwen_hybrid/cases.py:tiny`.
Those named tiny… run on a CPU in seconds, real… have layers of a frontier model's size; both are
lowered for a mesh of eight devices.

    tiny, real                 forward and backward over the micro-batches: loss and gradients
    tiny_update, real_update   clip and AdamW
    layers[KIND]               one layer of the real size by itself, forward and backward: "delta"
                               or "attention"
    parts[NAME]                pieces of it on one device: "choice" of experts, "inverse"
    plain[NAME]                `real`, or another size of `VARIANTS`
    twins[NAME-FORM]           with one thing done by hand; the forms are those of by_hand/
    wrong[NAME]                with a mistake in it
    step[NAME]                 a whole step that runs here, forward, backward and update: for the
                               numerics gate, with a form of by_hand/mistakes.py as the control
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import relower

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Wherever this is loaded from.

from qwen_hybrid import by_hand, model, trainer
from qwen_hybrid.by_hand import frozen, mistakes
from qwen_hybrid.config import MESH, REAL, TINY, Config


def abstract_inputs(config: Config, mesh: Any) -> tuple[Any, Any]:
    """The types of a state and a batch, and where they lie; nothing is allocated."""
    key = jax.random.key(0)
    state, batch = jax.eval_shape(
        lambda: (trainer.init_state(key, config), trainer.synthetic_batch(key, config))
    )

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, state, trainer.shardings(state, mesh)), batch


def forward_backward(config: Config, make: Callable[..., Any] | None = None) -> Any:
    """Forward and backward as a `relower.case`."""

    def build(mesh: Any) -> tuple[Any, Any]:
        state, batch = abstract_inputs(config, mesh)
        made = (make or trainer.make_forward_backward)(config, mesh)
        return jax.jit(made), (state.params, batch)

    return relower.case(build, mesh=MESH)


def update(config: Config) -> Any:
    """The update as a `relower.case`."""

    def build(mesh: Any) -> tuple[Any, Any]:
        state, _ = abstract_inputs(config, mesh)
        return jax.jit(trainer.make_update(config), donate_argnums=0), (state, state.params)

    return relower.case(build, mesh=MESH)


VARIANTS = {
    "real": REAL,
    "at_once": replace(REAL, chunks=1),
    "full_remat": replace(REAL, saved=()),
    "bf16_router": replace(REAL, router_dtype=jnp.bfloat16),
}
"""The real size and others of it that a trainer is run with."""


def tiny() -> Any:
    return forward_backward(TINY)


def real() -> Any:
    return forward_backward(REAL)


def tiny_update() -> Any:
    return update(TINY)


def real_update() -> Any:
    return update(REAL)


def layers() -> dict[str, Any]:
    """One layer of each kind at the real size, as the blocks run it."""
    return {kind: one_layer(REAL, kind) for kind in ("delta", "attention")}


def one_layer(config: Config, kind: str) -> Any:
    """A layer's results and the gradients of its input and parameters, for one micro-batch."""
    tokens, frame = PartitionSpec(("fsdp", "expert"), "context"), (config.batch, config.sequence)

    def on_device(params: Any, x: jax.Array, mask: jax.Array, cotangent: jax.Array) -> Any:
        run = model.rematerialised(mask, config, kind)
        (y, loss), back = jax.vjp(run, x, params)
        dx, grads = back((cotangent, jnp.ones_like(loss)))
        return y, lax.psum(loss, tuple(MESH)), dx, grads

    def build(mesh: Any) -> tuple[Any, Any]:
        def array(shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        shapes = model.layer_shapes(config, kind)
        params = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in shapes.items()}
        specs = model.param_specs(params)
        params = {n: array(p.shape, p.dtype, specs[n]) for n, p in params.items()}
        x = array((*frame, config.hidden), config.dtype, tokens)
        mask = array(frame, jnp.bool, tokens)
        fn = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, tokens, tokens, tokens),
            out_specs=(tokens, PartitionSpec(), tokens, specs),
            check_vma=False,
        )
        return jax.jit(fn), (params, x, mask, x)

    return relower.case(build, mesh=MESH)


def parts() -> dict[str, Any]:
    """What one device computes in a layer of the real size, in pieces that can be profiled whole.

    ``choice``: the experts of its tokens, and the order that brings their rows together;
    ``inverse``: the triangular inverses of its heads' chunks.
    """
    c, tokens = REAL, REAL.batch * REAL.sequence // math.prod(MESH.values())

    def choice(scores: jax.Array) -> tuple[jax.Array, ...]:
        weights, ids = c.ops.top_k(scores, c.experts_per_token)
        return weights, *c.ops.sort_by_group(ids.reshape(-1), c.experts)

    def inverse(a: jax.Array) -> jax.Array:
        return c.ops.triangular_inverse(jnp.tril(a, -1))

    heads = c.value_heads // MESH["context"]
    chunks = (c.batch // (MESH["fsdp"] * MESH["expert"]), heads, c.sequence // c.delta_chunk)
    systems = (*chunks, c.delta_chunk, c.delta_chunk)
    return {
        "choice": relower.case(choice, jax.ShapeDtypeStruct((tokens, c.experts), jnp.float32)),
        "inverse": relower.case(inverse, jax.ShapeDtypeStruct(systems, jnp.float32)),
    }


def plain() -> dict[str, Any]:
    """Each of `VARIANTS`."""
    return {name: forward_backward(config) for name, config in VARIANTS.items()}


def twins() -> dict[str, Any]:
    """Each of `VARIANTS` with one thing done by hand, as in ``real-sorts``, or all of them."""
    return {
        f"{variant}-{name}": twin(config, name)
        for variant, config in VARIANTS.items()
        for name in (*by_hand.FORMS, "frozen", "all")
    }


def wrong() -> dict[str, Any]:
    """Twins with a mistake, for a gate's controls."""
    ties = replace(REAL, ops=replace(REAL.ops, sort_by_group=mistakes.sort_with_ties_reversed))
    rows = replace(REAL, ops=replace(REAL.ops, **by_hand.FORMS["rows"]))
    rows = replace(rows, ops=replace(rows.ops, put_back=mistakes.put_back_the_wrong_way))
    scales = replace(REAL, ops=replace(REAL.ops, gathered_wi=mistakes.gathered_wi_with_one_scale))
    named = {"ties": ties, "rows": rows, "scales": scales}
    return {name: forward_backward(config) for name, config in named.items()}


STEP = replace(TINY, blocks=1, sequence=32, delta_chunk=16, chunks=1)
"""What a step is run with: each kind of layer, at half the length, in one chunk."""


WIDE = replace(STEP, sequence=64, delta_chunk=32, experts_per_token=3, width=64, micro_batches=1)
"""So large that passes which move roundings have something to do."""


def step() -> dict[str, Any]:
    """A step of `STEP` and of `WIDE`, and one with a mistake, as ``relower.case``s that can run."""
    rows = replace(STEP.ops, **by_hand.FORMS["rows"])
    rows = replace(rows, put_back=mistakes.put_back_the_wrong_way)
    configs = {"plain": STEP, "wide": WIDE, "rows": replace(STEP, ops=rows)}
    return {name: whole_step(config) for name, config in configs.items()}


def whole_step(config: Config) -> Any:
    """Forward, backward and update in one function; what it returns, and how steps follow."""

    def build(mesh: Any) -> tuple[Any, Any]:
        state, batch = abstract_inputs(config, mesh)
        forward_backward = trainer.make_forward_backward(config, mesh)
        update = trainer.make_update(config)

        def step(state: trainer.State, batch: Any) -> tuple[trainer.State, Any]:
            loss, grads = forward_backward(state.params, batch)
            return update(state, grads), {"loss": loss, "grads": grads}

        return step, (state, batch)

    def arrays(mesh: Any) -> tuple[Any, Any]:
        state = jax.jit(trainer.init_state, static_argnums=1)(jax.random.key(0), config)
        batch = jax.jit(trainer.synthetic_batch, static_argnums=1)(jax.random.key(1), config)
        return jax.device_put(state, trainer.shardings(state, mesh)), batch

    missing = ("tokens_kept", "mean_log_prob", "last_log_prob", "entropy", "grad_norm")
    return relower.case(
        build,
        mesh=MESH,
        numerics=relower.Numerics(
            grads="1/grads",
            params="0/params",
            metrics={"loss": "1/loss"} | dict.fromkeys(missing),
            advance=lambda out, args: (out[0], args[1]),
            args=arrays,
            replicate="arguments",
        ),
    )


def twin(config: Config, name: str) -> Any:
    """Forward and backward with one thing done by hand, or "all"."""
    forms = by_hand.FORMS if name == "all" else [name] if name in by_hand.FORMS else []
    make = frozen.make_forward_backward if name in ("frozen", "all") else None
    return forward_backward(by_hand.by_hand(config, *forms), make)
