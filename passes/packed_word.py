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
    """``uint32(key - lo) << b | slot``; exact modulo 2³² for integer keys of any width."""
    word = key.astype(_WORD)
    if lo:
        word = word - _WORD(lo % 2**WORD_BITS)
    if b:
        word = (word << _WORD(b)) | lax.broadcasted_iota(_WORD, key.shape, axis)
    return word


def unpack_slot(word: jax.Array, b: int, dtype: Any) -> jax.Array:
    """The slot in the low ``b`` bits."""
    return (word & _WORD(2**b - 1)).astype(dtype)


def unpack_key(word: jax.Array, lo: int, b: int, dtype: Any) -> jax.Array:
    """The key in the high bits."""
    offset = word >> _WORD(b) if b else word
    if dtype == jnp.bool_:
        return offset != 0 if not lo else jnp.ones_like(offset, dtype)
    # In the key's own dtype: a word is too short for the ``lo`` of a 64-bit key.
    key = offset.astype(dtype)
    return key + modular(lo, dtype) if lo else key


def modular(value: int, dtype: Any) -> np.generic:
    """The scalar of an integer dtype that equals ``value`` modulo 2 to the dtype's width."""
    info = jnp.iinfo(dtype)
    least, greatest = int(info.min), int(info.max)
    scalar: np.generic = np.dtype(dtype).type((value - least) % (greatest - least + 1) + least)
    return scalar
