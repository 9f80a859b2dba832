"""Reductions, running sums, sorts and searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import Mode, is_float
from .rules import RULES, rule


def _first_axes(x: Any, axes: Sequence[int]) -> Any:
    """The elements to be reduced along a first dimension, in row-major order."""
    others = [d for d in range(x.ndim) if d not in axes]
    moved = np.transpose(x, (*axes, *others))
    count = int(np.prod([x.shape[d] for d in axes], dtype=np.int64))
    return moved.reshape(count, *(x.shape[d] for d in others))


def _reduction(combine: Any, start: Any) -> Any:
    """One element after another, in the type that narrow floats are computed with."""

    def run(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
        aval = eqn.outvars[0].aval
        x = _first_axes(ins[0], tuple(eqn.params["axes"]))
        x = mode.working(x) if is_float(aval.dtype) else x
        total = np.full(x.shape[1:], start(x.dtype), x.dtype)
        for part in x:
            total = combine(total, part)
            if mode.noise is not None and is_float(aval.dtype):
                total = mode._disturbed(total.dtype, np.asarray(total))
        return mode.computed(aval, total)

    return run


def _lowest(dtype: Any) -> Any:
    if dtype == np.bool_:
        return False
    return -np.inf if is_float(dtype) else np.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if dtype == np.bool_:
        return True
    return np.inf if is_float(dtype) else np.iinfo(dtype).max


for _name, _fn, _begin in (
    ("reduce_sum", np.add, lambda dtype: 0),
    ("reduce_prod", np.multiply, lambda dtype: 1),
    ("reduce_max", np.maximum, _lowest),
    ("reduce_min", np.minimum, _highest),
    ("reduce_and", np.bitwise_and, lambda d: True if d == np.bool_ else np.asarray(-1).astype(d)),
    ("reduce_or", np.bitwise_or, lambda dtype: 0),
    ("reduce_xor", np.bitwise_xor, lambda dtype: 0),
):
    RULES[_name] = _reduction(_fn, _begin)


@rule("argmax", "argmin")
def _arg(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x = mode.nominal(eqn.invars[0].aval, ins[0])
    (axis,) = eqn.params["axes"]
    if is_float(x.dtype):
        x = x.astype(np.float64)  # numpy, too, finds the first NaN, or the first of equals
    elif x.dtype == np.bool_:
        x = x.astype(np.int8)
    find = np.argmax if eqn.primitive.name == "argmax" else np.argmin
    return find(x, axis).astype(eqn.params["index_dtype"])


@rule("cumsum", "cumprod", "cummax", "cummin")
def _running(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    axis, aval = eqn.params["axis"], eqn.outvars[0].aval
    x = np.flip(ins[0], axis) if eqn.params["reverse"] else ins[0]
    x = np.moveaxis(mode.working(x) if is_float(aval.dtype) else x, axis, 0)
    combine = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum,
               "cummin": np.minimum}[eqn.primitive.name]  # fmt: skip
    found: list[Any] = []
    for part in x:
        found.append(part if not found else combine(found[-1], part))
    whole = np.moveaxis(np.stack(found), 0, axis) if found else ins[0]
    whole = np.flip(whole, axis) if eqn.params["reverse"] else whole
    return mode.computed(aval, whole)


def sort_key(mode: Mode, aval: Any, x: Any) -> Any:
    """Integers or bools that compare as jax's sort compares: zeros alike, NaNs last and alike."""
    x = mode.nominal(aval, x)
    if not is_float(x.dtype):
        return x
    return np.where(np.isnan(x), np.inf, x).astype(np.float64), np.isnan(x)


@rule("sort")
def _sort(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    axis, p = eqn.params["dimension"], eqn.params
    if ins[0].shape[axis] == 0:
        return list(ins)
    keys: list[Any] = []
    for atom, x in zip(eqn.invars[: p["num_keys"]], ins):
        key = sort_key(mode, atom.aval, x)
        # Later entries count for more with lexsort; of one key, whether it is a NaN counts first.
        keys.extend([key] if not isinstance(key, tuple) else [key[1], key[0]])
    n = ins[0].shape[axis]
    counted = np.arange(n) if p["is_stable"] else -np.arange(n)
    along = [1] * ins[0].ndim
    along[axis] = n
    # Where nothing promises an order among equals, the one that nobody expects.
    ties = np.broadcast_to(counted.reshape(along), ins[0].shape)
    order = np.lexsort([ties, *reversed(keys)], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in ins]


@rule("top_k")
def _top_k(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    p = eqn.params
    axis = p.get("axis", ins[0].ndim - 1)
    x = mode.nominal(eqn.invars[0].aval, ins[0])
    order = np.lexsort([_descending(x)], axis=axis) if x.size else np.zeros(x.shape, np.int64)
    places = np.take(order, np.arange(p["k"]), axis)
    return [np.take_along_axis(ins[0], places, axis), places.astype(eqn.outvars[1].aval.dtype)]


def _descending(x: Any) -> Any:
    """Integers that rise where values fall, in IEEE's total order for floats."""
    if not is_float(x.dtype):
        return -x.astype(object) if x.dtype.itemsize == 8 else -x.astype(np.int64)
    bits = 8 * x.dtype.itemsize
    signed = np.frombuffer(np.ascontiguousarray(x).tobytes(), f"int{bits}").reshape(x.shape)
    wide = signed.astype(np.int64)
    return -np.where(wide < 0, wide ^ ((1 << (bits - 1)) - 1), wide)
