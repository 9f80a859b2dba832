"""Forms that are wrong, each in one place: what a comparison must see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..ops import FLOAT8, LARGEST
from .rows import gathered
from .sorts import order_of


def sort_with_ties_reversed(ids: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """The rows of a group come last to first."""
    rows = ids.shape[0]
    bits = (rows - 1).bit_length()
    word = ids.astype(jnp.uint32) << jnp.uint32(bits)
    word = lax.sort(word | jnp.uint32(rows - 1) - lax.iota(jnp.uint32, rows), is_stable=False)
    order = rows - 1 - (word & jnp.uint32(2**bits - 1)).astype(jnp.int32)
    return order, order_of(order, bits)


@jax.custom_vjp
def put_back_the_wrong_way(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The transpose gathers by the inverse, which is not the inverse's transpose."""
    return rows[inverse]


put_back_the_wrong_way.defvjp(
    lambda rows, order, inverse: (rows[inverse], inverse),
    lambda inverse, g: (gathered(g, inverse), None, None),
)


@jax.custom_vjp
def fake_quantise_with_one_scale(w: jax.Array) -> jax.Array:
    """One scale for all of an expert's columns: what is right for halves isn't for the whole."""
    largest = lax.pmax(jnp.max(jnp.abs(w), axis=(1, 2), keepdims=True), "fsdp")
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest / LARGEST)
    return (w / scale).astype(FLOAT8).astype(w.dtype) * scale


fake_quantise_with_one_scale.defvjp(
    lambda w: (fake_quantise_with_one_scale(w), None), lambda _, g: (g,)
)


def gathered_wi_with_one_scale(wi: jax.Array) -> jax.Array:
    """As `weights.gathered_wi`, rounded by the wrong scales."""
    whole = lax.optimization_barrier(fake_quantise_with_one_scale(wi))
    return lax.all_gather(whole, "fsdp", axis=1, tiled=True)
