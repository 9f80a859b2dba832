"""Operations that move elements and compute none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import Mode
from .rules import rule


@rule("reshape", "squeeze", "expand_dims")
def _reshape(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x = ins[0]
    if eqn.params.get("dimensions") and eqn.primitive.name == "reshape":
        x = np.transpose(x, eqn.params["dimensions"])
    return x.reshape(eqn.outvars[0].aval.shape)


@rule("broadcast_in_dim")
def _broadcast_in_dim(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, shape = ins[0], tuple(eqn.params["shape"])
    middle = [1] * len(shape)
    for at, n in zip(eqn.params["broadcast_dimensions"], x.shape):
        middle[at] = n
    return np.broadcast_to(x.reshape(middle), shape)


@rule("transpose")
def _transpose(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.transpose(ins[0], eqn.params["permutation"])


@rule("rev")
def _rev(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.flip(ins[0], eqn.params["dimensions"])


@rule("slice")
def _slice(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    p = eqn.params
    steps = p["strides"] or (1,) * ins[0].ndim
    return ins[0][tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


@rule("split")
def _split(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    ends = np.cumsum([int(n) for n in eqn.params["sizes"]])[:-1]
    return list(np.split(ins[0], ends, eqn.params["axis"]))


@rule("concatenate")
def _concatenate(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.concatenate(list(ins), eqn.params["dimension"])


@rule("stack")
def _stack(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.stack(list(ins), eqn.params["axis"])


@rule("unstack")
def _unstack(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return list(np.moveaxis(ins[0], eqn.params["axis"], 0))


@rule("tile")
def _tile(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.tile(ins[0], eqn.params["reps"])


@rule("iota")
def _iota(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    p = eqn.params
    shape = tuple(p["shape"])
    along = [1] * len(shape)
    along[p["dimension"]] = shape[p["dimension"]]
    counted = np.arange(shape[p["dimension"]]).astype(p["dtype"]).reshape(along)
    return np.broadcast_to(counted, shape)


@rule("zeros_like", "empty_like")
def _zeros_like(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.zeros_like(ins[0])


@rule("empty", "full")
def _empty(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    aval = eqn.outvars[0].aval
    return np.zeros(aval.shape, aval.dtype)


@rule("pad")
def _pad(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, value = ins
    for axis, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        n = x.shape[axis]
        if n and inside:
            spread = np.full((*x.shape[:axis], n + (n - 1) * inside, *x.shape[axis + 1 :]),
                             value, x.dtype)  # fmt: skip
            spread[(slice(None),) * axis + (slice(None, None, inside + 1),)] = x
            x = spread
        lower, upper = max(-low, 0), x.shape[axis] - max(-high, 0)
        x = x[(slice(None),) * axis + (slice(lower, upper),)]
        widths = [(0, 0)] * x.ndim
        widths[axis] = max(low, 0), max(high, 0)
        grown = np.full([n + a + b for n, (a, b) in zip(x.shape, widths)], value, x.dtype)
        grown[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths))] = x
        x = grown
    return x
