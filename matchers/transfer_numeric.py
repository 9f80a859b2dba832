"""Transfer rules of elementwise arithmetic, logic and comparisons.

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
    Constant,
    Fact,
    default,
    elements,
    floating,
    integer,
    join,
    limits,
    mix,
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


def _sum(a: Affine | None, b: Affine | None, sign: int) -> Affine | None:
    if a is None or b is None:
        return None
    known = a.offset is not None and b.offset is not None
    return Affine(
        a.offset + sign * b.offset if known else None,  # type: ignore[operator]
        tuple(x + sign * y for x, y in zip(a.strides, b.strides)),
    )


def _scaled(a: Affine | None, factor: Fact) -> Affine | None:
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
    return floating(result) if _all_exact(aval.dtype, result, *values) else UNKNOWN


def _all_exact(dtype: Any, *values: float) -> bool:
    """Whether values are zero or normal numbers of ``dtype``: subnormals may be flushed."""
    info = _finfo(dtype)
    return all(
        math.isfinite(v)
        and (v == 0 or abs(v) >= float(info.tiny))
        and abs(v) <= float(info.max)
        and float(jnp.dtype(dtype).type(v)) == v
        for v in values
    )


def _operands(eqn: Any, facts: Facts) -> list[tuple[int, int]]:
    return [f.range(v.aval.dtype) for f, v in zip(facts, eqn.invars)]


def _additive(sign: int, fold: Callable[..., float]) -> Rule:
    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        if limits(out.dtype) is None:
            return _float_result(fold, out, facts)
        (a, b), (c, d) = _operands(eqn, facts)
        lo, hi = (a + c, b + d) if sign > 0 else (a - d, b - c)
        rank = len(out.shape)
        x, y = (affine_of(f, v.aval, rank) for f, v in zip(facts, eqn.invars))
        return integer(out, lo, hi, _sum(x, y, sign), _reflected(eqn, facts, sign))

    return rule


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
        return _float_result(operator.mul, out, facts)
    (a, b), (c, d) = _operands(eqn, facts)
    corners = (a * c, a * d, b * c, b * d)
    rank = len(out.shape)
    x, y = (affine_of(f, v.aval, rank) for f, v in zip(facts, eqn.invars))
    affine = _scaled(x, facts[1]) or _scaled(y, facts[0])
    return integer(out, min(corners), max(corners), affine)


def neg(eqn: Any, facts: Facts) -> Fact:
    """The mirrored range; the dtype's least value negates to itself."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return _float_result(operator.neg, out, facts, rounds=False)
    ((lo, hi),) = _operands(eqn, facts)
    zero = Affine(0, (0,) * len(out.shape))
    return integer(out, -hi, -lo, _sum(zero, facts[0].affine, -1))


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
    numerator, denominator = _operands(eqn, facts)
    found = quotient_range(numerator, denominator, _truncated)
    return default(out.dtype) if found is None else integer(out, *found)


def rem(eqn: Any, facts: Facts) -> Fact:
    """A remainder has its dividend's sign and is nearer to zero than the divisor.

    Nothing is claimed where StableHLO leaves the result to the implementation: the divisor may be
    zero, or the quotient may overflow.
    """
    out = eqn.outvars[0].aval
    limit = limits(out.dtype)
    if limit is None:
        return UNKNOWN
    (a, b), (c, d) = _operands(eqn, facts)
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
    ((lo, hi),) = _operands(eqn, facts)
    return integer(out, (lo > 0) - (lo < 0), (hi > 0) - (hi < 0))


def absolute(eqn: Any, facts: Facts) -> Fact:
    """The absolute value; that of the dtype's least value wraps around."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return _float_result(abs, out, facts, rounds=False)
    ((lo, hi),) = _operands(eqn, facts)
    if lo >= 0:
        return facts[0]
    return integer(out, 0 if hi >= 0 else -hi, max(-lo, hi))


_MOST_BITS = 64


def _power(eqn: Any, facts: Facts, exponent: int) -> Fact:
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None or exponent < 0:
        return default(out.dtype)
    ((lo, hi),) = _operands(eqn, facts)
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
            return UNKNOWN
        (a, b), (c, d) = _operands(eqn, facts)
        always = (a >= d, c >= b) if pick is max else (b <= c, d <= a)
        for i in (0, 1):  # an operand that is always the one picked keeps its order too
            if always[i] and eqn.invars[i].aval.shape == out.shape:
                return facts[i]
        return integer(out, pick(a, c), pick(b, d))

    return rule


def clamp(eqn: Any, facts: Facts) -> Fact:
    """``min(max(x, low), high)``: what an operand that lies within is known to be stays known."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return UNKNOWN
    low, x, high = _operands(eqn, facts)
    if low[1] <= x[0] and x[1] <= high[0]:
        return facts[1]
    lo, hi = (min(max(x[i], low[i]), high[i]) for i in (0, 1))
    return integer(out, lo, hi)


