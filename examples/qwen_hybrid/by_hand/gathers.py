"""One all_gather of several small arrays side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(axis_name: str, axis: int, arrays: list[jax.Array]) -> list[jax.Array]:
    """`side_by_side`, each array's cotangents summed and scattered for itself."""
    return side_by_side(arrays, axis_name, axis)


def _backward(axis_name: str, axis: int, _: None, cotangents: list[Any]) -> tuple[list[Any]]:
    return ([
        np.zeros(_local(g.shape, axis_name, axis), g.dtype) if g.dtype == jax.dtypes.float0
        else lax.psum_scatter(g, axis_name, scatter_dimension=axis, tiled=True)
        for g in cotangents
    ],)  # fmt: skip


def _local(shape: tuple[int, ...], axis_name: str, axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // lax.axis_size(axis_name), *shape[axis + 1 :])


gathered.defvjp(lambda name, axis, arrays: (side_by_side(arrays, name, axis), None), _backward)


def exchange(arrays: Sequence[jax.Array], axis_name: str, axis: int = 0) -> tuple[jax.Array, ...]:
    """As `ops.exchange`."""
    devices = lax.axis_size(axis_name)
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, a in enumerate(arrays):
        if math.prod(a.shape) * a.dtype.itemsize * devices <= SMALL:
            alike.setdefault(a.shape[:-1], []).append(i)
    done: dict[int, jax.Array] = {}
    for few in alike.values():
        if len(few) > 1:
            done |= zip(few, gathered(axis_name, axis, [arrays[i] for i in few]), strict=True)
    return tuple(
        done[i] if i in done else lax.all_gather(a, axis_name, axis=axis, tiled=True)
        for i, a in enumerate(arrays)
    )
