"""What to fill inputs with: ties, ends, orders, zeros of both signs, NaNs with payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .inputs import Theme

_Rng = np.random.Generator
MOST_SPECIAL = 20
"""No type has more `special_values`."""
MOST_VALUES = 64
"""Runs that may be spent on giving integers every value of their ranges."""
_SOME = 64
"""Values of which a theme of ties takes its few."""


def _uniform(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    return rng.integers(lo, hi, n, dtype=np.int64, endpoint=True) if hi < 2**63 else (
        rng.integers(lo, hi, n, dtype=np.uint64, endpoint=True)
    )  # fmt: skip


def few_values(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    """Ties of three values."""
    pool = np.append(_uniform(rng, 2, lo, hi), _uniform(rng, 1, lo, min(hi, lo + _SOME)))
    return rng.choice(pool, n)


def at_end(which: str) -> Any:
    """One end of the range, or both, or what is near."""

    def fill(rng: _Rng, n: int, lo: int, hi: int) -> Any:
        kind = np.uint64 if hi >= 2**63 else np.int64
        ends = {"lo": [lo], "hi": [hi], "both": [lo, hi], "near": [lo, hi, min(lo + 1, hi)]}[which]
        return np.resize(np.array(ends, kind), n)

    return fill


def _powers(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    """Powers of two and their neighbours, in another order each time: where words and tiles end."""
    kind = np.uint64 if hi >= 2**63 else np.int64
    near = {sign * 2**k + d for k in range(64) for d in (-1, 0, 1) for sign in (1, -1)}
    found = rng.permutation(np.array(sorted(v for v in near if lo <= v <= hi) or [lo], kind))
    return np.resize(found, n)


def _values_from(first: int) -> Any:
    def fill(rng: _Rng, n: int, lo: int, hi: int) -> Any:
        if hi - lo >= MOST_VALUES * max(n, 1):
            return _uniform(rng, n, lo, hi)
        turn = np.arange(first * n, (first + 1) * n, dtype=np.int64) % (hi - lo + 1)
        return rng.permutation(turn.astype(np.uint64) + np.uint64(lo) if hi >= 2**63 else turn + lo)

    return fill


spread = _values_from(0)
"""Each value of a range about as often as another."""


def each_value(ranges: Sequence[tuple[int, int, int]]) -> tuple[Theme, ...]:
    """Themes in which each integer input has every value of its range, where that is few runs.

    Args:
        ranges: elements of each, and the ends of its range. None follow of ranges that would need
            more than `MOST_VALUES` runs.
    """
    runs = [-(-(hi - lo + 1) // n) for n, lo, hi in ranges if n > 0]
    most = max((r for r in runs if r <= MOST_VALUES), default=0)
    return tuple(
        Theme(f"every value, part {i}", _values_from(i), _normal, _shuffled, _parts)
        for i in range(most)
    )


def _sorted(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    return np.sort(_uniform(rng, n, lo, hi))


def _falling(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    return np.sort(few_values(rng, n, lo, hi))[::-1]


def _mostly_one(rng: _Rng, n: int, lo: int, hi: int) -> Any:
    found = np.full(n, _uniform(rng, 1, lo, hi)[0])
    if n:
        found[rng.integers(n)] = hi
    return found


def _normal(rng: _Rng, n: int, dtype: Any) -> Any:
    return rng.standard_normal(n).astype(np.float32)


def _small(rng: _Rng, n: int, dtype: Any) -> Any:
    return rng.integers(-4, 5, n).astype(np.float32)


def _few_floats(rng: _Rng, n: int, dtype: Any) -> Any:
    return rng.choice(np.array([0.5, -1.25, 3.0], np.float32), n)


def _zeros(rng: _Rng, n: int, dtype: Any) -> Any:
    return rng.choice(np.array([0.0, -0.0], np.float32), n).astype(dtype)


def _exponents(rng: _Rng, n: int, dtype: Any) -> Any:
    info: Any = jnp.finfo(dtype)
    most = max(int(np.log2(float(info.max))) // 3, 1)
    return np.ldexp(rng.standard_normal(n), rng.integers(-most, most, n)).astype(dtype)


def _moderate(rng: _Rng, n: int, dtype: Any) -> Any:
    return np.ldexp(rng.standard_normal(n), rng.integers(-8, 9, n)).astype(np.float32)


def _halfway(rng: _Rng, n: int, dtype: Any) -> Any:
    """Halfway between two neighbours of bfloat16, and one bit off: what rounds worst."""
    words = rng.integers(0x3F00, 0x4080, n).astype(np.uint32) << np.uint32(16)
    words |= np.uint32(0x8000)
    words = (words.astype(np.int64) + rng.integers(-1, 2, n)).astype(np.uint32)
    signs = rng.choice(np.array([1, -1], np.float32), n)
    return words.view(np.float32) * signs


def special_values(dtype: Any) -> Any:
    """NaNs of both signs and other payloads, infinities, zeros, subnormals and both ends."""
    info: Any = jnp.finfo(dtype)
    width = int(info.bits)
    if width <= 8:
        return _narrow_values(dtype, width)
    word = np.dtype(f"uint{width}")
    quiet = int(np.array(np.inf, dtype).view(word)) | 1 << (int(info.nmant) - 1)
    sign = 1 << (width - 1)
    nans = np.array([quiet, quiet | 5, quiet | sign, quiet | sign | 3], word).view(dtype)
    tiny = np.array([1, 1 | sign, (1 << int(info.nmant)) - 1], word).view(dtype)
    plain = [0.0, -0.0, np.inf, -np.inf, 1.0, -1.0, float(info.max), float(info.min)]
    return np.concatenate([nans, tiny, np.array(plain).astype(dtype)])


def _narrow_values(dtype: Any, width: int) -> Any:
    """The same of a type of so few bits that all its values can be looked at.

    Some have no infinity, one NaN only, or one zero.
    """
    info: Any = jnp.finfo(dtype)
    every = np.arange(1 << width, dtype=np.uint8).view(dtype)
    wide = every.astype(np.float64)
    size = np.abs(wide)
    least = float(info.smallest_normal)
    below = size[(size > 0) & (size < least)]
    sizes = [0.0, np.inf, 1.0, least, float(info.max), *below[[0, -1]][: below.size]]
    return every[np.isnan(wide) | np.isin(size, sizes) | (wide == float(info.min))]


def _special(rng: _Rng, n: int, dtype: Any) -> Any:
    return rng.choice(special_values(dtype), n)


def _sprinkled(rng: _Rng, n: int, dtype: Any) -> Any:
    found = rng.standard_normal(n).astype(dtype)
    at = rng.random(n) < 0.1
    if n and not at.any():
        at[rng.integers(n)] = True
    found[at] = rng.choice(special_values(dtype), int(at.sum()))
    return found


def _mostly(filler: float | None) -> Any:
    """All but a few one special value, as rows that are masked out are; what is left, anything."""

    def fill(rng: _Rng, n: int, dtype: Any) -> Any:
        values = special_values(dtype)
        fill_with = rng.choice(values) if filler is None else np.array(filler).astype(dtype)
        found = np.full(n, fill_with, dtype)
        at = rng.random(n) < 1 / 32
        found[at] = _sprinkled(rng, int(at.sum()), dtype)
        other = at & (rng.random(n) < 0.5)
        found[other] = rng.choice(values, int(other.sum()))
        return found

    return fill


def _subnormal(rng: _Rng, n: int, dtype: Any) -> Any:
    info: Any = jnp.finfo(dtype)
    least = float(info.smallest_normal)
    return (rng.standard_normal(n) * least).astype(dtype)


def _ordered(step: int) -> Any:
    return lambda rng, n, dtype: np.sort(rng.standard_normal(n))[::step].astype(np.float32)


def _nan_only(rng: _Rng, n: int, dtype: Any) -> Any:
    values = special_values(dtype)
    nans = values[np.isnan(values.astype(np.float64))]
    return rng.choice(nans if nans.size else values, n)


def _constant(rng: _Rng, n: int, dtype: Any) -> Any:
    return np.full(n, rng.standard_normal(), np.float32)


def _shuffled(rng: _Rng, n: int) -> Any:
    return rng.permutation(n)


def _turned(rng: _Rng, n: int) -> Any:
    return np.roll(np.arange(n), 1)


def _ends_swapped(rng: _Rng, n: int) -> Any:
    found = np.arange(n)
    if n:
        found[0], found[-1] = n - 1, 0
    return found


def _parts(rng: _Rng, groups: int, rows: int) -> Any:
    cuts = np.sort(rng.integers(0, rows, max(groups - 1, 0), endpoint=True))
    return np.diff(np.concatenate([[0], cuts, [rows]]))[:groups]


def _tiled(rng: _Rng, groups: int, rows: int) -> Any:
    """Groups that end where tiles of some power of two do, and some of just one tile."""
    tiles = [t for t in (8, 16, 32, 64, 128, 256, 512) if t <= rows]
    if not tiles:
        return _parts(rng, groups, rows)
    tile = int(rng.choice(tiles))
    cuts = np.sort(rng.integers(0, rows // tile, max(groups - 1, 0), endpoint=True)) * tile
    return np.diff(np.concatenate([[0], cuts, [rows]]))[:groups]


def _not_all(rng: _Rng, groups: int, rows: int) -> Any:
    return _parts(rng, groups, rows - rows // 3)


def _one_group(which: int) -> Any:
    def fill(rng: _Rng, groups: int, rows: int) -> Any:
        found = np.zeros(groups, np.int64)
        if groups:
            found[which] = rows
        return found

    return fill


def _alternate(rng: _Rng, groups: int, rows: int) -> Any:
    found = np.zeros(groups, np.int64)
    found[1::2] = _parts(rng, len(found[1::2]), rows) if groups > 1 else 0
    return found


def _none(rng: _Rng, groups: int, rows: int) -> Any:
    return np.zeros(groups, np.int64)


_same, _back = (lambda rng, n: np.arange(n)), (lambda rng, n: np.arange(n)[::-1])

EXACT = (
    Theme("random", _uniform, _normal, _shuffled, _parts),
    Theme("few values", few_values, _small, _shuffled, _parts),
    Theme("ties", few_values, _few_floats, _back, _alternate),
    Theme("lowest, zeros of both signs", at_end("lo"), _zeros, _same, _one_group(0)),
    Theme("highest, special values", at_end("hi"), _special, _back, _one_group(-1)),
    Theme("both ends, wide exponents", at_end("both"), _exponents, _turned, _not_all),
    Theme("sorted", _sorted, _ordered(1), _same, _parts),
    Theme("reversed", _falling, _ordered(-1), _ends_swapped, _alternate),
    Theme("all but one alike, halfway cases", _mostly_one, _halfway, _shuffled, _one_group(0)),
    Theme("few values, subnormals", few_values, _subnormal, _shuffled, _parts),
    Theme("near the ends, some special values", at_end("near"), _sprinkled, _shuffled, _not_all),
    Theme("random, NaN only", _uniform, _nan_only, _turned, _none),
    Theme("random, one value", _uniform, _constant, _shuffled, _alternate),
    Theme("random, special values", _uniform, _special, _shuffled, _parts),
    Theme("powers of two, mostly -inf", _powers, _mostly(-np.inf), _ends_swapped, _tiled),
    Theme("few values, mostly one special value", few_values, _mostly(None), _shuffled, _tiled),
)
"""For contracts on bits, and for what is no number of a rounding contract."""


def each_special(sizes: Sequence[int]) -> tuple[Theme, ...]:
    """Themes that give every special value to inputs of a few elements, which chance may not.

    Args:
        sizes: elements of each floating point input. None follow where one holds them all.
    """
    most = max(sizes, default=MOST_SPECIAL)
    if not 0 < most < MOST_SPECIAL:
        return ()
    starts = range(0, MOST_SPECIAL, most)
    return tuple(
        Theme(f"special values from number {i}", _uniform, _special_from(i), _shuffled, _parts)
        for i in starts
    )


def _special_from(first: int) -> Any:
    def fill(rng: _Rng, n: int, dtype: Any) -> Any:
        return np.resize(np.roll(special_values(dtype), -first), n)

    return fill


SUMMED = (
    Theme("small integers", _uniform, _small, _shuffled, _parts),
    Theme("small integers, ties", few_values, _small, _back, _alternate),
    Theme("small integers, one group", _mostly_one, _small, _turned, _one_group(0)),
)
"""Sums of which are exact in any order: for derivatives."""

FINITE = (
    Theme("random", _uniform, _normal, _shuffled, _parts),
    Theme("few values", few_values, _small, _shuffled, _parts),
    Theme("lowest, zeros of both signs", at_end("lo"), _zeros, _same, _one_group(0)),
    Theme("highest, halfway cases", at_end("hi"), _halfway, _back, _one_group(-1)),
    Theme("both ends, moderate exponents", at_end("both"), _moderate, _turned, _not_all),
    Theme("all but one alike, subnormals", _mostly_one, _subnormal, _shuffled, _none),
    Theme("reversed", _falling, _ordered(-1), _ends_swapped, _alternate),
    Theme("powers of two, tiles", _powers, _normal, _shuffled, _tiled),
)
"""For contracts on rounding: what is finite stays so, and integers are the same."""

SPOILED = Theme("random, some special values", _uniform, _sprinkled, _shuffled, _not_all)
"""To see how far a NaN or an infinity reaches."""

REAL = Theme("normal", _uniform, _normal, _shuffled, _parts, real_cotangents=True, scaled=True)
"""For derivatives at what is no integer."""

MODERATE = Theme("moderate exponents", _uniform, _moderate, _shuffled, _tiled)
"""For derivatives away from one, too: at up to 2⁸ and down to 2⁻⁸ times a normal number."""

ROUNDED = (
    Theme("normal", _uniform, _normal, _shuffled, _parts, real_cotangents=True, scaled=True),
    Theme("normal, ties", few_values, _normal, _shuffled, _not_all, scaled=True),
    Theme("halfway, tiles", _uniform, _halfway, _shuffled, _tiled, scaled=True),
    Theme(
        "normal, one group",
        _mostly_one,
        _normal,
        _turned,
        _one_group(-1),
        real_cotangents=True,
        scaled=True,
    ),
)
"""For errors against a more precise evaluation."""


def across_range(share: float) -> Theme:
    """Floats of both signs and of so much of their type's exponents."""

    def floats(rng: _Rng, n: int, dtype: Any) -> Any:
        info: Any = jnp.finfo(dtype)
        most = int(np.log2(float(info.max)) * share)
        sizes = np.ldexp(rng.uniform(1, 2, n), rng.integers(-most, most, n, endpoint=True))
        return (sizes * rng.choice([1.0, -1.0], n)).astype(dtype)

    return Theme(f"{share:.0%} of the exponents", _uniform, floats, _shuffled, _parts)
