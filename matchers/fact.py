"""What is known of a value in every execution: range, affine form, order, permutation, constant.

A `Fact` is a claim that no execution can leave. Where an operation may wrap around, be out of
bounds or be undefined, nothing is claimed. Facts hold for integers and bools; of floating point
values constants are known, and the range of those that are exact integers, such as ids that went
through a matmul with a one-hot matrix and come back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Aval = Any
"""Anything with ``shape`` and ``dtype``."""


@dataclass(frozen=True, slots=True)
class Affine:
    """``value[i] = offset + Σ strides[d] · i[d]`` in exact integers, without wrap-around.

    Strides along dimensions of size one are zero.
    """

    offset: int | None
    """None: some integer, the same one for the whole array, that isn't known."""
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """One scalar that every element equals; zeros of either sign are kept apart. Never NaN."""

    value: int | float
    negative: bool
    """The sign bit, which tells ``-0.0`` from ``0.0``."""

    @classmethod
    def of(cls, value: int | float) -> Constant:
        """The constant ``value``."""
        return cls(value, math.copysign(1.0, value) < 0 if type(value) is float else value < 0)


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value. `UNKNOWN` knows nothing.

    Of floating point values ``lo`` and ``hi`` are either both known or neither; where they are,
    every element is a finite integer within them.
    """

    lo: int | None = None
    """Inclusive lower bound; None where only the dtype bounds a signed integer."""
    hi: int | None = None
    """Inclusive upper bound; None where only the dtype bounds an integer."""
    affine: Affine | None = None
    permutation: int | None = None
    """An axis along which every 1-D slice is a permutation of ``0 … n-1``."""
    constant: Constant | None = None
    rising: tuple[int, ...] = ()
    """Axes of integers along which no 1-D slice ever falls, but for those that ``affine`` tells."""

    def is_zero(self) -> bool:
        """Every element is zero, of either sign."""
        return self.constant is not None and self.constant.value == 0

    def integers(self) -> tuple[int, int] | None:
        """The range of floating point values that are all integers; None if that isn't known."""
        return None if self.lo is None or self.hi is None else (self.lo, self.hi)

    def within(self, lo: int, hi: int) -> bool:
        """Every element is known to lie in ``[lo, hi]``."""
        return self.lo is not None and self.hi is not None and lo <= self.lo and self.hi <= hi

    def increasing(self, axis: int, size: int) -> bool:
        """Strictly increasing along ``axis``, which has ``size`` elements."""
        return size <= 1 or (self.affine is not None and self.affine.strides[axis] > 0)

    def decreasing(self, axis: int, size: int) -> bool:
        """Strictly decreasing along ``axis``, which has ``size`` elements."""
        return size <= 1 or (self.affine is not None and self.affine.strides[axis] < 0)

    def rises(self, axis: int, size: int) -> bool:
        """Sorted along ``axis``, which has ``size`` elements: equal neighbours are allowed."""
        if size <= 1 or axis in self.rising:
            return True
        return self.affine is not None and self.affine.strides[axis] >= 0

    def is_iota(self, axis: int, shape: Sequence[int]) -> bool:
        """``value[i] = i[axis]``."""
        wanted = tuple(int(d == axis and n > 1) for d, n in enumerate(shape))
        return self.affine == Affine(0, wanted)

    def range(self, dtype: Any) -> tuple[int, int]:
        """Inclusive bounds, with the limits of integer or bool ``dtype`` where none are known."""
        limit = limits(dtype)
        if limit is None:
            raise TypeError(f"a range needs an integer or bool dtype, got {dtype}")
        return (
            limit[0] if self.lo is None else self.lo,
            limit[1] if self.hi is None else self.hi,
        )


UNKNOWN = Fact()


def _fact(
    lo: int | None,
    hi: int | None,
    affine: Affine | None,
    permutation: int | None,
    constant: Constant | None,
    rising: tuple[int, ...] = (),
) -> Fact:
    """`UNKNOWN` itself where nothing is known, so that identity is enough to ask for it."""
    fact = Fact(lo, hi, affine, permutation, constant, rising)
    return UNKNOWN if fact == UNKNOWN else fact


_BOOL = Fact(0, 1)
_UNSIGNED = Fact(0)

