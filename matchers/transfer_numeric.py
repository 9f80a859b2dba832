"""Transfer rules of elementwise arithmetic.

Each rule maps an equation and the facts of its operands to the fact of its result. Arithmetic is
done in exact integers; `integer` gives up where a result could leave the dtype and wrap around.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .fact import (
    UNKNOWN,
    Affine,
    Aval,
    Fact,
    default,
    floating,
    integer,
    limits,
    rising_axes,
    whole,
)

Facts = Sequence[Fact]
Rule = Callable[[Any, Facts], Fact | Sequence[Fact]]

_finfo: Any = jnp.finfo


def affine_of(fact: Fact, aval: Aval, rank: int) -> Affine | None:
    """The affine form of an operand, as broadcast to ``rank``: one element is always affine."""
    if fact.affine is not None:
        strides = fact.affine.strides
        return fact.affine if len(strides) == rank else Affine(fact.affine.offset, (0,) * rank)
    return Affine(None, (0,) * rank) if all(n == 1 for n in aval.shape) else None


def rising(facts: Facts, eqn: Any) -> tuple[int, ...]:
    """The axes along which every operand rises; one that is a scalar stays level along all."""
    rank = len(eqn.outvars[0].aval.shape)
    found: set[int] | None = None
    for fact, var in zip(facts, eqn.invars):
        if len(var.aval.shape) != rank or not rank:
            continue
        axes = rising_axes(fact, var.aval.shape)
        found = set(axes) if found is None else found & set(axes)
        if not found:
            return ()
    return tuple(found or ())


def affine_sum(a: Affine | None, b: Affine | None, sign: int) -> Affine | None:
    """``a + sign · b``."""
    if a is None or b is None:
        return None
    known = a.offset is not None and b.offset is not None
    return Affine(
        a.offset + sign * b.offset if known else None,  # type: ignore[operator]
        tuple(x + sign * y for x, y in zip(a.strides, b.strides)),
    )


def affine_scaled(a: Affine | None, factor: Fact) -> Affine | None:
    """An affine form times a constant."""
    if a is None or factor.constant is None:
        return None
    by = int(factor.constant.value)
    return Affine(None if a.offset is None else a.offset * by, tuple(s * by for s in a.strides))


def _float_result(
    fold: Callable[..., float], aval: Aval, facts: Facts, *, rounds: bool = True
) -> Fact:
    """The constant result of float constants, where it is exact in the dtype."""
    constants = [f.constant for f in facts]
    if any(c is None for c in constants) or not jnp.issubdtype(aval.dtype, jnp.floating):
        return default(aval.dtype)
    values = [float(c.value) for c in constants if c is not None]
    if not rounds:
        return floating(fold(*values))
    if not all(map(math.isfinite, values)):
        return UNKNOWN
    result = fold(*values)
    return floating(result) if all_exact(aval.dtype, result, *values) else UNKNOWN


def all_exact(dtype: Any, *values: float) -> bool:
    """Whether values are zero or normal numbers of ``dtype``: subnormals may be flushed."""
    info = _finfo(dtype)
    return all(
        math.isfinite(v)
        and (v == 0 or abs(v) >= float(info.tiny))
        and abs(v) <= float(info.max)
        and float(jnp.dtype(dtype).type(v)) == v
        for v in values
    )


def whole_result(pick: Callable[..., tuple[int, int]], aval: Aval, facts: Facts) -> Fact:
    """The fact about integers in floats, from the ranges of operands that all hold integers."""
    ranges = [f.integers() for f in facts]
    known = [r for r in ranges if r is not None]
    return whole(aval, *pick(*known)) if len(known) == len(ranges) else UNKNOWN


def corners(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The least and greatest product of numbers in two ranges."""
    found = [x * y for x in a for y in b]
    return min(found), max(found)


def operand_ranges(eqn: Any, facts: Facts) -> list[tuple[int, int]]:
    """The operands' ranges, with their dtypes' limits where none are known."""
    return [f.range(v.aval.dtype) for f, v in zip(facts, eqn.invars)]


