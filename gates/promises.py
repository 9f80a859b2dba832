"""What an equation says of its operands, held against their values.

A compiler may make use of what is said and needn't check it, so a CPU that computes the same shows
nothing. Said are: index vectors in bounds, sorted or unique; the range of `assume_range`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compat.assume_range import assume_range_p
from ..compat.jaxprs import Eqn

SORTED, UNIQUE, INSIDE = "indices_are_sorted", "unique_indices", "PROMISE_IN_BOUNDS"
RANGE = "assume_range"


def made(eqn: Eqn) -> frozenset[str]:
    """The kinds of promises that an equation makes."""
    if eqn.primitive is assume_range_p:
        return frozenset({RANGE})
    if "unique_indices" not in eqn.params or "indices_are_sorted" not in eqn.params:
        return frozenset()
    found = {name for name in (SORTED, UNIQUE) if eqn.params[name]}
    return frozenset(found | ({INSIDE} if _mode(eqn) == INSIDE else set()))


def broken(eqn: Eqn, operands: Sequence[Any]) -> dict[str, str]:
    """The kinds of promises that an equation doesn't keep on these operands, each with how."""
    kinds = made(eqn)
    if not kinds:
        return {}
    if RANGE in kinds:
        return _range(eqn, np.asarray(operands[0]))
    indices = np.asarray(operands[1])
    rows = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    last = _last(eqn, operands)
    outside = ((rows < 0) | (rows > last)).any(axis=1)
    found: dict[str, str] = {}
    if INSIDE in kinds and outside.any():
        at = rows[int(np.argmax(outside))].tolist()
        found[INSIDE] = f"promised in bounds, and {at} isn't: at most {last.tolist()}"
    if SORTED in kinds and not _batching(eqn):
        where = _descent(rows)
        if where is not None:
            pair = rows[where : where + 2].tolist()
            found[SORTED] = f"indices_are_sorted, and {pair[0]} stands before {pair[1]}"
    if UNIQUE in kinds:
        twice = _twice(eqn, indices, rows, last, outside)
        if twice is not None:
            found[UNIQUE] = f"unique_indices, and {twice}"
    return found


def _range(eqn: Eqn, x: Any) -> dict[str, str]:
    lo, hi = eqn.params["lo"], eqn.params["hi"]
    if not x.size or lo <= x.min() <= x.max() <= hi:
        return {}
    return {RANGE: f"[{lo}, {hi}], and there are {x.min()} to {x.max()}"}


def _mode(eqn: Eqn) -> str:
    return str(getattr(eqn.params["mode"], "name", "FILL_OR_DROP"))


def _is_gather(eqn: Eqn) -> bool:
    return "slice_sizes" in eqn.params


def _batching(eqn: Eqn) -> tuple[int, ...]:
    """The dimensions of indices whose place is an index, too."""
    dims = eqn.params["dimension_numbers"]
    found = dims.start_indices_batching_dims if _is_gather(eqn) else (
        dims.scatter_indices_batching_dims)  # fmt: skip
    return tuple(found)


def _windows(eqn: Eqn, operands: Sequence[Any]) -> list[int]:
    """How far a window reaches in each dimension of the array."""
    if _is_gather(eqn):
        return list(eqn.params["slice_sizes"])
    x, _, updates = operands
    dims = eqn.params["dimension_numbers"]
    skipped = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    sizes = [1] * np.ndim(x)
    kept = (d for d in range(np.ndim(x)) if d not in skipped)
    for d, u in zip(kept, dims.update_window_dims, strict=True):
        sizes[d] = np.shape(updates)[u]
    return sizes


def _last(eqn: Eqn, operands: Sequence[Any]) -> Any:
    """The greatest index of each column that is in bounds."""
    dims = eqn.params["dimension_numbers"]
    columns = dims.start_index_map if _is_gather(eqn) else dims.scatter_dims_to_operand_dims
    sizes, shape = _windows(eqn, operands), np.shape(operands[0])
    return np.array([shape[d] - sizes[d] for d in columns], np.int64)


def _descent(rows: Any) -> int | None:
    """Where a row is less than the one before, column by column; None where none is."""
    if len(rows) < 2 or not rows.shape[1]:
        return None
    step = np.sign(rows[1:] - rows[:-1])
    first = np.argmax(step != 0, axis=1)
    down = np.take_along_axis(step, first[:, None], axis=1)[:, 0] < 0
    return int(np.argmax(down)) if down.any() else None


def _twice(eqn: Eqn, indices: Any, rows: Any, last: Any, outside: Any) -> str | None:
    """An index that stands twice among those that are used, as its mode has them."""
    if _mode(eqn) == "CLIP":
        used, where = np.clip(rows, 0, last), np.arange(len(rows))
    else:
        where = np.flatnonzero(~outside)
        used = rows[where]
    if _batching(eqn):
        places = np.indices(indices.shape[:-1]).reshape(indices.ndim - 1, -1).T
        used = np.concatenate([places[where][:, list(_batching(eqn))], used], axis=1)
    if len(used) < 2:
        return None
    if not used.shape[1]:
        return f"{len(used)} have the same place"
    values, counts = np.unique(used, axis=0, return_counts=True)
    most = int(np.max(counts))
    return f"{values[int(np.argmax(counts))].tolist()} stands {most} times" if most > 1 else None
