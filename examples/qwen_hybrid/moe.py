"""The mixture of experts: routed over a ring of devices, and one expert shared by all tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .config import Config
from .parts import Params, gathered


def balance_loss(chosen: jax.Array, probabilities: jax.Array, mask: jax.Array) -> jax.Array:
    """This device's part of the load-balance loss, which is 1 where all experts get the same.

    Args:
        chosen: int32[experts], how often each was chosen here.
        probabilities: float32[tokens, experts].
        mask: bool[tokens].
    """
    everywhere = ("fsdp", "context", "expert")
    chosen = lax.psum(chosen, everywhere)
    tokens = jnp.maximum(lax.psum(jnp.sum(mask), everywhere), 1)
    share = chosen / jnp.maximum(jnp.sum(chosen), 1)
    likely = jnp.sum(probabilities, axis=0, where=mask[:, None]) / tokens
    return chosen.shape[0] * jnp.sum(share * likely)


def route(
    router: jax.Array, x: jax.Array, mask: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of each token, their weights, and the load-balance loss.

    Args:
        router: [hidden, experts], in the router's dtype.
        x: [tokens, hidden].
        mask: bool[tokens], False for padding.
        config: The model.

    Returns:
        ``(weights, ids, loss)``, the first two [tokens, experts_per_token]; padding has ids -1 and
        weights 0.
    """
    c = config
    logits = x.astype(c.router_dtype) @ router
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = c.ops.top_k(probabilities, c.experts_per_token)
    weights, ids = checkpoint_name(weights, "routing_weights"), checkpoint_name(ids, "routing_ids")
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    weights = jnp.where(mask[:, None], weights, 0).astype(x.dtype)
    ids = jnp.where(mask[:, None], ids, -1)
    chosen = c.ops.group_sizes(ids.reshape(-1) + 1, c.experts + 1)[1:]
    return weights, ids, balance_loss(chosen, probabilities, mask)


def own_experts(
    wi: jax.Array, wo: jax.Array, x: jax.Array, weights: jax.Array, ids: jax.Array, config: Config
) -> jax.Array:
    """What this device's experts add to the tokens of the ring.

    Args:
        wi: [own experts, hidden, 2 · width].
        wo: [own experts, width, hidden].
        x: [tokens, hidden].
        weights: [tokens, experts_per_token].
        ids: int32, shaped as the weights: an expert of any device, or -1.
        config: The model.

    Returns:
        [tokens, hidden], zero for a token none of whose experts are here.
    """
    ops, own = config.ops, wi.shape[0]
    ids = ids.reshape(-1) - lax.axis_index("expert") * own
    ids = jnp.where((ids >= 0) & (ids < own), ids, own)  # Others' rows, and padding's, come last.
    order, inverse = ops.sort_by_group(ids, own)
    sizes = ops.group_sizes(ids, own + 1)[:own]
    held = jnp.sum(sizes)

    rows = ops.take_out(x, order, inverse, config.experts_per_token)
    rows = jnp.where(jnp.arange(rows.shape[0])[:, None] < held, rows, 0)
    rows = ops.activated(rows, wi, sizes)
    rows = lax.ragged_dot(rows, wo, sizes)

    y = jnp.where(inverse[:, None] < held, ops.put_back(rows, order, inverse), 0)
    return jnp.einsum("tkd,tk->td", y.reshape(*weights.shape, -1), weights)


def routed(
    params: Params, x: jax.Array, weights: jax.Array, ids: jax.Array, config: Config
) -> jax.Array:
    """The routed experts' weighted sum for each token of ``x``, ``[tokens, hidden]``.

    Chunk by chunk, the tokens of all devices along "expert" come together, each device computes
    what its own experts add, and the sums go back. A barrier has the next chunk sent on its way
    before this one's experts start.
    """
    wi = config.ops.gathered_wi(params["wi"].astype(x.dtype))
    wo = gathered(params["wo"], x.dtype)
    chunks = list(zip(*(jnp.split(a, config.chunks) for a in (x, weights, ids)), strict=True))
    send = config.ops.ring(chunks, "expert")
    here, sums = send(0), []
    for i in range(config.chunks):
        if i + 1 < config.chunks:
            coming = send(i + 1)
            here, coming = lax.optimization_barrier((here, coming))
        y = own_experts(wi, wo, *here, config)
        sums.append(lax.psum_scatter(y, "expert", tiled=True))
        here = coming if i + 1 < config.chunks else None
    return jnp.concatenate(sums)


def shared(params: Params, x: jax.Array) -> jax.Array:
    """The shared expert's result for each token, as much of it as its gate lets through."""
    y = jax.nn.silu(x @ params["shared_gate"]) * (x @ params["shared_up"])
    return (y @ params["shared_down"]) * jax.nn.sigmoid(x @ params["shared_part"])


def mixture(
    params: Params, x: jax.Array, mask: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """One layer's experts for ``x``, ``[batch, tokens, hidden]``, and their load-balance loss."""
    tokens = x.reshape(-1, config.hidden)
    weights, ids, loss = route(params["router"], tokens, mask.reshape(-1), config)
    y = routed(params, tokens, weights, ids, config) + shared(params, tokens)
    return y.reshape(x.shape), loss
