"""Inputs for a site: random, extreme and adversarial, within what is known of each.

Each theme gives all inputs of a site at once, so that ties meet ties and ends meet ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...matchers.fact import Fact, limits
from .evaluate import is_complex, is_float

Array = Any
_Rng = np.random.Generator


@dataclass(frozen=True)
class Input:
    """One input of a site: its type and what every value of it obeys."""

    shape: tuple[int, ...]
    dtype: Any
    fact: Fact
    groups_of: int | None = None
    """Where these are sizes of groups: of how many rows."""
    most: int = 0
    """The greatest dimension around: an index without a known range is tried about it."""

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Theme:
    """How to fill the inputs."""

    name: str
    integers: Callable[[_Rng, int, int, int], Array]
    """``n`` values within inclusive bounds."""
    floats: Callable[[_Rng, int, Any], Array]
    permutation: Callable[[_Rng, int], Array]
    groups: Callable[[_Rng, int, int], Array]
    """Sizes of so many groups of so many rows."""
    real_cotangents: bool = False
    """Whether derivatives are taken at cotangents that are no integers."""
    scaled: bool = False
    """Whether floats are divided by the root of the last dimension, as weights begin: sums over it
    then stay near one, and what is solved by them well conditioned."""
    below: int | None = None
    """Where given, integers without a range are places in a dimension of this size."""


class NoInputs(Exception):
    """No input can be made that obeys what is known; the message says of which."""


def make(theme: Theme, inputs: Sequence[Input], seed: int) -> list[Array]:
    """One array for each input.

    Raises:
        NoInputs: a type or a fact for which there is no rule.
    """
    rng = np.random.default_rng([seed, len(theme.name), *theme.name.encode()])
    return [_filled(theme, one, rng) for one in inputs]


def _filled(theme: Theme, one: Input, rng: _Rng) -> Array:
    fact, dtype, shape = one.fact, one.dtype, one.shape
    limit = limits(dtype)
    if fact.constant is not None and (limit is not None or fact.lo is None):
        value = fact.constant.value
        signed = -abs(value) if fact.constant.negative else value
        return np.full(shape, signed, dtype)
    if limit is None:
        if not is_float(dtype):
            return _other(theme, one, rng)
        if fact.integers() is not None:
            lo, hi = fact.integers() or (0, 0)
            return theme.integers(rng, one.size, lo, hi).reshape(shape).astype(dtype)
        floats = np.asarray(theme.floats(rng, one.size, dtype)).reshape(shape)
        if theme.scaled and len(shape) > 1:
            floats = floats.astype(np.float32) / np.float32(np.sqrt(shape[-1]))
        return floats.astype(dtype)
    if one.groups_of is not None:
        return _in_groups(theme, one, rng)
    if fact.affine is not None:
        return _affine(one, rng)
    if fact.permutation is not None:
        return _permuted(theme, one, rng)
    lo, hi = _bounds(one, rng) if theme.below is None else _places(one, theme.below)
    array = theme.integers(rng, one.size, lo, hi).reshape(shape)
    for axis in fact.rising:
        array = np.sort(array, axis=axis)
    return array.astype(dtype)


def _bounds(one: Input, rng: _Rng) -> tuple[int, int]:
    lo, hi = one.fact.range(one.dtype)
    limit = limits(one.dtype)
    assert limit is not None
    if (one.fact.lo is None or one.fact.hi is None) and rng.integers(2):
        # Half of the time about what could be an index.
        if one.fact.lo is None:
            lo = max(lo, -one.most - 1)
        if one.fact.hi is None:
            hi = min(hi, max(one.most, lo) + 1)
    return lo, max(lo, hi)


def _places(one: Input, below: int) -> tuple[int, int]:
    """Bounds of places in a dimension, as far as what is known allows."""
    lo, hi = one.fact.range(one.dtype)
    if one.fact.lo is None:
        lo = min(max(lo, 0), hi)
    if one.fact.hi is None:
        hi = max(min(hi, below - 1), lo)
    return lo, hi


def _affine(one: Input, rng: _Rng) -> Array:
    affine = one.fact.affine
    assert affine is not None
    steps = np.zeros(one.shape, np.int64)
    for axis, stride in enumerate(affine.strides):
        at = np.arange(one.shape[axis], dtype=np.int64) * stride
        steps = steps + at.reshape([-1 if d == axis else 1 for d in range(len(one.shape))])
    offset = affine.offset
    if offset is None:
        lo, hi = one.fact.range(one.dtype)
        least, most = (int(np.min(steps)), int(np.max(steps))) if steps.size else (0, 0)
        offset = int(rng.integers(lo - least, hi - most, endpoint=True))
    return (steps + offset).astype(one.dtype)


def _permuted(theme: Theme, one: Input, rng: _Rng) -> Array:
    axis = one.fact.permutation
    assert axis is not None
    n = one.shape[axis]
    rest = [s for d, s in enumerate(one.shape) if d != axis]
    rows = [theme.permutation(rng, n) for _ in range(int(np.prod(rest)))]
    whole = np.array(rows, np.int64).reshape(*rest, n)
    return np.moveaxis(whole, -1, axis).astype(one.dtype)


def _in_groups(theme: Theme, one: Input, rng: _Rng) -> Array:
    assert one.groups_of is not None
    if not one.shape:
        raise NoInputs("sizes of groups that are a scalar")
    rest = int(np.prod(one.shape[:-1]))
    rows = [theme.groups(rng, one.shape[-1], one.groups_of) for _ in range(rest)]
    found = np.array(rows, np.int64).reshape(one.shape)
    lo, hi = one.fact.range(one.dtype)
    if found.size and (np.min(found) < lo or np.max(found) > hi):
        raise NoInputs(f"sizes of groups of {one.groups_of} rows known to lie in [{lo}, {hi}]")
    return found.astype(one.dtype)


def _other(theme: Theme, one: Input, rng: _Rng) -> Array:
    if is_complex(one.dtype):
        found = np.empty(one.size, one.dtype)
        # Each by itself: 1j times an infinity has a NaN beside it.
        found.real = theme.floats(rng, one.size, found.real.dtype)
        found.imag = theme.floats(rng, one.size, found.real.dtype)
        return found.reshape(one.shape)
    raise NoInputs(f"no values are known for {one.dtype}")


def obeys(array: Array, fact: Fact) -> str | None:
    """What a fact says that an array doesn't obey; None where it obeys it all.

    Args:
        array: values, of any integer, bool or floating point type.
        fact: the claim.
    """
    a = np.asarray(array)
    if a.size == 0:
        return None
    if is_float(a.dtype):
        a = a.astype(np.float64)
    if a.dtype == np.bool_:
        a = a.astype(np.int64)
    if fact.lo is not None and not (a >= fact.lo).all():
        return f"{a.min()} is below {fact.lo}"
    if fact.hi is not None and not (a <= fact.hi).all():
        return f"{a.max()} is above {fact.hi}"
    if fact.constant is not None and not (a == fact.constant.value).all():
        return f"{a.flat[0]} is not {fact.constant.value}"
    if fact.integers() is not None and not (a == np.floor(a)).all():
        return "a value is no integer"
    if fact.permutation is not None:
        axis = fact.permutation
        places = np.arange(a.shape[axis]).reshape([-1 if d == axis else 1 for d in range(a.ndim)])
        if not (np.sort(a, axis=axis) == places).all():
            return f"it is no permutation along axis {axis}"
    for axis in fact.rising:
        if (np.diff(a, axis=axis) < 0).any():
            return f"it falls along axis {axis}"
    return None if fact.affine is None else _off_line(a, fact)


def _off_line(a: Array, fact: Fact) -> str | None:
    affine = fact.affine
    assert affine is not None
    for axis, stride in enumerate(affine.strides):
        if (np.diff(a.astype(np.int64), axis=axis) != stride).any() and a.shape[axis] > 1:
            return f"it doesn't rise by {stride} along axis {axis}"
    if affine.offset is not None and int(a.flat[0]) != affine.offset:
        return f"it begins with {a.flat[0]}, not {affine.offset}"
    return None


def in_order(mapping: Mapping[Any, Array], names: Sequence[Any]) -> list[Array]:
    """The arrays of some names."""
    return [mapping[n] for n in names]