def bitwise_and(eqn: Any, facts: Facts) -> Fact:
    """No greater than any operand that isn't negative."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = _operands(eqn, facts)
    bounds = [high for low, high in ((a, b), (c, d)) if low >= 0]
    if not bounds:
        return default(out.dtype)
    least = 1 if limits(out.dtype) == (0, 1) and a == c == 1 else 0
    return _folded(operator.and_, out, facts) or integer(out, least, min(bounds))


def bitwise_or(eqn: Any, facts: Facts) -> Fact:
    """At least either operand, and no longer in bits than the longer one."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = _operands(eqn, facts)
    if a < 0 or c < 0:
        return default(out.dtype)
    greatest = (1 << max(b.bit_length(), d.bit_length())) - 1
    return _folded(operator.or_, out, facts) or integer(out, max(a, c), greatest)


def bitwise_xor(eqn: Any, facts: Facts) -> Fact:
    """No longer in bits than the longer operand."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = _operands(eqn, facts)
    if a < 0 or c < 0:
        return default(out.dtype)
    greatest = (1 << max(b.bit_length(), d.bit_length())) - 1
    return _folded(operator.xor, out, facts) or integer(out, 0, greatest)


def bitwise_not(eqn: Any, facts: Facts) -> Fact:
    """``-1 - x`` if signed, else ``greatest - x``."""
    out = eqn.outvars[0].aval
    limit = limits(out.dtype)
    if limit is None:
        return UNKNOWN
    ((lo, hi),) = _operands(eqn, facts)
    total = limit[0] + limit[1]
    origin = Affine(total, (0,) * len(out.shape))
    return integer(out, total - hi, total - lo, _sum(origin, facts[0].affine, -1))


def _folded(fold: Callable[[int, int], int], out: Aval, facts: Facts) -> Fact | None:
    a, b = (f.constant for f in facts)
    if a is None or b is None:
        return None
    value = fold(int(a.value), int(b.value))
    return integer(out, value, value)


def shift_left(eqn: Any, facts: Facts) -> Fact:
    """``x · 2^s`` while ``s`` is below the width and nothing is shifted out."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = _operands(eqn, facts)
    if not 0 <= s <= t < _width(out.dtype):
        return default(out.dtype)
    affine = None
    if s == t:
        x = affine_of(facts[0], eqn.invars[0].aval, len(out.shape))
        affine = _scaled(x, Fact(constant=Constant.of(1 << s)))
    corners = (a << s, a << t, b << s, b << t)
    return integer(out, min(corners), max(corners), affine)


def shift_right_arithmetic(eqn: Any, facts: Facts) -> Fact:
    """``floor(x / 2^s)``; a shift out of range gives an undefined result, so nothing is claimed."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = _operands(eqn, facts)
    least, greatest = _signed_limits(out.dtype)
    if not 0 <= s <= t < _width(out.dtype) or not least <= a <= b <= greatest:
        return default(out.dtype)
    corners = (a >> s, a >> t, b >> s, b >> t)
    return integer(out, min(corners), max(corners))


def shift_right_logical(eqn: Any, facts: Facts) -> Fact:
    """``floor(x / 2^s)`` of the bits of ``x`` read as an unsigned number."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = _operands(eqn, facts)
    width = _width(out.dtype)
    if not 0 <= s <= t < width:
        return default(out.dtype)
    if a >= 0:
        return integer(out, a >> t, b >> s)
    greatest = (1 << (width - s)) - 1
    return integer(out, 0, greatest) if s else default(out.dtype)


def _width(dtype: Any) -> int:
    limit = limits(dtype)
    assert limit is not None
    return (limit[1] - limit[0]).bit_length()


def _signed_limits(dtype: Any) -> tuple[int, int]:
    half = 1 << (_width(dtype) - 1)
    return -half, half - 1


def bit_count(eqn: Any, facts: Facts) -> Fact:
    """population_count and clz: between zero and the width."""
    out = eqn.outvars[0].aval
    return integer(out, 0, _width(out.dtype))


