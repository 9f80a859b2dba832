"""Three train steps on a mesh of four devices, for the comparator to be tested with.

Each holds what real programs hold and a comparison must not lose: Pallas kernels with gradients
and grids, kernels that talk to their neighbour, collectives of `jax.shard_map`, rematerialised
layers, dropout, tables of constants, donated state, metadata for the compiler.

    gmm_step     experts as grouped matrix multiplications (megablox)
    flash_step   causal flash attention, its heads spread over the devices
    moe_step     a routed mixture of experts, its tokens exchanged with `all_to_all`

Every name that a person could choose stands in `CHOSEN_NAMES`, so that renaming can be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from relower.lowering.case import case

DEVICES = 4
ROWS, WIDTH, EXPERTS = 1024, 256, 8
HEADS, SEQUENCE, HEAD_DIM = 8, 512, 128
RATE = 3e-3
CHOSEN_NAMES = {
    "ring_kernel": "shift_body",
    "ring": "shift",
    "source": "incoming",
    "target": "outgoing",
    "staged": "kept",
    "dropped": "thinned",
    "experts_of": "mixture",
    "updated": "advanced",
    "ring_exchange": "neighbour_shift",
    "router_scope": "dispatch_scope",
}
"""Each name of this file that means nothing to the program, and another for it."""


def ring_kernel(source: Any, target: Any, staged: Any, sent: Any, received: Any) -> None:
    """Sends the block to the right neighbour, then sums it a few times over."""
    axis_size = DEVICES
    me = lax.axis_index("data")
    right = lax.rem(me + 1, axis_size)
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"data": right})
    pl.semaphore_wait(barrier, 1)
    copy = pltpu.make_async_remote_copy(source, staged, sent, received, device_id={"data": right})
    copy.start()
    copy.wait()
    value = lax.fori_loop(0, 3, lambda _, v: v * 0.5 + staged[...], jnp.zeros_like(staged[...]))
    target[...] = value


def ring(x: jax.Array, collective_id: int) -> jax.Array:
    """f32[8, 128] of the left neighbour, weighted."""
    return pl.pallas_call(
        ring_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        scratch_shapes=[
            pltpu.VMEM(x.shape, x.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=collective_id,
            has_side_effects=True,
            vmem_limit_bytes=32 << 20,
            allow_input_fusion=[False],
        ),
        name="ring_exchange",
    )(x)


def dropped(x: jax.Array, step: jax.Array) -> jax.Array:
    """``x`` with a tenth of it at zero, by the hardware's random bits."""
    key = jax.random.fold_in(jax.random.key(7, impl="rbg"), step)
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x, 0.0) / 0.9


def table(width: int) -> np.ndarray[Any, Any]:
    """f32[width]: frequencies, as a constant of the program."""
    return np.float32(1e4) ** (-np.arange(width, dtype=np.float32) / width)


def gains(width: int) -> np.ndarray[Any, Any]:
    """f32[width], all of one value: a constant that prints as a splat."""
    return np.full((width,), 0.125, np.float32)


def flat(tree: Any) -> jax.Array:
    """f32[8, 128] of a tree, for a kernel that talks to its neighbour."""
    parts = [leaf.astype(jnp.float32).reshape(-1)[:1024] for leaf in jax.tree.leaves(tree)]
    return sum(parts).reshape(8, 128)


def exchanged(grads: Any) -> Any:
    """The mean of all devices' gradients, and a term from the neighbour by a kernel."""
    grads = jax.tree.map(lambda g: lax.pmean(g, "data"), grads)
    first = ring(flat(grads), 1)
    second = ring(first - 0.5, 2)
    drift = lax.psum(jnp.sum(second) - jnp.max(first), "data")
    return jax.tree.map(lambda g: g + (drift * 1e-6).astype(g.dtype), grads)


