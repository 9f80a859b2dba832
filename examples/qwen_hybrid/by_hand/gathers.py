"""One all_gather of several small arrays side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Groups = tuple[tuple[int, ...], ...]
"""Which arrays, by number, go together."""

SMALL = 8 * 2**20
"""Bytes of a result; to lay larger ones side by side takes longer than another collective."""


def side_by_side(arrays: Sequence[jax.Array], axis_name: str, axis: int) -> list[jax.Array]:
    """All arrays by one all_gather: of equal dtypes as they are, else as bits in 32-bit words."""
    dtypes = [a.dtype for a in arrays]
    if len(set(dtypes)) > 1:
        arrays = [
            lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}").astype(jnp.uint32)
            for a in arrays
        ]
    last = arrays[0].ndim - 1
    whole = lax.all_gather(lax.concatenate(arrays, last), axis_name, axis=axis, tiled=True)
    parts = lax.split(whole, [a.shape[last] for a in arrays], last)
    if len(set(dtypes)) > 1:
        parts = [
            lax.bitcast_convert_type(p.astype(f"uint{8 * d.itemsize}"), d)
            for p, d in zip(parts, dtypes, strict=True)
        ]
    return list(parts)


def together(
    axis_name: str, axis: int, groups: Groups, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Arrays on all devices: those of a group by one all_gather, where the first of them stands."""
    done: dict[int, jax.Array] = {}
    for i, a in enumerate(arrays):
        group = next((g for g in groups if i in g), ())
        if group and i == group[0]:
            parts = side_by_side([arrays[j] for j in group], axis_name, axis)
            done |= zip(group, parts, strict=True)
        elif not group:
            done[i] = lax.all_gather(a, axis_name, axis=axis, tiled=True)
    return [done[i] for i in range(len(arrays))]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gathered(axis_name: str, axis: int, groups: Groups, arrays: list[jax.Array]) -> list[jax.Array]:
    """`together`; each array's cotangents are summed and scattered for themselves."""
    return together(axis_name, axis, groups, arrays)


def _backward(
    axis_name: str, axis: int, groups: Groups, _: None, cotangents: list[Any]
) -> tuple[list[Any]]:
    done = []
    for g in reversed(cotangents):
        if g.dtype == jax.dtypes.float0:  # of integers
            shape = list(g.shape)
            shape[axis] //= lax.axis_size(axis_name)
            done.append(np.zeros(shape, g.dtype))
        else:
            done.append(lax.psum_scatter(g, axis_name, scatter_dimension=axis, tiled=True))
    return (done[::-1],)


gathered.defvjp(lambda *args: (together(*args), None), _backward)


def exchange(arrays: Sequence[jax.Array], axis_name: str, axis: int = 0) -> tuple[jax.Array, ...]:
    """As `ops.exchange`: small arrays of equal shapes, up to the last dimension, go together."""
    devices = lax.axis_size(axis_name)
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, a in enumerate(arrays):
        if math.prod(a.shape) * a.dtype.itemsize * devices <= SMALL:
            alike.setdefault(a.shape[:-1], []).append(i)
    groups = tuple(tuple(few) for few in alike.values() if len(few) > 1)
    return tuple(gathered(axis_name, axis, groups, list(arrays)))


def ring(
    chunks: Sequence[Sequence[jax.Array]], axis_name: str
) -> Callable[[int], tuple[jax.Array, ...]]:
    """As `ops.ring`: the routing of all chunks goes together, their tokens one by one."""
    size = len(chunks[0])
    every = exchange([a for chunk in chunks for a in chunk], axis_name)
    return lambda i: every[i * size : (i + 1) * size]
