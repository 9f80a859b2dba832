"""The sort by expert with keys packed above the rows' numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def order_of(keys: jax.Array, bits: int) -> jax.Array:
    """The stable argsort of int32[n] ``keys`` of so many bits, none negative.

    Key and slot in one word make the keys unique, so that one unstable sort of one operand does;
    where both don't fit, an unstable sort of pairs, for keys that are unique by themselves.
    """
    slot_bits = (keys.shape[0] - 1).bit_length()
    if bits + slot_bits > 32:
        return lax.sort((keys, lax.iota(jnp.int32, keys.shape[0])), num_keys=1, is_stable=False)[1]
    word = keys.astype(jnp.uint32) << jnp.uint32(slot_bits)
    word = lax.sort(word | lax.iota(jnp.uint32, keys.shape[0]), is_stable=False)
    return (word & jnp.uint32(2**slot_bits - 1)).astype(jnp.int32)


def sort_by_group(ids: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """As `ops.sort_by_group`."""
    order = order_of(ids, groups.bit_length())
    return order, order_of(order, (ids.shape[0] - 1).bit_length())
