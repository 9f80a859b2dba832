"""The gated delta net: a causal convolution, the delta rule in chunks, a gated norm."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .config import MESH, Config
from .ops import TAPS
from .parts import Params, rms_norm, unit


def in_chunks(a: jax.Array, chunk: int) -> jax.Array:
    """``[batch, tokens, heads, …]`` as ``[batch, heads, chunks, chunk, …]``, in float32."""
    a = a.reshape(a.shape[0], -1, chunk, *a.shape[2:]).astype(jnp.float32)
    return jnp.moveaxis(a, 3, 1)


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, config: Config
) -> jax.Array:
    """The gated delta rule.

    A head's state is a matrix ``S`` from keys to values. Each token makes it
    ``exp(decay) (I - beta k kᵀ) S + beta k vᵀ``, and reads ``qᵀ S``. The tokens of a chunk depend
    on one another by a triangular system.

    Args:
        q: float32[batch, heads, chunks, chunk, dim], as are ``k``, of unit length, and ``v``.
        k: see ``q``.
        v: see ``q``.
        decay: float32[batch, heads, chunks, chunk], at most 0.
        beta: float32[batch, heads, chunks, chunk], in [0, 1].
        config: The model.

    Returns:
        Shape and dtype of ``v``.
    """
    total = jnp.cumsum(decay, axis=-1)
    until, rest = jnp.exp(total)[..., None], jnp.exp(total[..., -1:] - total)[..., None]
    past = jnp.tril(jnp.ones((total.shape[-1],) * 2, bool))
    apart = jnp.where(past, total[..., :, None] - total[..., None, :], 0.0)
    fade = jnp.where(past, jnp.exp(apart), 0.0)

    scaled = beta[..., None]
    overlap = jnp.tril(jnp.einsum("...tk,...sk->...ts", k * scaled, k) * fade, -1)
    inverse = config.ops.triangular_inverse(overlap)
    values, keys = inverse @ (v * scaled), inverse @ (k * scaled * until)
    scores = jnp.einsum("...tk,...sk->...ts", q, k) * fade

    def chunk(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        values, keys, scores, q, k, left = xs
        new = values - keys @ state
        out = q @ state + scores @ new
        return state * left + jnp.swapaxes(k, -1, -2) @ new, out

    state = jnp.zeros((*v.shape[:2], k.shape[-1], v.shape[-1]), v.dtype)
    xs = (values, keys, scores, q * until, k * rest, until[..., -1:, :])
    _, out = lax.scan(chunk, state, jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), xs))
    return jnp.moveaxis(out, 0, 2)


def delta_net(params: Params, x: jax.Array, config: Config) -> jax.Array:
    """One layer's mixing of ``x``, ``[batch, tokens, hidden]``: this device's part of the tokens.

    The convolution reads the last tokens of the part before. For the delta rule, devices along
    "context" exchange parts of the tokens for parts of the heads.
    """
    c, (batch, tokens) = config, x.shape[:2]
    qkv = x @ params["qkv"]
    steps = [(i, i + 1) for i in range(MESH["context"] - 1)]
    state = lax.ppermute(qkv[:, 1 - TAPS :], "context", steps)  # Zeros before the first.
    qkv = c.ops.causal_conv(qkv, state, params["taps"])

    parts = jnp.split(qkv, (c.key_width, 2 * c.key_width), axis=-1)
    q, k, v = (a.reshape(batch, tokens, -1, c.linear_dim) for a in parts)
    beta, decay = ((x @ params[name]).astype(jnp.float32) for name in ("beta", "decay"))
    decay = -jnp.exp(params["decay_rate"]) * jax.nn.softplus(decay + params["decay_bias"])
    swap = partial(lax.all_to_all, axis_name="context", tiled=True)
    exchanged = [
        in_chunks(swap(a, split_axis=2, concat_axis=1), c.delta_chunk)
        for a in (q, k, v, decay, jax.nn.sigmoid(beta))
    ]
    q, k, v, decay, beta = exchanged
    q, k = (jnp.repeat(unit(a), c.value_heads // c.key_heads, axis=1) for a in (q, k))
    y = delta_rule(q / math.sqrt(c.linear_dim), k, v, decay, beta, config)
    y = jnp.moveaxis(y, 1, 3).reshape(batch, -1, v.shape[1], c.linear_dim).astype(x.dtype)
    y = swap(y, split_axis=1, concat_axis=2)

    gate = (x @ params["gate"]).reshape(y.shape)
    y = rms_norm(y, params["out_norm"]) * jax.nn.silu(gate)
    return y.reshape(batch, tokens, -1) @ params["out"]
