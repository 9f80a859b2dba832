"""What concrete numbers and arrays tell of themselves."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .fact import UNKNOWN, Affine, Aval, Fact, default, floating, integer, limits, whole


def of_scalar(value: Any, aval: Aval) -> Fact:
    """What a concrete number of type ``aval`` tells."""
    if limits(aval.dtype) is not None:
        return integer(aval, int(value), int(value))
    return floating(float(value)) if jnp.issubdtype(aval.dtype, jnp.floating) else UNKNOWN


def of_array(value: np.ndarray[Any, Any], aval: Aval) -> Fact:
    """What the elements of a concrete array of type ``aval`` tell. Costs a few passes over it."""
    limit = limits(aval.dtype)
    if value.size == 0 or value.shape != aval.shape:
        return default(aval.dtype)
    if limit is None:
        if not _is_float(aval.dtype):
            return UNKNOWN
        return floating(float(value.reshape(()))) if value.size == 1 else _whole_array(value, aval)
    lo, hi = int(value.min()), int(value.max())
    if max(abs(lo), abs(hi)) >= 2**31:  # the checks below must not overflow
        return integer(aval, lo, hi)
    wide = value.astype(np.int64)
    rising = [d for d in range(wide.ndim) if bool((np.diff(wide, axis=d) >= 0).all())]
    return integer(
        aval, lo, hi, _affine_of_array(wide), _permutation_of_array(wide, lo, hi), rising
    )


def _whole_array(value: np.ndarray[Any, Any], aval: Aval) -> Fact:
    exact = value.astype(np.float64)
    if not np.isfinite(exact).all() or (exact != np.floor(exact)).any():
        return UNKNOWN
    return whole(aval, int(np.min(exact)), int(np.max(exact)))


def _affine_of_array(wide: np.ndarray[Any, Any]) -> Affine | None:
    origin = (0,) * wide.ndim
    offset = int(wide[origin])
    strides = []
    rebuilt = np.full(wide.shape, offset, wide.dtype)
    for d, n in enumerate(wide.shape):
        stride = int(wide[(*origin[:d], 1, *origin[d + 1 :])]) - offset if n > 1 else 0
        strides.append(stride)
        steps = np.arange(n) * stride
        rebuilt = rebuilt + steps.reshape((-1,) + (1,) * (wide.ndim - d - 1))
    return Affine(offset, tuple(strides)) if bool((rebuilt == wide).all()) else None


def _permutation_of_array(wide: np.ndarray[Any, Any], lo: int, hi: int) -> int | None:
    for axis, n in enumerate(wide.shape):
        if n > 1 and lo == 0 and hi == n - 1:
            ordered = np.sort(wide, axis=axis)
            steps = np.arange(n).reshape((-1,) + (1,) * (wide.ndim - axis - 1))
            if bool((ordered == steps).all()):
                return axis
    return None


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
