"""Errors of values far from one: all floating point inputs of a run times one power of two.

Errors are relative to a run's own numbers, so that outputs which are small there count as much as
others do near one. A value of the original that over- or underflows, or saturates, makes a run say
nothing: so does one of the rewrite, but in a type that holds less than the original's types do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...passes.engine.fragments import Cut
from .check import Broken, Tally, rounded
from .evaluate import Unrunnable, in_float64, is_complex, is_float
from .fillings import filled
from .inputs import Theme
from .places import base
from .problem import Problem, walk

Array = Any
LADDERS = ((-24, -12, -6), (-60, -48, -36), (60, 36, 24, 12, 6))
"""Powers of two; of each row the first at which nothing leaves its type's range."""

Counts = list[tuple[int, int]]
"""Zeros, and what isn't finite, of each value in turn."""


def far_from_one(problem: Problem, tally: Tally, end: float) -> Broken | None:
    """The first magnitude at which the rewrite's errors exceed the bound."""
    if problem.across or not any(_is_free(problem, i) for i in range(len(problem.inputs))):
        return None
    runs = _Runs(problem)
    for ladder in LADDERS:
        try:
            power = next((p for p in ladder if runs.shows(p, 0)), None)
        except Unrunnable:
            return None  # said where errors near one are measured
        if power is None:
            said = " to ".join(f"2^{p}" for p in (ladder[0], ladder[-1]))
            tally.notes += (f"no errors at {said} times normal numbers: values leave their range",)
            continue
        theme = runs.theme(power)
        broken, _ = rounded(problem, "values", tally, end, (theme,), runs.filled, 1)
        if broken is not None or time.monotonic() > end:
            return broken
    return None


class _Runs:
    """Inputs of one problem at some magnitudes, of which nothing leaves its type's range."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.near = problem, base(problem)
        self.range = _narrowest(problem.before)
        self.powers: dict[str, int] = {}
        self.known: dict[tuple[int, int], bool] = {}
        self.counts: dict[int, tuple[Counts, Counts | None]] = {}

    def theme(self, power: int) -> Theme:
        """Its name says the power."""
        name = f"2^{power} times {self.near.name}"
        self.powers[name] = power
        near = self.near
        return Theme(name, near.integers, near.floats, near.permutation, near.groups)

    def filled(
        self, problem: Problem, themes: Sequence[Theme], seeds: int, first: int = 0
    ) -> Iterator[tuple[Theme, list[Array]]]:
        """As `check.filled`, of one of these themes."""
        power = self.powers[themes[0].name]
        for seed in range(first, first + seeds):
            if self.shows(power, seed):
                yield themes[0], self._at(power, seed) or []

    def _at(self, power: int, seed: int) -> list[Array] | None:
        arrays = next((a for _, a in filled(self.problem, [self.near], 1, seed)), None)
        if arrays is None:
            return None
        return [times(a, power) if _is_free(self.problem, i) else a for i, a in enumerate(arrays)]

    def shows(self, power: int, seed: int) -> bool:
        """Whether no value leaves its type's range, or becomes zero or infinite, at a power."""
        key = power, seed
        if key not in self.known:
            self.known[key] = self._shows(power, seed)
        return self.known[key]

    def _shows(self, power: int, seed: int) -> bool:
        near, far = self._at(0, seed), self._at(power, seed)
        if near is None or far is None:
            return False
        if seed not in self.counts:
            self.counts[seed] = self._counts(near)
        before, after = self.counts[seed]
        found, left = _counted(self.problem, self.problem.before, far)
        if left or found != before:
            return False
        if after is None:
            return True
        found, left = _counted(self.problem, self.problem.after, far)
        if any(_as_wide(t, self.range) for t in left):
            return False
        # What is small and becomes zero is the rewrite's doing; what is large may saturate.
        return power < 0 or bool(left) or found == after

    def _counts(self, near: Sequence[Array]) -> tuple[Counts, Counts | None]:
        before, _ = _counted(self.problem, self.problem.before, near)
        try:
            return before, _counted(self.problem, self.problem.after, near)[0]
        except Unrunnable:
            return before, None


def _is_free(problem: Problem, i: int) -> bool:
    one = problem.inputs[i]
    return is_float(one.dtype) and one.fact.constant is None and one.fact.integers() is None


def times(array: Array, power: int) -> Array:
    """Floats times a power of two."""
    return np.ldexp(array.astype(np.float64), power).astype(array.dtype)


def _counted(
    problem: Problem, part: Cut, arrays: Sequence[Array]
) -> tuple[Counts, list[np.dtype[Any]]]:
    """Of each value of a side in float64, its zeros and infinities; and types that are left."""
    counts: Counts = []
    left: list[np.dtype[Any]] = []

    def watch(var: Any, value: Any) -> None:
        dtype = getattr(var.aval, "dtype", np.dtype(np.int32))
        if not (is_float(dtype) or is_complex(dtype)):
            return
        info: Any = jnp.finfo(dtype)
        wide = np.asarray(value, np.complex128 if is_complex(dtype) else np.float64)
        parts = (wide.real, wide.imag) if is_complex(dtype) else (wide,)
        for size in map(np.abs, parts):
            ends = np.isfinite(size)
            counts.append((int((size == 0).sum()), int((~ends).sum())))
            out = (size > float(info.max)) | ((size < float(info.smallest_normal)) & (size > 0))
            if (out & ends).any():
                left.append(dtype)

    with problem.context(wide=True):
        values = [jnp.asarray(a) for a in arrays]
        in_float64(part.eqns, part.inputs, part.outputs, values, watch)
    return counts, left


def _narrowest(part: Cut) -> tuple[float, float]:
    """The least of the greatest and the greatest of the least numbers of a side's float types."""
    atoms = (*part.inputs, *(v for e in walk(part.eqns) for v in (*e.invars, *e.outvars)))
    types = {a.aval.dtype for a in atoms if hasattr(a.aval, "dtype")}
    infos: list[Any] = [jnp.finfo(t) for t in types if is_float(t)]
    return (
        min(float(i.max) for i in infos),
        max(float(i.smallest_normal) for i in infos),
    )


def _as_wide(dtype: Any, than: tuple[float, float]) -> bool:
    info: Any = jnp.finfo(dtype)
    # bfloat16 ends a little below float32, and no exponent sooner.
    return float(info.max) * 2 > than[0] and float(info.smallest_normal) <= than[1]