def updated(
    loss: Callable[..., jax.Array], params: Any, batch: Any, step: jax.Array
) -> tuple[Any, jax.Array]:
    """Stochastic gradient descent with clipping: the new parameters, and the loss."""
    value, grads = jax.value_and_grad(loss)(params, batch, step)
    grads = exchanged(grads)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
    scale = jnp.where(norm < 1.0, 1.0, 1.0 / norm)
    with set_xla_metadata(step_name="update"):
        params = jax.tree.map(lambda p, g: p - (RATE * scale * g).astype(p.dtype), params, grads)
    return params, lax.pmean(value, "data")


def stepped(loss: Callable[..., jax.Array], params: Any, batch: Any, specs: tuple[Any, Any]) -> Any:
    """A case: one train step of ``loss`` under `jax.shard_map`, its state donated."""

    def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        inner = jax.shard_map(
            partial(updated, loss),
            mesh=mesh,
            in_specs=(*specs, P()),
            out_specs=(specs[0], P()),
            check_vma=False,
        )

        def placed(leaf: Any, spec: Any) -> Any:
            struct: Any = jax.ShapeDtypeStruct
            return struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        args = (
            jax.tree.map(placed, params, specs[0]),
            jax.tree.map(placed, batch, specs[1]),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return jax.jit(inner, donate_argnums=0), args

    return case(build, mesh={"data": DEVICES})


def bf16(*shape: int) -> Any:
    """A shape of bfloat16."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape: int) -> Any:
    """A shape of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    """A shape of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Grouped matrix multiplications


def gmm_loss(params: Any, batch: Any, step: jax.Array) -> jax.Array:
    """The mean square of two grouped matrix multiplications against their targets."""

    @jax.checkpoint  # type: ignore[untyped-decorator]
    def layer(x: jax.Array) -> jax.Array:
        x = (x * table(WIDTH) + gains(WIDTH)).astype(jnp.bfloat16)
        y = megablox.gmm(x, params["up"], batch["sizes"], jnp.float32, (128, 128, 128))
        y = jax.nn.silu(dropped(y, step)).astype(jnp.bfloat16)
        return megablox.gmm(y, params["down"], batch["sizes"], jnp.float32, (128, 128, 128))

    y = layer(batch["rows"])
    y = jnp.dot(y.astype(jnp.bfloat16), params["mix"], preferred_element_type=jnp.float32)
    return jnp.mean(jnp.square(y - batch["targets"]))


def gmm_step() -> Any:
    """The train step of `gmm_loss`."""
    params = {
        "up": bf16(EXPERTS, WIDTH, WIDTH),
        "down": bf16(EXPERTS, WIDTH, WIDTH),
        "mix": bf16(WIDTH, WIDTH),
    }
    batch = {
        "rows": f32(ROWS * DEVICES, WIDTH),
        "targets": f32(ROWS * DEVICES, WIDTH),
        "sizes": i32(EXPERTS * DEVICES),
    }
    specs = ({name: P() for name in params}, {name: P("data") for name in batch})
    return stepped(gmm_loss, params, batch, specs)


# Flash attention


def flash_loss(params: Any, batch: Any, step: jax.Array) -> jax.Array:
    """The mean square of causal attention, each device computing its part of the heads."""
    heads, block = HEADS // DEVICES, 128
    tiles = dict.fromkeys((field.name for field in fields(flash.BlockSizes)), block)
    sizes = flash.BlockSizes(**{**tiles, "block_b": 1, "block_k_major": 2 * block})

    @jax.checkpoint  # type: ignore[untyped-decorator]
    def layer(x: jax.Array) -> jax.Array:
        x = (x * table(WIDTH) - gains(WIDTH)).astype(jnp.bfloat16)
        q, k, v = (
            jnp.einsum("sd,dhk->hsk", x, params[name], preferred_element_type=jnp.float32)
            .astype(jnp.bfloat16)
            .reshape(1, heads, SEQUENCE, HEAD_DIM)
            for name in ("q", "k", "v")
        )
        y = flash.flash_attention(q, k, v, causal=True, sm_scale=HEAD_DIM**-0.5, block_sizes=sizes)
        y = dropped(y[0].astype(jnp.float32), step).astype(jnp.bfloat16)
        return jnp.einsum("hsk,hkd->sd", y, params["out"], preferred_element_type=jnp.float32)

    y = lax.psum(layer(batch["x"]), "data")
    return jnp.mean(jnp.square(y - batch["targets"]))


def flash_step() -> Any:
    """The train step of `flash_loss`."""
    params = {name: bf16(WIDTH, HEADS, HEAD_DIM) for name in ("q", "k", "v")}
    params["out"] = bf16(HEADS, HEAD_DIM, WIDTH)
    batch = {"x": f32(SEQUENCE, WIDTH), "targets": f32(SEQUENCE, WIDTH)}
    specs = (
        {name: P("data") if name == "out" else P(None, "data") for name in params},
        {name: P() for name in batch},
    )
    return stepped(flash_loss, params, batch, specs)


# A routed mixture of experts


def experts_of(params: Any, x: jax.Array) -> jax.Array:
    """Each token through its best expert: sorted, sent to the expert's device and back."""
    with jax.named_scope("router_scope"):
        logits = jnp.dot(x.astype(jnp.float32), params["router"], precision=lax.Precision.HIGHEST)
        weights, ids = lax.top_k(jax.nn.softmax(logits), 1)
        order = jnp.argsort(ids[:, 0])
    capacity = x.shape[0] // DEVICES  # of one device from one other
    sent = x[order].reshape(DEVICES, capacity, WIDTH)
    rows = lax.all_to_all(sent, "data", 0, 0).reshape(-1, WIDTH)
    held = jnp.clip(ids[order, 0].reshape(DEVICES, capacity), 0, EXPERTS - 1)
    held = lax.all_to_all(held, "data", 0, 0).reshape(-1) % (EXPERTS // DEVICES)
    again = jnp.argsort(held)
    sizes = jnp.bincount(held, length=EXPERTS // DEVICES)
    rows = rows[again].astype(jnp.bfloat16)
    y = megablox.gmm(rows, params["up"], sizes, jnp.float32, (128, 128, 128))
    y = jax.nn.silu(y).astype(jnp.bfloat16)
    y = megablox.gmm(y, params["down"], sizes, jnp.float32, (128, 128, 128))
    y = y[jnp.argsort(again)].reshape(DEVICES, capacity, WIDTH)
    y = lax.all_to_all(y, "data", 0, 0).reshape(-1, WIDTH)
    shared = jnp.dot(x, params["shared"], preferred_element_type=jnp.float32)
    return y[jnp.argsort(order)] * weights + shared


def moe_loss(params: Any, batch: Any, step: jax.Array) -> jax.Array:
    """Two routed layers under scan with rematerialisation; the mean square of what they give."""

    @jax.checkpoint  # type: ignore[untyped-decorator]
    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
        y = experts_of(params, (x * table(WIDTH) + gains(WIDTH)).astype(jnp.bfloat16))
        total = lax.psum_scatter(y.reshape(DEVICES, -1), "data")
        return x + dropped(y, step), jnp.sum(lax.all_gather(total, "data")) - jnp.mean(y)

    x, totals = lax.scan(layer, batch["x"], params)
    return jnp.mean(jnp.square(x - batch["targets"])) + 1e-3 * jnp.sum(totals)


def moe_step() -> Any:
    """The train step of `moe_loss`."""
    layers = 2
    params = {
        "router": f32(layers, WIDTH, EXPERTS),
        "shared": bf16(layers, WIDTH, WIDTH),
        "up": bf16(layers, EXPERTS, WIDTH, WIDTH),
        "down": bf16(layers, EXPERTS, WIDTH, WIDTH),
    }
    batch = {"x": f32(ROWS * DEVICES, WIDTH), "targets": f32(ROWS * DEVICES, WIDTH)}
    specs = (
        {"router": P(), "shared": P(), "up": P(None, "data"), "down": P(None, "data")},
        {name: P("data") for name in batch},
    )
    return stepped(moe_loss, params, batch, specs)
