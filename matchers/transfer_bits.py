"""Transfer rules of bitwise operations, shifts, comparisons and selection."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from .fact import (
    UNKNOWN,
    Affine,
    Aval,
    Constant,
    Fact,
    default,
    elements,
    integer,
    join,
    limits,
    mix,
)
from .transfer_numeric import (
    Facts,
    Rule,
    affine_of,
    affine_scaled,
    affine_sum,
    operand_ranges,
)


def bitwise_and(eqn: Any, facts: Facts) -> Fact:
    """No greater than any operand that isn't negative."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = operand_ranges(eqn, facts)
    bounds = [high for low, high in ((a, b), (c, d)) if low >= 0]
    if not bounds:
        return default(out.dtype)
    least = 1 if limits(out.dtype) == (0, 1) and a == c == 1 else 0
    return _folded(operator.and_, out, facts) or integer(out, least, min(bounds))


def bitwise_or(eqn: Any, facts: Facts) -> Fact:
    """At least either operand, and no longer in bits than the longer one."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = operand_ranges(eqn, facts)
    if a < 0 or c < 0:
        return default(out.dtype)
    greatest = (1 << max(b.bit_length(), d.bit_length())) - 1
    return _folded(operator.or_, out, facts) or integer(out, max(a, c), greatest)


def bitwise_xor(eqn: Any, facts: Facts) -> Fact:
    """No longer in bits than the longer operand."""
    out = eqn.outvars[0].aval
    (a, b), (c, d) = operand_ranges(eqn, facts)
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
    ((lo, hi),) = operand_ranges(eqn, facts)
    total = limit[0] + limit[1]
    origin = Affine(total, (0,) * len(out.shape))
    return integer(out, total - hi, total - lo, affine_sum(origin, facts[0].affine, -1))


def _folded(fold: Callable[[int, int], int], out: Aval, facts: Facts) -> Fact | None:
    a, b = (f.constant for f in facts)
    if a is None or b is None:
        return None
    value = fold(int(a.value), int(b.value))
    return integer(out, value, value)


def shift_left(eqn: Any, facts: Facts) -> Fact:
    """``x · 2^s`` while ``s`` is below the width and nothing is shifted out."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = operand_ranges(eqn, facts)
    if not 0 <= s <= t < _width(out.dtype):
        return default(out.dtype)
    affine = None
    if s == t:
        x = affine_of(facts[0], eqn.invars[0].aval, len(out.shape))
        affine = affine_scaled(x, Fact(constant=Constant.of(1 << s)))
    corners = (a << s, a << t, b << s, b << t)
    return integer(out, min(corners), max(corners), affine)


def shift_right_arithmetic(eqn: Any, facts: Facts) -> Fact:
    """``floor(x / 2^s)``; a shift out of range gives an undefined result, so nothing is claimed."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = operand_ranges(eqn, facts)
    least, greatest = _signed_limits(out.dtype)
    if not 0 <= s <= t < _width(out.dtype) or not least <= a <= b <= greatest:
        return default(out.dtype)
    corners = (a >> s, a >> t, b >> s, b >> t)
    return integer(out, min(corners), max(corners))


def shift_right_logical(eqn: Any, facts: Facts) -> Fact:
    """``floor(x / 2^s)`` of the bits of ``x`` read as an unsigned number."""
    out = eqn.outvars[0].aval
    (a, b), (s, t) = operand_ranges(eqn, facts)
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
        (lo, hi), (least, greatest) = operand_ranges(eqn, facts)
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


def bitcast(eqn: Any, facts: Facts) -> Fact:
    """Between integers of one width, values that both can hold keep their meaning."""
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if limits(source.dtype) is None or limits(out.dtype) is None or source.shape != out.shape:
        return default(out.dtype)
    if _width(source.dtype) != _width(out.dtype):
        return default(out.dtype)
    known = facts[0]
    return integer(out, *known.range(source.dtype), known.affine, known.permutation, known.rising)


RULES: dict[str, Rule] = {
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
    "bitcast_convert_type_p": bitcast,
}

SOURCES = frozenset({"population_count_p", "clz_p", "shift_right_logical_p"})
