"""The greatest elements of a row and their places, by searches on integers.

Floats are compared as integers that order as their bits do; the integers found turn back into the
values' bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import vma
from ...matchers.assume_range import assume_range

_UPPER = -(1 << 16)
"""The upper half of a word of 32 bits."""


def greatest(x: jax.Array, k: int, widened: bool = False) -> tuple[jax.Array, jax.Array]:
    """The ``k`` greatest elements along the last axis, in IEEE's total order, and their places.

    Args:
      x: ``[..., n]`` of any real dtype of 8 bits or more.
      k: at least 1, at most n.
      widened: whether to read a bfloat16 through float32.

    Returns:
      ``([..., k], int32[..., k])``; of equal elements the first comes first.
    """
    keys, places = choose(sortable(x, widened), k)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return unsorted(keys, x.dtype), places
    return values(x, keys, places, widened), places


def sortable(x: jax.Array, widened: bool = False) -> jax.Array:
    """Integers of 32 or 64 bits that order as the elements of ``x`` do in `jax.lax.top_k`.

    Where ``widened``, the upper half of each is that of the element in float32.
    """
    if widened:
        return sortable(x.astype(jnp.float32)) & jnp.int32(_UPPER)
    dtype = np.dtype(x.dtype)
    narrow = dtype.itemsize < 4
    if not jnp.issubdtype(dtype, jnp.floating):
        return x.astype(jnp.int32) if narrow else x
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * dtype.itemsize}"))
    bits = bits.astype(jnp.int32) if narrow else bits
    return _turned(bits, 8 * dtype.itemsize)


def unsorted(key: jax.Array, dtype: Any, widened: bool = False) -> jax.Array:
    """The elements of type ``dtype`` that `sortable` made ``key`` of."""
    dtype = np.dtype(dtype)
    if widened:
        bits = _turned(key, 32) & jnp.int32(_UPPER)
        return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return key != 0 if dtype == np.bool_ else key.astype(dtype)
    bits = _turned(key, 8 * dtype.itemsize).astype(f"int{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(bits, dtype)


def _turned(bits: jax.Array, width: int) -> jax.Array:
    """Of a negative float the greater magnitude is the lesser number: all bits but the sign turn.

    Its own inverse.
    """
    sign = lax.shift_right_arithmetic(bits, bits.dtype.type(8 * bits.dtype.itemsize - 1))
    return bits ^ (sign & bits.dtype.type(2 ** (width - 1) - 1))


def choose(key: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k greatest keys along the last axis and their places, the first of equal ones first."""
    least, size = key.dtype.type(jnp.iinfo(key.dtype).min), key.shape[-1]
    where = jax.typeof(key).sharding  # the types of the results are to be top_k's
    place = lax.broadcasted_iota(np.int32, key.shape, key.ndim - 1, out_sharding=where)
    place = vma.pvary(place, vma.varying(jax.typeof(key)))
    none = np.int32(size)  # no place; at least one element is left, and comes first
    best, found = _first(key, place, least, none)
    keys, places = [best], [found]
    for _ in range(k - 1):
        left = (key < best) | ((key == best) & (place > found))
        best, found = _first(_where(left, key, least), _where(left, place, none), least, none)
        keys.append(best)
        places.append(found)
    every = lax.concatenate(keys, key.ndim - 1), lax.concatenate(places, key.ndim - 1)
    return every[0], assume_range(every[1], 0, size - 1)


def _first(key: jax.Array, place: jax.Array, least: Any, none: Any) -> tuple[jax.Array, jax.Array]:
    """The greatest key along the last axis and the least place of it, in one reduction."""
    last = key.ndim - 1
    best, found = lax.reduce((key, place), (least, none), _greater, (last,))
    return lax.expand_dims(best, [last]), lax.expand_dims(found, [last])


def _greater(a: Any, b: Any) -> Any:
    (one, here), (other, there) = a, b
    first = (one > other) | ((one == other) & (here < there))
    return lax.select(first, one, other), lax.select(first, here, there)


def _where(mask: jax.Array, value: jax.Array, otherwise: Any) -> jax.Array:
    """`jnp.where` with a scalar: no call, of which a long search would hold dozens."""
    return lax.select(mask, value, lax.full_like(value, otherwise))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def values(x: jax.Array, keys: jax.Array, places: jax.Array, widened: bool) -> jax.Array:
    """The elements of ``x`` at ``places``, made of their keys."""
    del places
    return unsorted(keys, x.dtype, widened)


def _jvp(widened: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return values(*primals, widened), gather_last(tangents[0], primals[2])


values.defjvp(_jvp)


def gather_last(x: jax.Array, places: jax.Array) -> jax.Array:
    """``x[..., places]`` row by row: its transpose is the scatter-add of top_k's own."""
    last = x.ndim - 1
    rows = tuple(range(last))
    numbers = lax.GatherDimensionNumbers((), (last,), (last,), rows, rows)
    sizes = (1,) * x.ndim
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places[..., None], numbers, sizes, mode=mode)