def comparison(holds: Callable[[Any, Any], bool]) -> Rule:
    """A comparison, decided where it comes out the same at the ends of both ranges.

    Of ordered comparisons the ends decide; equality is also decided by disjoint ranges.
    """

    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        a, b = facts
        if limits(eqn.invars[0].aval.dtype) is None:
            if a.constant is None or b.constant is None:
                return default(out.dtype)
            value = int(holds(a.constant.value, b.constant.value))
            return integer(out, value, value)
        (lo, hi), (least, greatest) = _operands(eqn, facts)
        if holds in (operator.eq, operator.ne):
            if hi < least or greatest < lo:
                value = int(holds is operator.ne)
            elif lo == hi == least == greatest:
                value = int(holds is operator.eq)
            else:
                return integer(out, 0, 1)
            return integer(out, value, value)
        ends = {holds(x, y) for x in (lo, hi) for y in (least, greatest)}
        return integer(out, int(min(ends)), int(max(ends)))

    return rule


def select_n(eqn: Any, facts: Facts) -> Fact:
    """The chosen case where the predicate is known, else what all cases have in common."""
    which, *cases = facts
    if which.constant is not None and 0 <= which.constant.value < len(cases):
        chosen = int(which.constant.value)
        same = eqn.invars[1 + chosen].aval.shape == eqn.outvars[0].aval.shape
        return cases[chosen] if same else elements(cases[chosen])
    combine = join if eqn.invars[0].aval.shape == () else mix
    result = cases[0]
    for case in cases[1:]:
        result = combine(result, case)
    return result


def convert(eqn: Any, facts: Facts) -> Fact:
    """A conversion keeps what it represents exactly; out of range, an integer wraps around."""
    (fact,) = facts
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    old, new = limits(source.dtype), limits(out.dtype)
    if old is None:
        return _from_constant(fact, out)
    if new is None:
        return _from_constant(fact, out) if fact.constant is not None else UNKNOWN
    lo, hi = fact.range(source.dtype)
    if new == (0, 1) and old != (0, 1):
        return integer(out, int(lo > 0 or hi < 0), int(lo != 0 or hi != 0))
    return integer(out, lo, hi, fact.affine, fact.permutation)


def _from_constant(fact: Fact, out: Aval) -> Fact:
    if fact.constant is None:
        return default(out.dtype)
    value = fact.constant.value
    limit = limits(out.dtype)
    if limit == (0, 1):
        return integer(out, int(value != 0), int(value != 0))
    if limit is not None:
        if not math.isfinite(value) or value != int(value):
            return default(out.dtype)
        return integer(out, int(value), int(value))
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return UNKNOWN
    try:
        exact = float(value)
    except OverflowError:
        return UNKNOWN
    if exact != value or not (math.isinf(exact) or _all_exact(out.dtype, exact)):
        return UNKNOWN
    return floating(exact)


def bitcast(eqn: Any, facts: Facts) -> Fact:
    """Between integers of one width, values that both can hold keep their meaning."""
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if limits(source.dtype) is None or limits(out.dtype) is None or source.shape != out.shape:
        return default(out.dtype)
    if _width(source.dtype) != _width(out.dtype):
        return default(out.dtype)
    return integer(out, *facts[0].range(source.dtype), facts[0].affine, facts[0].permutation)


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
    "and_p": bitwise_and,
    "or_p": bitwise_or,
    "xor_p": bitwise_xor,
    "not_p": bitwise_not,
    "shift_left_p": shift_left,
    "shift_right_arithmetic_p": shift_right_arithmetic,
    "shift_right_logical_p": shift_right_logical,
    "population_count_p": bit_count,
    "clz_p": bit_count,
    "eq_p": comparison(operator.eq),
    "ne_p": comparison(operator.ne),
    "lt_p": comparison(operator.lt),
    "le_p": comparison(operator.le),
    "gt_p": comparison(operator.gt),
    "ge_p": comparison(operator.ge),
    "select_n_p": select_n,
    "convert_element_type_p": convert,
    "bitcast_convert_type_p": bitcast,
}

SOURCES = frozenset({"sign_p", "abs_p", "population_count_p", "clz_p"}) | frozenset(
    {"integer_pow_p", "square_p", "convert_element_type_p", "shift_right_logical_p"}
)
"""Rules that tell something even of operands that nothing is known about."""
