"""Transfer rules of what keeps integers as they are only where no number is rounded."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.lax import Precision

from .fact import UNKNOWN, Aval, Fact, default, floating, integer, limits, whole
from .transfer_numeric import Facts, Rule, all_exact, corners, operand_ranges


def convert(eqn: Any, facts: Facts) -> Fact:
    """A conversion keeps what it represents exactly; out of range, an integer wraps around."""
    (fact,) = facts
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    old, new = limits(source.dtype), limits(out.dtype)
    known = _from_constant(fact, out) if fact.constant is not None else UNKNOWN
    if old is None or new is None:
        if known is not UNKNOWN:
            return known
        if not _is_number(source) or not _is_number(out):
            return default(out.dtype)
        bounds = fact.integers() if old is None else fact.range(source.dtype)
        if bounds is None:
            return default(out.dtype)
        if new is None:
            return whole(out, *bounds)
        lo, hi = bounds
        return integer(out, 0, 1) if new == (0, 1) else integer(out, lo, hi)
    lo, hi = fact.range(source.dtype)
    if new == (0, 1) and old != (0, 1):
        return integer(out, int(lo > 0 or hi < 0), int(lo != 0 or hi != 0))
    return integer(out, lo, hi, fact.affine, fact.permutation, fact.rising)


def _is_number(aval: Aval) -> bool:
    return limits(aval.dtype) is not None or jnp.issubdtype(aval.dtype, jnp.floating)


def dot_general(eqn: Any, facts: Facts) -> Fact:
    """Sums of products of integers, exact where no product or partial sum can round.

    Matrix units may round their operands to 8 bits, so larger ones in floats tell nothing.
    """
    out = eqn.outvars[0].aval
    (contracted, _), _ = eqn.params["dimension_numbers"]
    terms = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if limits(out.dtype) is not None:
        if any(limits(v.aval.dtype) is None for v in eqn.invars):
            return default(out.dtype)
        lo, hi = corners(*operand_ranges(eqn, facts))
        return integer(out, min(terms * lo, 0), max(terms * hi, 0))
    ranges = [f.integers() for f in facts]
    if None in ranges or not _plain_precision(eqn.params["precision"]):
        return UNKNOWN
    a, b = (r for r in ranges if r is not None)
    if max(map(abs, (*a, *b))) > _MULTIPLIED:
        return UNKNOWN
    lo, hi = corners(a, b)
    most = terms * max(abs(lo), abs(hi))  # of a partial sum, in whichever order
    found = whole(out, min(terms * lo, 0), max(terms * hi, 0))
    return found if whole(out, -most, most) is not UNKNOWN else UNKNOWN


_MULTIPLIED = 256
"""The greatest integer up to which a matrix unit that rounds to bfloat16 multiplies exactly."""


def _plain_precision(precision: Any) -> bool:
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or isinstance(p, Precision) for p in pair)


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
    if exact != value or not (math.isinf(exact) or all_exact(out.dtype, exact)):
        return UNKNOWN
    return floating(exact)


RULES: dict[str, Rule] = {"dot_general_p": dot_general, "convert_element_type_p": convert}

SOURCES = frozenset({"convert_element_type_p"})
"""Rules that tell something even of operands that nothing is known about."""
