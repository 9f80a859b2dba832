"""Tell whether an array is sorted along an axis: equal neighbours are allowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..compat import jaxprs
from ..compat.hi_primitives import numpy_primitive
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .fact import limits
from .graph import Producer, Scope
from .subjects import is_alias

_DEPTH = 16


def is_sorted(scope: Scope, atom: Atom, axis: int) -> bool:
    """Whether each 1-D slice of an integer array along ``axis`` is known never to fall.

    Seen through calls. Sorted are: what a sort by that key gives, an affine form that rises, sums
    and maxima so far (of numbers that aren't negative), and what a rising function makes of
    something sorted.
    """
    return _is_sorted(scope, atom, axis, _DEPTH)


def _is_sorted(scope: Scope, atom: Atom, axis: int, depth: int) -> bool:
    if limits(atom.aval.dtype) is None or not depth:
        return False
    fact = scope.fact(atom)
    if fact.affine is not None and fact.affine.strides[axis] >= 0:
        return True
    made = None if jaxprs.is_literal(atom) else scope.producer(atom)
    if made is None:
        return False
    rule = _rules().get(made.eqn.primitive)
    if rule is not None:
        return rule(made, axis, depth - 1)
    if is_alias(made.eqn):
        return _is_sorted(made.scope, made.eqn.invars[made.result], axis, depth - 1)
    return False


def _sorted_key(made: Producer, axis: int, depth: int) -> bool:
    return made.result == 0 and made.eqn.params["dimension"] == axis


def _running(made: Producer, axis: int, depth: int) -> bool:
    params = made.eqn.params
    return params["axis"] == axis and not params["reverse"]


def _running_sum(made: Producer, axis: int, depth: int) -> bool:
    """Of numbers that aren't negative, while no sum can wrap around."""
    source = made.eqn.invars[0]
    lo, hi = made.scope.fact(source).range(source.aval.dtype)
    limit = limits(source.aval.dtype)
    n = source.aval.shape[made.eqn.params["axis"]]
    whole = limit is not None and lo >= 0 and hi * n <= limit[1]
    return whole and _running(made, axis, depth)


def _same_order(made: Producer, axis: int, depth: int) -> bool:
    """A conversion that keeps every value."""
    source, out = made.eqn.invars[0], made.eqn.outvars[0].aval
    old, new = limits(source.aval.dtype), limits(out.dtype)
    if old is None or new is None:
        return False
    lo, hi = made.scope.fact(source).range(source.aval.dtype)
    fits = new[0] <= lo and hi <= new[1]
    return fits and _is_sorted(made.scope, source, axis, depth)


def _each_sorted(made: Producer, axis: int, depth: int) -> bool:
    """Max and min rise with either operand."""
    return all(_is_level(made, a) or _operand(made, a, axis, depth) for a in made.eqn.invars)


def _sum(made: Producer, axis: int, depth: int) -> bool:
    """A sum that can't wrap around."""
    limit = limits(made.eqn.outvars[0].aval.dtype)
    ranges = [made.scope.fact(a).range(a.aval.dtype) for a in made.eqn.invars]
    lo, hi = sum(r[0] for r in ranges), sum(r[1] for r in ranges)
    exact = limit is not None and limit[0] <= lo and hi <= limit[1]
    return exact and _each_sorted(made, axis, depth)


def _quotient(made: Producer, axis: int, depth: int) -> bool:
    dividend, divisor = made.eqn.invars
    constant = made.scope.fact(divisor).constant
    positive = constant is not None and constant.value > 0
    return positive and _operand(made, dividend, axis, depth)


def _slice(made: Producer, axis: int, depth: int) -> bool:
    return _operand(made, made.eqn.invars[0], axis, depth)


def _searched(made: Producer, axis: int, depth: int) -> bool:
    """Places of sorted queries in a sorted vector: what the search gives depends on its order."""
    found = numpy_primitive(made.eqn)
    if found is None or found[0] != "searchsorted" or found[1]["batch_dims"]:
        return False
    vector, queries = made.eqn.invars
    return (
        vector.aval.ndim == 1
        and _is_sorted(made.scope, vector, 0, depth)
        and _is_sorted(made.scope, queries, axis, depth)
    )


def _operand(made: Producer, atom: Atom, axis: int, depth: int) -> bool:
    same = atom.aval.ndim == made.eqn.outvars[0].aval.ndim
    return same and _is_sorted(made.scope, atom, axis, depth)


def _is_level(made: Producer, atom: Atom) -> bool:
    """Whether an operand is the same everywhere."""
    return atom.aval.shape == () or made.scope.fact(atom).constant is not None


@functools.cache
def _rules() -> dict[Any, Callable[[Producer, int, int], bool]]:
    return {
        primitive("sort_p"): _sorted_key,
        primitive("cumsum_p"): _running_sum,
        primitive("cummax_p"): _running,
        primitive("convert_element_type_p"): _same_order,
        primitive("max_p"): _each_sorted,
        primitive("min_p"): _each_sorted,
        primitive("add_p"): _sum,
        primitive("div_p"): _quotient,
        primitive("slice_p"): _slice,
        primitive("call_hi_primitive_p"): _searched,
    }
