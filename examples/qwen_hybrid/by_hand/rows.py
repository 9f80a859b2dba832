"""Rows taken out and put back with gathers in the backward pass, where jax would scatter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def gathered(rows: jax.Array, places: jax.Array) -> jax.Array:
    """``rows[places]``, of places that are known to be inside and all different."""
    return rows.at[places].get(
        mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_out(x: jax.Array, order: jax.Array, inverse: jax.Array, k: int) -> jax.Array:
    """As `ops.take_out`; its transpose gathers a token's ``k`` rows, choice by choice, and adds."""
    return x[order // k]


def _take_out(
    x: jax.Array, order: jax.Array, inverse: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    return x[order // k], inverse


def _untake(k: int, inverse: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    rows = gathered(g, inverse.reshape(-1, k).T)
    return lax.reduce_sum(rows.astype(jnp.float32), [0]).astype(g.dtype), None, None


take_out.defvjp(_take_out, _untake)


@jax.custom_vjp
def put_back(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """As `ops.put_back`; its transpose gathers by the order."""
    return rows[inverse]


put_back.defvjp(
    lambda rows, order, inverse: (rows[inverse], order),
    lambda order, g: (gathered(g, order), None, None),
)
