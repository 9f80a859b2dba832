"""What several layers are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]


def gathered(weight: jax.Array, dtype: Any) -> jax.Array:
    """A matrix whole, in ``dtype``, of which each device along "fsdp" holds some of the rows."""
    return lax.all_gather(weight.astype(dtype), "fsdp", axis=weight.ndim - 2, tiled=True)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``x / rms(x) * (1 + scale)`` over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * (1 + scale)).astype(x.dtype)


def unit(x: jax.Array) -> jax.Array:
    """``x`` at unit length along its last axis."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