_iinfo: Any = jnp.iinfo
_limits: dict[Any, tuple[int, int] | None] = {}
_defaults: dict[Any, Fact] = {None: UNKNOWN}


def limits(dtype: Any) -> tuple[int, int] | None:
    """The least and greatest value of an integer or bool dtype; None for any other."""
    try:
        return _limits[dtype]
    except KeyError:
        return _limits.setdefault(dtype, _find_limits(dtype))


def _find_limits(dtype: Any) -> tuple[int, int] | None:
    if dtype == np.dtype(bool):
        return 0, 1
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    info = _iinfo(dtype)
    return int(info.min), int(info.max)


def default(dtype: Any) -> Fact:
    """What the dtype alone tells: bools are 0 or 1, unsigned integers aren't negative."""
    try:
        return _defaults[dtype]
    except KeyError:
        limit = limits(dtype)
        fact = UNKNOWN
        if limit is not None and limit[0] == 0:
            fact = _BOOL if limit[1] == 1 else _UNSIGNED
        return _defaults.setdefault(dtype, fact)


def default_of(aval: Aval) -> Fact:
    """`default` of an abstract value; references and tokens have no facts."""
    if not hasattr(aval, "shape") or hasattr(aval, "inner_aval"):
        return UNKNOWN
    return default(aval.dtype)


def integer(
    aval: Aval,
    lo: int,
    hi: int,
    affine: Affine | None = None,
    permutation: int | None = None,
    rising: Sequence[int] = (),
) -> Fact:
    """The fact about an integer or bool array whose exact results lie in ``[lo, hi]``.

    Results outside the dtype would wrap around, so then nothing but the dtype's own is known, of
    the other claims neither. Claims are completed from each other: an affine form gives a range,
    a range of one value gives a constant, and so on.
    """
    dtype = aval.dtype
    limit = limits(dtype)
    if limit is None or lo < limit[0] or hi > limit[1]:
        return default(dtype)
    shape = aval.shape
    if affine is not None:
        affine = Affine(
            affine.offset, tuple(s if n > 1 else 0 for s, n in zip(affine.strides, shape))
        )
        if affine.offset is not None:
            least, greatest = affine_range(affine, shape)
            lo, hi = max(lo, least), min(hi, greatest)
        if permutation is None:
            permutation = _affine_permutation(affine, shape)
    if permutation is not None:
        lo, hi = max(lo, 0), min(hi, shape[permutation] - 1)
        if permutation in rising and shape[permutation] > 1:  # in order there is only one
            affine = Affine(0, tuple(int(d == permutation) for d in range(len(shape))))
    if lo > hi:  # only of values that never exist: an empty array, or code that is never reached
        return default(dtype)
    if lo == hi:
        constant = Constant.of(lo)
        return Fact(lo, hi, Affine(lo, (0,) * len(shape)), permutation, constant)
    return _fact(
        None if lo == limit[0] and lo < 0 else lo,
        None if hi == limit[1] and hi > 1 else hi,
        affine,
        permutation,
        None,
        _not_told(rising, affine, shape) if rising else (),
    )


def _not_told(
    rising: Sequence[int], affine: Affine | None, shape: Sequence[int]
) -> tuple[int, ...]:
    """The axes of ``rising`` that an affine form doesn't show to rise, and that can."""
    told = () if affine is None else affine.strides
    return tuple(
        sorted(d for d in rising if shape[d] > 1 and not (affine is not None and told[d] >= 0))
    )


def rising_axes(fact: Fact, shape: Sequence[int]) -> tuple[int, ...]:
    """All axes of an integer array of ``shape`` along which it is known never to fall."""
    if fact.affine is None:
        return fact.rising
    return tuple(d for d, n in enumerate(shape) if fact.rises(d, n))


def affine_range(affine: Affine, shape: Sequence[int]) -> tuple[int, int]:
    """Least and greatest value of an affine array with a known offset."""
    assert affine.offset is not None
    steps = [s * max(n - 1, 0) for s, n in zip(affine.strides, shape)]
    return (
        affine.offset + sum(s for s in steps if s < 0),
        affine.offset + sum(s for s in steps if s > 0),
    )


