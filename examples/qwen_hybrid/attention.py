"""Full attention: grouped queries, normed queries and keys, rotary positions, an output gate."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .config import Config
from .parts import Params, rms_norm


def rotated(x: jax.Array, positions: jax.Array, part: float) -> jax.Array:
    """``x``, ``[batch, tokens, heads, dim]``, the first ``part`` of its dims turned by position."""
    turned = int(x.shape[-1] * part)
    half = turned // 2
    angles = positions[:, None] * 10_000_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    y = x.astype(jnp.float32)
    a, b = y[..., :half], y[..., half:turned]
    pieces = [a * cos - b * sin, b * cos + a * sin, y[..., turned:]]
    return jnp.concatenate(pieces, axis=-1).astype(x.dtype)


def attention(params: Params, x: jax.Array, config: Config) -> jax.Array:
    """One layer's mixing of ``x``, ``[batch, tokens, hidden]``: this device's part of the tokens.

    Keys and values of all parts are gathered along "context".
    """
    c, (batch, tokens) = config, x.shape[:2]
    query, gate = jnp.split(
        (x @ params["query"]).reshape(batch, tokens, c.heads, 2 * c.head_dim), 2, axis=-1
    )
    key, value = (
        (x @ params[name]).reshape(batch, tokens, c.kv_heads, c.head_dim)
        for name in ("key", "value")
    )
    here = lax.axis_index("context") * tokens + jnp.arange(tokens)
    query = rotated(rms_norm(query, params["query_norm"]), here, c.rotary)
    key = rotated(rms_norm(key, params["key_norm"]), here, c.rotary)
    key, value = c.ops.exchange((key, value), "context", axis=1)

    query = query.reshape(batch, tokens, c.kv_heads, -1, c.head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
    causal = here[:, None] >= jnp.arange(key.shape[1])
    scores = jnp.where(causal, scores / math.sqrt(c.head_dim), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    y = jnp.einsum("bkgts,bskd->btkgd", weights, value)
    y = y.reshape(batch, tokens, -1) * jax.nn.sigmoid(gate.reshape(batch, tokens, -1))
    return y @ params["out"]