def _additive(sign: int, fold: Callable[..., float]) -> Rule:
    def reach(x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
        return (x[0] + y[0], x[1] + y[1]) if sign > 0 else (x[0] - y[1], x[1] - y[0])

    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        if limits(out.dtype) is None:
            found = _float_result(fold, out, facts)
            return found if found is not UNKNOWN else whole_result(reach, out, facts)
        (a, b), (c, d) = operand_ranges(eqn, facts)
        lo, hi = reach((a, b), (c, d))
        rank = len(out.shape)
        x, y = (affine_of(f, v.aval, rank) for f, v in zip(facts, eqn.invars))
        up = rising(facts, eqn) if sign > 0 else _rising_less(facts, eqn)
        return integer(out, lo, hi, affine_sum(x, y, sign), _reflected(eqn, facts, sign), up)

    return rule


def _rising_less(facts: Facts, eqn: Any) -> tuple[int, ...]:
    """The axes along which the one operand rises while what is taken from it doesn't."""
    rank, (x, y) = len(eqn.outvars[0].aval.shape), (v.aval.shape for v in eqn.invars)
    form = facts[1].affine
    if len(x) != rank or (form is None and y):
        return ()
    axes = rising_axes(facts[0], x)
    return axes if form is None or not y else tuple(d for d in axes if form.strides[d] <= 0)


def _reflected(eqn: Any, facts: Facts, sign: int) -> int | None:
    """The axis of ``(n - 1) - p``, a permutation where ``p`` is one."""
    axis, constant = facts[1].permutation, facts[0].constant
    if sign > 0 or axis is None or constant is None:
        return None
    return axis if constant.value == eqn.invars[1].aval.shape[axis] - 1 else None


def mul(eqn: Any, facts: Facts) -> Fact:
    """Products of the range's corners; an affine form times a constant stays affine."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        found = _float_result(operator.mul, out, facts)
        return found if found is not UNKNOWN else whole_result(corners, out, facts)
    lo, hi = corners(*operand_ranges(eqn, facts))
    rank = len(out.shape)
    x, y = (affine_of(f, v.aval, rank) for f, v in zip(facts, eqn.invars))
    affine = affine_scaled(x, facts[1]) or affine_scaled(y, facts[0])
    return integer(out, lo, hi, affine, None, _rising_product(eqn, facts))


def _rising_product(eqn: Any, facts: Facts) -> tuple[int, ...]:
    """Of rising operands neither of which is ever negative, or one of which is such a constant."""
    constants = [f.constant is not None and f.constant.value >= 0 for f in facts]
    never_negative = all(lo >= 0 for lo, _ in operand_ranges(eqn, facts))
    return rising(facts, eqn) if any(constants) or never_negative else ()


def neg(eqn: Any, facts: Facts) -> Fact:
    """The mirrored range; the dtype's least value negates to itself."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        found = _float_result(operator.neg, out, facts, rounds=False)
        turned = whole_result(lambda x: (-x[1], -x[0]), out, facts)
        return found if found is not UNKNOWN else turned
    ((lo, hi),) = operand_ranges(eqn, facts)
    zero = Affine(0, (0,) * len(out.shape))
    return integer(out, -hi, -lo, affine_sum(zero, facts[0].affine, -1))


def _truncated(n: int, d: int) -> int:
    quotient = abs(n) // abs(d)
    return quotient if (n < 0) == (d < 0) else -quotient


def quotient_range(
    numerator: tuple[int, int],
    denominator: tuple[int, int],
    divide: Callable[[int, int], int],
) -> tuple[int, int] | None:
    """The range of quotients, None where the denominator may be zero.

    For a denominator of one sign a quotient is monotone in either operand, so that the corners
    hold the extremes.
    """
    if denominator[0] <= 0 <= denominator[1]:
        return None
    corners = [divide(n, d) for n in numerator for d in denominator]
    return min(corners), max(corners)


def div(eqn: Any, facts: Facts) -> Fact:
    """Quotients rounded towards zero, unless the denominator may be zero."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return UNKNOWN
    numerator, denominator = operand_ranges(eqn, facts)
    found = quotient_range(numerator, denominator, _truncated)
    if found is None:
        return default(out.dtype)
    by = facts[1].constant
    up = rising(facts, eqn) if by is not None and by.value > 0 else ()
    return integer(out, *found, rising=up)


def rem(eqn: Any, facts: Facts) -> Fact:
    """A remainder has its dividend's sign and is nearer to zero than the divisor.

    Nothing is claimed where StableHLO leaves the result to the implementation: the divisor may be
    zero, or the quotient may overflow.
    """
    out = eqn.outvars[0].aval
    limit = limits(out.dtype)
    if limit is None:
        return UNKNOWN
    (a, b), (c, d) = operand_ranges(eqn, facts)
    if c <= 0 <= d or (a == limit[0] < 0 and c <= -1 <= d):
        return default(out.dtype)
    nearest, farthest = min(abs(c), abs(d)), max(abs(c), abs(d))
    if -nearest < a and b < nearest:
        return facts[0] if eqn.invars[0].aval.shape == out.shape else integer(out, a, b)
    return integer(out, max(min(a, 0), 1 - farthest), min(max(b, 0), farthest - 1))


def sign(eqn: Any, facts: Facts) -> Fact:
    """The sign is -1, 0 or 1."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return UNKNOWN
    ((lo, hi),) = operand_ranges(eqn, facts)
    return integer(out, (lo > 0) - (lo < 0), (hi > 0) - (hi < 0))


def absolute(eqn: Any, facts: Facts) -> Fact:
    """The absolute value; that of the dtype's least value wraps around."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        found = _float_result(abs, out, facts, rounds=False)
        return found if found is not UNKNOWN else whole_result(_magnitude, out, facts)
    ((lo, hi),) = operand_ranges(eqn, facts)
    if lo >= 0:
        return facts[0]
    return integer(out, *_magnitude((lo, hi)))


def _magnitude(x: tuple[int, int]) -> tuple[int, int]:
    lo, hi = x
    return max(lo, -hi, 0), max(-lo, hi)


def rounded(eqn: Any, facts: Facts) -> Fact:
    """floor, ceil, round: integers stay what they are."""
    return facts[0] if facts[0].integers() is not None else UNKNOWN


_MOST_BITS = 64


def _power(eqn: Any, facts: Facts, exponent: int) -> Fact:
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None or exponent < 0:
        return default(out.dtype)
    ((lo, hi),) = operand_ranges(eqn, facts)
    if max(abs(lo), abs(hi)) > 1:
        exponent = min(exponent, _MOST_BITS + exponent % 2)  # already too large for any dtype
    ends = [lo**exponent, hi**exponent]
    least = 0 if exponent % 2 == 0 and exponent and lo < 0 < hi else min(ends)
    return integer(out, least, max(ends))


def integer_pow(eqn: Any, facts: Facts) -> Fact:
    """``x ** y`` for a fixed ``y``."""
    return _power(eqn, facts, eqn.params["y"])


def square(eqn: Any, facts: Facts) -> Fact:
    """``x ** 2``."""
    return _power(eqn, facts, 2)


def _monotone(pick: Callable[..., int]) -> Rule:
    """max, min: monotone in each operand, so that bounds go to bounds."""

    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        if limits(out.dtype) is None:
            return whole_result(lambda x, y: (pick(x[0], y[0]), pick(x[1], y[1])), out, facts)
        (a, b), (c, d) = operand_ranges(eqn, facts)
        always = (a >= d, c >= b) if pick is max else (b <= c, d <= a)
        for i in (0, 1):  # an operand that is always the one picked keeps its order too
            if always[i] and eqn.invars[i].aval.shape == out.shape:
                return facts[i]
        return integer(out, pick(a, c), pick(b, d), rising=rising(facts, eqn))

    return rule


def clamp(eqn: Any, facts: Facts) -> Fact:
    """``min(max(x, low), high)``: what an operand that lies within is known to be stays known."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return whole_result(_clamped, out, facts)
    low, x, high = operand_ranges(eqn, facts)
    if low[1] <= x[0] and x[1] <= high[0]:
        return facts[1]
    return integer(out, *_clamped(low, x, high), rising=rising(facts, eqn))


def _clamped(low: tuple[int, int], x: tuple[int, int], high: tuple[int, int]) -> tuple[int, int]:
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


RULES: dict[str, Rule] = {
    "add_p": _additive(1, operator.add),
    "sub_p": _additive(-1, operator.sub),
    "mul_p": mul,
    "neg_p": neg,
    "div_p": div,
    "rem_p": rem,
    "sign_p": sign,
    "abs_p": absolute,
    "integer_pow_p": integer_pow,
    "square_p": square,
    "max_p": _monotone(max),
    "min_p": _monotone(min),
    "clamp_p": clamp,
    "floor_p": rounded,
    "ceil_p": rounded,
    "round_p": rounded,
}

SOURCES = frozenset({"sign_p", "abs_p", "integer_pow_p", "square_p"})
"""Rules that tell something even of operands that nothing is known about."""