def _affine_permutation(affine: Affine, shape: Sequence[int]) -> int | None:
    moving = [d for d, s in enumerate(affine.strides) if s]
    if len(moving) != 1 or affine.offset is None:
        return None
    (axis,) = moving
    stride = affine.strides[axis]
    start = 0 if stride == 1 else shape[axis] - 1
    return axis if abs(stride) == 1 and affine.offset == start else None


_LARGEST = 2**53


def floating(value: float) -> Fact:
    """The fact about a floating point array that holds ``value`` everywhere."""
    if value != value:
        return UNKNOWN
    if abs(value) <= _LARGEST and value == int(value):
        return Fact(int(value), int(value), constant=Constant.of(float(value)))
    return Fact(constant=Constant.of(float(value)))


@functools.cache
def exact_integers(dtype: Any) -> int | None:
    """``n`` where the floating point ``dtype`` holds each integer of ``[-n, n]`` exactly.

    None for the types of 8 bits and fewer, and for any that isn't floating point.
    """
    wide = (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16)
    if not any(dtype == np.dtype(d) for d in wide):
        return None
    info: Any = jnp.finfo(dtype)
    return 1 << (int(info.nmant) + 1)


def whole(aval: Aval, lo: int, hi: int) -> Fact:
    """The fact about a floating point array of integers in ``[lo, hi]``, if each is exact in it."""
    most = exact_integers(aval.dtype) if _is_float(aval.dtype) else None
    return UNKNOWN if most is None or lo > hi or lo < -most or hi > most else Fact(lo, hi)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def join(a: Fact, b: Fact) -> Fact:
    """What holds of a value that is, as a whole, one of the two."""
    if a == b:
        return a
    affine = None
    if a.affine is not None and b.affine is not None and a.affine.strides == b.affine.strides:
        same = a.affine.offset == b.affine.offset
        affine = a.affine if same else Affine(None, a.affine.strides)
    return _fact(
        *_hull(a, b),
        affine,
        a.permutation if a.permutation == b.permutation else None,
        a.constant if a.constant == b.constant else None,
        _both_rise(a, b, affine),
    )


def _both_rise(a: Fact, b: Fact, affine: Affine | None) -> tuple[int, ...]:
    if not (a.rising or b.rising or (affine is None and a.affine and b.affine)):
        return ()
    axes = {*a.rising, *b.rising}
    if a.affine is not None and b.affine is not None:
        axes.update(range(len(a.affine.strides)))
    told = () if affine is None else affine.strides
    return tuple(
        sorted(
            d
            for d in axes
            if a.rises(d, 2) and b.rises(d, 2) and not (affine is not None and told[d] >= 0)
        )
    )


def mix(a: Fact, b: Fact) -> Fact:
    """What holds of an array each of whose elements is the one of either array at that place."""
    known = a.affine is not None and a.affine.offset is not None and a.affine == b.affine
    return _fact(
        *_hull(a, b),
        a.affine if known else None,
        a.permutation if known and a.permutation == b.permutation else None,
        a.constant if a.constant == b.constant else None,
    )


def elements(fact: Fact) -> Fact:
    """What is left when the elements are moved, repeated or dropped: no order."""
    if fact.affine is None and fact.permutation is None and not fact.rising:
        return fact
    return _fact(fact.lo, fact.hi, None, None, fact.constant)


def _hull(a: Fact, b: Fact) -> tuple[int | None, int | None]:
    return (
        None if a.lo is None or b.lo is None else min(a.lo, b.lo),
        None if a.hi is None or b.hi is None else max(a.hi, b.hi),
    )


def complete(fact: Fact, aval: Aval) -> Fact:
    """``fact`` about an array of ``aval``'s type, its claims completed from each other."""
    if limits(aval.dtype) is None:
        return fact
    lo, hi = fact.range(aval.dtype)
    return integer(aval, lo, hi, fact.affine, fact.permutation, fact.rising)


def meet(fact: Fact, aval: Aval, lo: int, hi: int) -> Fact | None:
    """``fact`` with the range narrowed to ``[lo, hi]``; None if no value is left."""
    least, greatest = fact.range(aval.dtype)
    lo, hi = max(lo, least), min(hi, greatest)
    if lo > hi:
        return None
    return integer(aval, lo, hi, fact.affine, fact.permutation, fact.rising)
