"""The groups' sizes from two one-hot matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def group_sizes(ids: jax.Array, groups: int) -> jax.Array:
    """As `ops.group_sizes`: the matrix unit counts how often each pair of digits occurs."""
    shift = ((groups - 1).bit_length() + 1) // 2
    ids = jnp.clip(ids, 0)

    def one_hot(digits: jax.Array, count: int) -> jax.Array:
        shape = count, ids.shape[0]
        here = jnp.broadcast_to(digits, shape) == lax.broadcasted_iota(jnp.int32, shape, 0)
        return here.astype(jnp.bfloat16)

    high = one_hot(ids >> jnp.int32(shift), -(-groups // 2**shift))
    low = one_hot(ids & jnp.int32(2**shift - 1), 2**shift)
    pairs = lax.dot_general(high, low, (((1,), (1,)), ((), ())),
                            preferred_element_type=jnp.float32)  # fmt: skip
    return pairs.reshape(-1)[:groups].astype(jnp.int32)
