"""Key and slot in one 32-bit word, which orders as the pair of them does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WORD_BITS = 32
_WORD = np.uint32


def pack(key: jax.Array, lo: int, b: int, axis: int) -> jax.Array:
    """``uint32(key - lo) << b | slot``, for keys that `fits` admits.

    No step leaves its dtype: what an integer operation does on overflow is not for StableHLO to
    say, so narrow keys are widened before ``lo`` is taken off.
    """
    if key.dtype != jnp.bool_:
        key = key.astype(wide(key.dtype))
        word = (key - key.dtype.type(lo) if lo else key).astype(_WORD)
    else:
        word = key.astype(_WORD) - _WORD(lo) if lo else key.astype(_WORD)
    if b:
        word = (word << _WORD(b)) | lax.broadcasted_iota(_WORD, key.shape, axis)
    return word


def fits(key_bits: int, slot_bits: int, lo: int, dtype: Any) -> bool:
    """Whether keys in a range of ``key_bits`` bits from ``lo`` pack exactly with their slots."""
    signed = jnp.issubdtype(dtype, jnp.signedinteger) and np.dtype(dtype).itemsize <= 4
    if lo and signed and key_bits == WORD_BITS:
        return False  # key - lo would overflow
    return key_bits + slot_bits <= WORD_BITS and slot_bits < WORD_BITS


def wide(dtype: Any) -> Any:
    """The dtype in which differences are exact: ``dtype``, or int32 where that is narrower."""
    return jnp.int32 if np.dtype(dtype).itemsize < 4 else dtype


def unpack_slot(word: jax.Array, b: int, dtype: Any) -> jax.Array:
    """The slot in the low ``b`` bits."""
    return (word & _WORD(2**b - 1)).astype(dtype)


def unpack_key(word: jax.Array, lo: int, b: int, dtype: Any) -> jax.Array:
    """The key in the high bits."""
    offset = word >> _WORD(b) if b else word
    if dtype == jnp.bool_:
        return offset != 0 if not lo else jnp.ones_like(offset, dtype)
    exact = np.dtype(wide(dtype))
    key = offset.astype(exact)
    return (key + exact.type(lo) if lo else key).astype(dtype)
