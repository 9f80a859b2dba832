"""Gathers, scatters and slices at places that are values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from ....compat.primitives import primitive
from ...promises import UNIQUE, broken
from .mode import Mode, is_float
from .promises import BrokenPromise
from .rules import RULES, rule


def _start(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    first = [min(max(int(s), 0), n - k) for s, n, k in zip(starts, shape, sizes)]
    return tuple(slice(s, s + k) for s, k in zip(first, sizes))


@rule("dynamic_slice")
def _dynamic_slice(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, *starts = ins
    return x[_start(starts, x.shape, eqn.params["slice_sizes"])]


@rule("dynamic_update_slice")
def _dynamic_update_slice(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, update, *starts = ins
    new = np.array(x)
    new[_start(starts, x.shape, update.shape)] = update
    return new


def _check(eqn: Eqn, ins: Sequence[Any]) -> None:
    """Hold what the equation promises of its index vectors."""
    found = broken(eqn, ins)
    if eqn.primitive is primitive("gather_p"):
        # Gathers don't collide: unique indices that aren't change nothing in what they read.
        found.pop(UNIQUE, None)
    for said in found.values():
        raise BrokenPromise(f"{eqn.primitive.name}: {said}")


def _bounds(eqn: Eqn, shape: Sequence[int], sizes: Sequence[int], start: list[int]) -> list[int]:
    """Where a window begins; empty where it is outside and the mode leaves such windows out."""
    mode = getattr(eqn.params["mode"], "name", "FILL_OR_DROP")
    last = [n - k for n, k in zip(shape, sizes)]
    if all(0 <= s <= m for s, m in zip(start, last)):
        return start
    if mode in ("CLIP", "ONE_HOT"):
        return [min(max(s, 0), m) for s, m in zip(start, last)]
    return []


def _starts(
    indices: Any, at: tuple[int, ...], index_map: Sequence[int], batching: Sequence[int],
    batch_of: Sequence[int], rank: int,
) -> list[int]:  # fmt: skip
    start = [0] * rank
    for d, value in zip(index_map, indices[at]):
        start[d] = int(value)
    for d, b in zip(batching, batch_of):
        start[d] = at[b]
    return start


@rule("gather")
def _gather(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, indices = ins
    dims, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    aval = eqn.outvars[0].aval
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    window = tuple(n for d, n in enumerate(sizes) if d not in gone)
    batch = indices.shape[:-1]
    found = np.full((*batch, *window), _filling(eqn, x.dtype), x.dtype)
    _check(eqn, ins)
    for at in np.ndindex(*batch):
        start = _starts(indices, at, dims.start_index_map, dims.operand_batching_dims,
                        dims.start_indices_batching_dims, x.ndim)  # fmt: skip
        first = _bounds(eqn, x.shape, sizes, start)
        if first or not sizes:
            part = x[tuple(slice(s, s + k) for s, k in zip(first, sizes))]
            found[at] = part.reshape(window)
    others = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]
    order = [0] * len(aval.shape)
    for i, d in enumerate((*others, *dims.offset_dims)):
        order[d] = i
    return np.transpose(found, order)


def _filling(eqn: Eqn, dtype: Any) -> Any:
    value = eqn.params["fill_value"]
    if value is not None:
        return value
    if is_float(dtype):
        return np.nan
    if dtype == np.bool_:
        return True
    info = np.iinfo(dtype)
    return info.max if np.issubdtype(dtype, np.unsignedinteger) else info.min


def _scatter(combine: Callable[[Any, Any], Any]) -> Any:
    def run(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
        x, indices, updates = ins
        dims, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
        skipped = {*dims.inserted_window_dims, *dims.operand_batching_dims}
        kept = [d for d in range(x.ndim) if d not in skipped]
        sizes = [1] * x.ndim
        for d, u in zip(kept, dims.update_window_dims):
            sizes[d] = updates.shape[u]
        scattered = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
        moved = np.transpose(updates, (*scattered, *dims.update_window_dims))
        new = np.array(x)
        _check(eqn, ins)
        for at in np.ndindex(*indices.shape[:-1]):
            start = _starts(indices, at, dims.scatter_dims_to_operand_dims,
                            dims.operand_batching_dims, dims.scatter_indices_batching_dims,
                            x.ndim)  # fmt: skip
            first = _bounds(eqn, x.shape, sizes, start)
            if first or not sizes:
                where = tuple(slice(s, s + k) for s, k in zip(first, sizes))
                update = moved[at].reshape(sizes)
                new[where] = combine_typed(mode, aval, combine, new[where], update)
        return new

    return run


def combine_typed(mode: Mode, aval: Any, combine: Any, old: Any, update: Any) -> Any:
    """A combination rounded to its type; a plain replacement keeps its bits."""
    if combine is _replace:
        return update
    if is_float(aval.dtype):
        return mode.computed(aval, combine(mode.working(old), mode.working(update)))
    return combine(old, update)


def _replace(old: Any, update: Any) -> Any:
    return update


_COMBINERS: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": _replace, "scatter-add": np.add, "scatter-sub": np.subtract,
    "scatter-mul": np.multiply, "scatter-min": np.minimum, "scatter-max": np.maximum,
    "scatter_sub": np.subtract, "scatter_add": np.add,
}  # fmt: skip
RULES.update({name: _scatter(fn) for name, fn in _COMBINERS.items()})
