"""The decoder: an embedding, blocks of four layers under a scan, and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from .attention import attention
from .config import BLOCK, MESH, Config
from .delta_net import delta_net
from .moe import mixture
from .ops import TAPS
from .parts import Params, gathered, rms_norm

Batch = dict[str, jax.Array]
EXPERTS = ("wi", "wo")
WHOLE = ("norm", "taps", "decay_rate", "decay_bias")
"""Parameters whose names hold one of these lie on every device."""


def layer_shapes(config: Config, kind: str) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes of one layer whose mixer is "delta" or "attention"."""
    c, d = config, config.hidden
    experts = {
        "mixer_norm": (d,), "moe_norm": (d,), "router": (d, c.experts),
        "wi": (c.experts, d, 2 * c.width), "wo": (c.experts, c.width, d),
        "shared_gate": (d, c.width), "shared_up": (d, c.width), "shared_down": (c.width, d),
        "shared_part": (d, 1),
    }  # fmt: skip
    if kind == "attention":
        heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return experts | {
            "query": (d, 2 * heads), "key": (d, kv), "value": (d, kv), "out": (heads, d),
            "query_norm": (c.head_dim,), "key_norm": (c.head_dim,),
        }  # fmt: skip
    return experts | {
        "qkv": (d, c.qkv_width), "gate": (d, c.value_width), "taps": (TAPS, c.qkv_width),
        "beta": (d, c.value_heads), "decay": (d, c.value_heads), "decay_rate": (c.value_heads,),
        "decay_bias": (c.value_heads,), "out_norm": (c.linear_dim,), "out": (c.value_width, d),
    }  # fmt: skip


def init_params(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters; those of the layers are stacked block by block."""
    c = config
    shapes: dict[str, Any] = {
        "embedding": (c.vocab, c.hidden),
        "attention": {
            name: (c.blocks, *shape) for name, shape in layer_shapes(c, "attention").items()
        },
        "delta": {
            name: (c.blocks, BLOCK - 1, *shape) for name, shape in layer_shapes(c, "delta").items()
        },
        "final_norm": (c.hidden,),
        "unembedding": (c.hidden, c.vocab),
    }
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda s: isinstance(s, tuple))
    made, start = [], 0
    drawn = jax.random.normal(key, (sum(math.prod(shape) for _, shape in leaves),), jnp.float32)
    for path, shape in leaves:
        name, end = path[-1].key, start + math.prod(shape)
        if "norm" in name or name.startswith("decay_"):
            made.append(jnp.full(shape, -2.0 if name == "decay_bias" else 0.0))
            continue
        fan_in = 1 if name == "embedding" else shape[-2]
        made.append(drawn[start:end].reshape(shape) / math.sqrt(fan_in))
        start = end
    return jax.tree.unflatten(tree, made)


def param_specs(params: Any) -> Any:
    """How each parameter lies on the mesh; in an optimizer's state, its moments as well."""

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> P:
        name, rest = getattr(path[-1], "key", None), leaf.ndim - 2
        if name is None or any(word in name for word in WHOLE):
            return P()
        if name in EXPERTS:
            return P(*[None] * (rest - 1), "expert", "fsdp")
        return P(*[None] * rest, "fsdp")

    return jax.tree_util.tree_map_with_path(spec, params)


def gathered_params(params: Params, config: Config) -> Params:
    """A layer's parameters with all matrices whole, but for the experts'."""
    names = [n for n, p in params.items() if p.ndim == 2 and n != "taps"]
    dtypes = [config.router_dtype if n == "router" else config.dtype for n in names]
    parts = [params[n].astype(dtype) for n, dtype in zip(names, dtypes, strict=True)]
    return params | dict(zip(names, config.ops.exchange(parts, "fsdp"), strict=True))


def layer(
    x: jax.Array, params: Params, mask: jax.Array, config: Config, kind: str
) -> tuple[jax.Array, jax.Array]:
    """One layer: ``x``, ``[batch, tokens, hidden]``, and the load-balance loss."""
    params = gathered_params(params, config)
    mixer = {"attention": attention, "delta": delta_net}[kind]
    mixed = mixer(params, rms_norm(x, params["mixer_norm"]), config)
    x = x + checkpoint_name(mixed, "mixed")
    y, loss = mixture(params, rms_norm(x, params["moe_norm"]), mask, config)
    return x + y, loss


def rematerialised(mask: jax.Array, config: Config, kind: str) -> Callable[..., Any]:
    """`layer` as a function of ``x`` and ``params``, its backward pass finding what is saved."""
    one = partial(layer, mask=mask, config=config, kind=kind)
    if config.saved is None:
        return one
    return jax.checkpoint(one, policy=jax.checkpoint_policies.save_only_these_names(*config.saved))


def loss_fn(params: Params, batch: Batch, config: Config) -> jax.Array:
    """This device's part of the mean cross-entropy of the targets, in nats, plus the balance's.

    Args:
        params: this device's parts.
        batch: "tokens" and "targets", int32[batch, tokens], and "mask", which of them are real.
        config: The model.
    """
    c, mask = config, batch["mask"]

    def block(x: jax.Array, params: tuple[Params, Params]) -> tuple[jax.Array, jax.Array]:
        delta, full = params
        x, losses = lax.scan(rematerialised(mask, c, "delta"), x, delta)
        x, loss = rematerialised(mask, c, "attention")(x, full)
        return x, jnp.sum(losses) + loss

    x = gathered(params["embedding"], c.dtype)[batch["tokens"]]
    x, balance = lax.scan(block, x, (params["delta"], params["attention"]))
    x = rms_norm(x, params["final_norm"])
    logits = (x @ gathered(params["unembedding"], x.dtype)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    real = lax.psum(jnp.sum(mask), tuple(MESH))
    loss = jnp.sum(losses, where=mask) / jnp.maximum(real, 1)
    return loss + c.balance * jnp.sum(balance) / (BLOCK * c.blocks)
