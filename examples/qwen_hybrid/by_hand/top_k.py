"""The choice of experts by searches for the greatest score that is left."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def turned(bits: jax.Array) -> jax.Array:
    """Integers that order as float32s of these bits do, and back."""
    return bits ^ ((bits >> jnp.int32(31)) & jnp.int32(2**31 - 1))


def greater(a: Any, b: Any) -> Any:
    """Of two (key, place)s the one with the greater key, or else with the lesser place."""
    (one, here), (other, there) = a, b
    first = (one > other) | ((one == other) & (here < there))
    return lax.select(first, one, other), lax.select(first, here, there)


def keys_and_places(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` greatest of each row of float32[rows, n] as integers, and where they stand."""
    key = turned(lax.bitcast_convert_type(scores, jnp.int32))
    place = lax.broadcasted_iota(jnp.int32, key.shape, 1)
    least, none = jnp.int32(-(2**31)), jnp.int32(key.shape[1])
    found, rest = [], (key, place)
    for _ in range(k):
        best, first = (x[:, None] for x in lax.reduce(rest, (least, none), greater, (1,)))
        found.append((best, first))
        left = (key < best) | ((key == best) & (place > first))
        rest = jnp.where(left, key, least), jnp.where(left, place, none)
    keys, places = zip(*found, strict=True)
    return lax.concatenate(keys, 1), lax.concatenate(places, 1)


@jax.custom_jvp
def scores_of(scores: jax.Array, keys: jax.Array, places: jax.Array) -> jax.Array:
    """The scores at ``places``, made of their keys."""
    return lax.bitcast_convert_type(turned(keys), jnp.float32)


@scores_of.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    places = primals[2]
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    tangent = lax.gather(tangents[0], lax.reshape(places, (*places.shape, 1)), numbers, (1, 1),
                         mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)  # fmt: skip
    return scores_of(*primals), tangent


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """As `ops.top_k`, of float32[rows, n]."""
    keys, places = keys_and_places(scores, k)
    return scores_of(scores, keys, places), places
