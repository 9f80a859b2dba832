"""The convolution on an input that stays narrow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..ops import TAPS


@jax.custom_vjp
def windows(x: jax.Array) -> list[jax.Array]:
    """What each tap reads of ``[batch, tokens, channels]``, widened to float32 window by window."""
    tokens = x.shape[1] - TAPS + 1
    return [x[:, i : i + tokens].astype(jnp.float32) for i in range(TAPS)]


def _backward(x: jax.Array, cotangents: list[jax.Array]) -> tuple[jax.Array]:
    """Added up in float32, and rounded once."""
    zero = jnp.float32(0)
    padded = [
        lax.pad(g, zero, ((0, 0, 0), (i, TAPS - 1 - i, 0), (0, 0, 0)))
        for i, g in enumerate(cotangents)
    ]
    total = padded[-1]
    for one in reversed(padded[:-1]):
        total = total + one
    return (total.astype(jnp.bfloat16),)


windows.defvjp(lambda x: (windows(x), None), _backward)


def causal_conv(qkv: jax.Array, state: jax.Array, taps: jax.Array) -> jax.Array:
    """As `ops.causal_conv`."""
    y = jnp.float32(0)
    for i, window in enumerate(windows(jnp.concatenate([state, qkv], axis=1))):
        y = window * taps[i] if i == 0 else y + window * taps[i]
    return jax.nn.silu(y).astype(qkv.dtype)
