"""The model of `routed_moe` with its routing optimised by hand.

The same model, except for the two sorts of a layer. The expert ids lie in a known small range
and their order must be stable; so each id is packed above its row number into one 32-bit key,
which makes the keys unique and lets one cheap unstable sort of one operand do. The order is a
permutation of the row numbers, so its inverse is such a sort again, or, where two row numbers
don't fit into 32 bits, an unstable sort of unique pairs.

This is the program that relower should arrive at from the plain one.

Run it like `routed_moe.py`:

    python examples/routed_moe_by_hand.py

Cases for the command line, each a function that takes nothing, named as in `routed_moe`:
`tiny_by_hand`, `tiny_grad_by_hand`, `tiny_padded_by_hand`, `real_by_hand`, `real_grad_by_hand`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(Path(__file__).parent))  # Wherever this file is run or loaded from.

import routed_moe
from routed_moe import Config


def order_of_small_keys(keys: jax.Array, low: int, high: int) -> jax.Array:
    """The stable argsort of int32[n] ``keys`` in [low, high], a range that fits 32 bits."""
    slot_bits = (keys.shape[0] - 1).bit_length()
    assert (high - low).bit_length() + slot_bits <= 32, (low, high, keys.shape)
    packed = (keys - low if low else keys).astype(jnp.uint32)
    if slot_bits:
        packed = packed << jnp.uint32(slot_bits) | lax.iota(jnp.uint32, keys.shape[0])
    packed = lax.sort(packed, is_stable=False)
    return (packed & jnp.uint32(2**slot_bits - 1)).astype(jnp.int32)


def order_of_pairs(keys: jax.Array) -> jax.Array:
    """The stable argsort of int32[n] ``keys``, by an unstable sort of unique pairs."""
    slots = lax.iota(jnp.int32, keys.shape[0])
    return lax.sort((keys, slots), num_keys=2, is_stable=False)[1]


def stable_argsort(keys: jax.Array, low: int, high: int) -> jax.Array:
    """The stable argsort of int32[n] ``keys``, which lie in [low, high]."""
    if (high - low).bit_length() + (keys.shape[0] - 1).bit_length() <= 32:
        return order_of_small_keys(keys, low, high)
    return order_of_pairs(keys)


def sort_by_expert(ids: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """As `routed_moe.sort_by_expert`, by packed keys."""
    order = stable_argsort(ids, -1 if config.padding else 0, config.experts - 1)
    return order, stable_argsort(order, 0, ids.shape[0] - 1)


def by_hand(config: Config) -> Config:
    """The same model with this file's sorts."""
    return replace(config, sort_by_expert=sort_by_expert)


TINY = by_hand(routed_moe.TINY)
REAL = by_hand(routed_moe.REAL)


def tiny_by_hand() -> Any:
    return routed_moe.step_case(TINY)


def tiny_grad_by_hand() -> Any:
    return routed_moe.grad_case(TINY)


def sharded_experts_by_hand() -> Any:
    return routed_moe.sharded_step_case(replace(TINY, chunks=2), {"data": 2, "expert": 4})


def tiny_padded_by_hand() -> Any:
    return routed_moe.step_case(replace(TINY, padding=True))


def real_by_hand() -> Any:
    return routed_moe.step_case(REAL)


def real_grad_by_hand() -> Any:
    return routed_moe.grad_case(REAL)


if __name__ == "__main__":
    routed_moe.main(TINY, REAL)
