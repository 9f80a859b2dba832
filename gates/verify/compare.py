"""Whether two results keep a contract, and where not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...passes.base import Contract
from .evaluate import is_complex, is_float

Array = Any
MOST = 1.10
"""Error of a rewrite of contract ROUNDING, as a multiple of the original's."""
HOPELESS = 4
"""Times the bound, above which no more runs are averaged."""


@dataclass(frozen=True)
class Place:
    """Where two results differ."""

    output: int
    index: tuple[int, ...]
    before: str
    after: str
    count: int
    """Elements that differ in this output."""
    of: int
    """Elements of this output."""
    what: str = ""

    def __str__(self) -> str:
        """One line."""
        where = f"output {self.output}{list(self.index)}" if self.index else f"output {self.output}"
        counted = f"{self.count:,} of {self.of:,} elements differ"
        return f"{where}: {self.before} became {self.after}; {counted}" + (
            f"; {self.what}" if self.what else ""
        )


def shown(value: Any) -> str:
    """A number with its bits where the number doesn't tell them."""
    a = np.asarray(value)
    if not is_float(a.dtype):
        return str(a[()])
    word = a.view(np.dtype(f"uint{a.dtype.itemsize * 8}"))
    plain = repr(float(a))
    digits = a.dtype.itemsize * 2
    return f"{plain} (0x{int(word):0{digits}x})" if a != a or a == 0 else plain


def difference(
    before: list[Array], after: list[Array], contract: Contract, arithmetic: bool
) -> Place | None:
    """The first output in which two results break a contract on bits.

    Args:
        before: what stood there made.
        after: what came in its place made.
        contract: BITWISE or VALUE; ROUNDING is taken as to whether numbers stay finite.
        arithmetic: whether floating point numbers are computed: then IEEE 754 leaves open which of
            its operands' payloads a NaN carries on, and so does StableHLO.
    """
    for i, (b, a) in enumerate(zip(before, after, strict=True)):
        if b.shape != a.shape or b.dtype != a.dtype:
            kinds = [f"{x.dtype}{list(x.shape)}" for x in (b, a)]
            return Place(i, (), kinds[0], kinds[1], b.size, b.size, "another type")
        wrong = _wrong(b, a, contract, arithmetic)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            count = int(wrong.sum())
            return Place(i, at, shown(b[at]), shown(a[at]), count, b.size)
    return None


def _wrong(b: Array, a: Array, contract: Contract, arithmetic: bool) -> Array:
    if is_complex(b.dtype):
        parts = (
            (np.ascontiguousarray(p(b)), np.ascontiguousarray(p(a))) for p in (np.real, np.imag)
        )
        real, imag = (_wrong(x.reshape(b.shape), y.reshape(b.shape), contract, arithmetic)
                      for x, y in parts)  # fmt: skip
        return np.asarray(real | imag)
    if not is_float(b.dtype):
        return np.asarray(b != a)
    nan_b, nan_a = np.isnan(b.astype(np.float32)), np.isnan(a.astype(np.float32))
    if contract is Contract.ROUNDING:
        info: Any = jnp.finfo(b.dtype)
        if np.nanmax(np.abs(b.astype(np.float64)), initial=0) > float(info.max) * _NEAR:
            return np.zeros(b.shape, bool)  # what is about to overflow may do so at another point
        return np.asarray(_finite(b) & ~_finite(a))
    if contract is Contract.VALUE:
        wide_b, wide_a = _flushed(b), _flushed(a)
        return np.asarray((wide_b != wide_a) & ~(nan_b & nan_a))
    differ = _bits(b) != _bits(a)
    return np.asarray(differ & ~(nan_b & nan_a)) if arithmetic else np.asarray(differ)


_NEAR = 2.0**-16


def _bits(a: Array) -> Array:
    a = np.asarray(a)  # which numpy's own way to make it contiguous would give a dimension
    return a.view(np.dtype(f"uint{a.dtype.itemsize * 8}"))


def _finite(a: Array) -> Array:
    return np.isfinite(a.astype(np.float64))


def _flushed(a: Array) -> Array:
    info: Any = jnp.finfo(a.dtype)
    wide = a.astype(np.float64)
    return np.where(np.abs(wide) < float(info.smallest_normal), 0.0, wide)


@dataclass(frozen=True)
class Errors:
    """By how much a rewrite's errors exceed the original's in one output, over some runs.

    Errors are against the exact values. Ratios are averaged as logarithms: a run whose numbers
    happen to be badly conditioned counts no more than another.
    """

    great: float = 0.0
    norm: float = 0.0
    runs: int = 0

    def plus(self, before: Array, after: Array, exact: Array) -> Errors:
        """With another run.

        What the original is measured by is its own error, or that of the exact value rounded once
        to the output's type where that is larger: nothing can be asked to round less.
        """
        sane = np.isfinite(exact) & _finite(before) & _finite(after)
        exact = np.where(sane, exact, 0)
        errors = []
        for side in (before, after, exact.astype(before.dtype)):
            errors.append(np.abs(np.where(sane, side.astype(np.float64), 0) - exact))
        great = [float(e.max(initial=0)) for e in errors]
        unit = max(great) or 1.0
        norms = [float(np.sqrt(((e / unit) ** 2).sum())) for e in errors]
        return Errors(
            self.great + _log_ratio(great[1], max(great[0], great[2])),
            self.norm + _log_ratio(norms[1], max(norms[0], norms[2])),
            self.runs + 1,
        )

    @property
    def ratios(self) -> tuple[float, float]:
        """Error of the rewrite by that of the original: the greatest, and the errors' norm."""
        n = max(self.runs, 1)
        return float(np.exp(self.great / n)), float(np.exp(self.norm / n))

    @property
    def holds(self) -> bool:
        """Whether both are within the bound."""
        return max(self.ratios) <= MOST

    @property
    def is_hopeless(self) -> bool:
        """Whether they are so far above it that more runs would hardly mend it."""
        return max(self.ratios) > HOPELESS * MOST


_LEAST = 1e-3
"""A rewrite that is a thousand times as precise in one run makes up for no more than that."""


def _log_ratio(after: float, before: float) -> float:
    if after == 0 and before == 0:
        return 0.0
    if before == 0:
        return float("inf")
    return float(np.log(max(after / before, _LEAST)))


ULPS = 16
"""How many units in the last place of an output's greatest value sums in another order may move."""


@dataclass(frozen=True)
class Apart:
    """How far two results of one output are from each other, over some runs."""

    far: float = 0.0
    greatest: float = 0.0
    """The greatest number that the original makes."""
    epsilon: float = 0.0

    def plus(self, before: Array, after: Array) -> Apart:
        """With another run, of results of one floating point type."""
        info: Any = jnp.finfo(before.dtype)
        b, a = before.astype(np.float64), after.astype(np.float64)
        alike = (b == a) | (np.isnan(b) & np.isnan(a))
        with np.errstate(invalid="ignore"):
            far = np.where(alike, 0.0, np.abs(a - b))
        far = np.nan_to_num(far, nan=np.inf, posinf=np.inf)
        most = np.abs(np.where(np.isfinite(b), b, 0.0)).max(initial=0)
        return Apart(
            max(self.far, float(far.max(initial=0))), max(self.greatest, float(most)),
            float(info.eps),
        )  # fmt: skip

    @property
    def close(self) -> bool:
        """Whether no more lies between them than sums in another order may make."""
        return self.far <= ULPS * self.epsilon * self.greatest
