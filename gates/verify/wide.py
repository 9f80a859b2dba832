"""Values of a rounding contract at exponents across a type's range, as far as nothing leaves it.

What over- or underflows may do so at another point once a rounding has moved: inputs on which it
does, on either side and at any step, show nothing. Neither do those at which the original itself
is far from the exact values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...passes.engine.fragments import Cut
from .check import Broken, Tally, values_of
from .compare import Apart, Place, shown
from .evaluate import Unrunnable, in_float64, is_float
from .fillings import filled
from .problem import Problem
from .themes import across_range

Array = Any
SHARES = (0.9, 0.45, 0.3, 0.2)
"""Of the exponents of a type, tried until nothing leaves the range: of a product each has half."""


def wide_differs(problem: Problem, tally: Tally, end: float, seeds: int) -> Broken | None:
    """The first input on which the rewrite is far off and the original isn't."""
    if problem.across:
        return None
    for seed in range(seeds):
        for share in SHARES:
            if time.monotonic() > end:
                return None
            theme = across_range(share)
            arrays = next((a for _, a in filled(problem, [theme], 1, seed)), None)
            if arrays is None:
                continue
            try:
                exact = _within(problem, problem.before, arrays)
                if exact is None or _within(problem, problem.after, arrays) is None:
                    continue
            except Unrunnable:
                return None
            before, after = values_of(problem, arrays)
            tally.runs += 1
            if isinstance(after, str):
                return Broken(after, theme.name, tuple(arrays))
            place = far(before, after, exact)
            if place is not None:
                return Broken(place, theme.name, tuple(arrays))
            break
    return None


def _within(problem: Problem, part: Cut, arrays: Sequence[Array]) -> list[Array] | None:
    """A side's outputs in float64; None where a value leaves the range of its type."""
    left: list[Any] = []

    def watch(var: Any, value: Any) -> None:
        dtype = getattr(var.aval, "dtype", np.dtype(np.int32))
        if left or not is_float(dtype):
            return
        info: Any = jnp.finfo(dtype)
        size = np.abs(np.asarray(value, np.float64))
        out = (size > float(info.max)) | ((size < float(info.smallest_normal)) & (size > 0))
        if (out | np.isnan(size)).any():
            left.append(var)

    with problem.context(wide=True):
        values = [jnp.asarray(a) for a in arrays]
        found = in_float64(part.eqns, part.inputs, part.outputs, values, watch)
        return None if left else [np.asarray(v) for v in found]


def far(before: list[Array], after: list[Array], exact: list[Array]) -> Place | None:
    """Where a rewrite's result is far from the original's, which is close to the exact one."""
    for i, (b, a, e) in enumerate(zip(before, after, exact, strict=True)):
        if not is_float(b.dtype) or a.dtype != b.dtype or a.shape != b.shape:
            continue  # compared elsewhere
        if Apart().plus(b, e).close and not Apart().plus(b, a).close:
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
            gap = np.nan_to_num(gap, nan=np.inf)
            at = tuple(int(n) for n in np.unravel_index(int(np.argmax(gap)), gap.shape))
            return Place(i, at, shown(b[at]), shown(a[at]), int((gap > 0).sum()), gap.size)
    return None
