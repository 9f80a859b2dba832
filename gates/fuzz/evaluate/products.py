"""Products of matrices and what solves them: element by element, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import Mode, is_float
from .rules import rule


def _sum_type(mode: Mode, aval: Any, *xs: Any) -> Any:
    if not is_float(aval.dtype):
        return aval.dtype
    return np.float64 if mode.wide or aval.dtype == np.float64 else np.float32


def _contracted(mode: Mode, dtype: Any, a: Any, b: Any) -> Any:
    """``[batch, m, k]`` by ``[batch, k, n]``; terms are added in order, whatever the sizes."""
    total = np.zeros((a.shape[0], a.shape[1], b.shape[2]), dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    for k in range(a.shape[2]):
        total = total + a[:, :, k, None] * b[:, None, k, :]
        if mode.noise is not None and is_float(total.dtype):
            total = mode._disturbed(total.dtype, total)
    return total


def _as_matrices(x: Any, batch: Sequence[int], contract: Sequence[int], last: bool) -> Any:
    free = [d for d in range(x.ndim) if d not in batch and d not in contract]
    order = (*batch, *free, *contract) if last else (*batch, *contract, *free)

    def size(dims: Sequence[int]) -> int:
        return int(np.prod([x.shape[d] for d in dims], dtype=np.int64))

    middle = (size(free), size(contract)) if last else (size(contract), size(free))
    return np.transpose(x, order).reshape(size(batch), *middle)


@rule("dot_general")
def _dot_general(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    ((ca, cb), (ba, bb)), aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    a, b = _as_matrices(ins[0], ba, ca, True), _as_matrices(ins[1], bb, cb, False)
    found = _contracted(mode, _sum_type(mode, aval), a, b)
    return mode.computed(aval, found.reshape(aval.shape))


@rule("ragged_dot_general")
def _ragged_dot(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    a, b, sizes = ins
    numbers, aval = eqn.params["ragged_dot_dimension_numbers"], eqn.outvars[0].aval
    ((ca, cb), (ba, bb)) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    if ba or bb or sizes.ndim != 1 or eqn.params["group_offset"] is not None:
        raise NotImplementedError("a batched ragged_dot")
    dtype, ends = _sum_type(mode, aval), np.cumsum(sizes)
    begins, rows = ends - sizes, np.arange(a.shape[ragged])
    total = np.zeros(aval.shape, dtype)
    for g in range(len(sizes)):
        mine = (rows >= begins[g]) & (rows < ends[g])
        along = [1] * a.ndim
        along[ragged] = len(rows)
        part = np.where(mine.reshape(along), a, np.zeros((), a.dtype))
        if ragged in ca:
            other = np.moveaxis(b, cb[list(ca).index(ragged)], 0)
            other = np.where(mine.reshape(-1, *[1] * (b.ndim - 1)), other, np.zeros((), b.dtype))
            other = np.moveaxis(other, 0, cb[list(ca).index(ragged)])
            left, right = _as_matrices(part, (), ca, True), _as_matrices(other, (), cb, False)
            total[g] = _contracted(mode, dtype, left, right).reshape(aval.shape[1:])
        else:
            (group,) = groups
            other = np.take(b, g, group)
            dims = tuple(d - (d > group) for d in cb)
            left, right = _as_matrices(part, (), ca, True), _as_matrices(other, (), dims, False)
            found = _contracted(mode, dtype, left, right).reshape(aval.shape)
            at = sum(1 for d in range(ragged) if d not in ca)
            shape = [1] * found.ndim
            shape[at] = len(rows)
            total = np.where(mine.reshape(shape), found, total)
    return mode.computed(aval, total)


@rule("triangular_solve")
def _triangular_solve(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    p, aval = eqn.params, eqn.outvars[0].aval
    a, b = ins
    if p["conjugate_a"]:
        raise NotImplementedError("a conjugate triangular_solve")
    dtype = _sum_type(mode, aval)
    a, b, lower = a.astype(dtype), b.astype(dtype), p["lower"]
    if not p["left_side"]:  # x a = b is aᵀ xᵀ = bᵀ
        b = np.swapaxes(b, -1, -2)
    if p["transpose_a"] != (not p["left_side"]):
        a, lower = np.swapaxes(a, -1, -2), not lower
    n = a.shape[-1]
    x = np.zeros_like(b)
    for i in range(n) if lower else reversed(range(n)):
        row = b[..., i, :]
        for j in range(i) if lower else range(i + 1, n):
            row = row - a[..., i, j, None] * x[..., j, :]
            if mode.noise is not None:
                row = mode._disturbed(row.dtype, row)
        x[..., i, :] = row if p["unit_diagonal"] else row / a[..., i, i, None]
    x = x if p["left_side"] else np.swapaxes(x, -1, -2)
    return mode.computed(aval, x)
