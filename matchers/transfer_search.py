"""Transfer rules of sorts, searches, reductions, scans, gathers, scatters and collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.lax import GatherScatterMode

from ..compat.hi_primitives import numpy_primitive
from .fact import (
    UNKNOWN,
    Affine,
    Aval,
    Fact,
    complete,
    default,
    default_of,
    elements,
    floating,
    integer,
    join,
    limits,
    rising_axes,
    whole,
)
from .transfer_numeric import Facts, Rule


def sort(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Operands are reordered alike along one axis, whatever the keys.

    So a permutation along it stays one (an iota becomes one), and the first key comes out in order.
    A stable sort by keys that are in order already changes nothing.
    """
    dimension, first = eqn.params["dimension"], eqn.invars[0].aval
    in_order = limits(first.dtype) is not None and facts[0].rises(dimension, first.shape[dimension])
    if in_order and eqn.params["is_stable"] and eqn.params["num_keys"] == 1:
        return facts
    results = []
    for i, (fact, var) in enumerate(zip(facts, eqn.outvars)):
        out = var.aval
        if limits(out.dtype) is None:
            results.append(elements(fact))
            continue
        affine, permutation = fact.affine, None
        if affine is not None and affine.strides[dimension]:
            affine = None
        if fact.permutation == dimension:
            permutation = dimension
        rising = () if i else (dimension,)
        results.append(integer(out, *fact.range(out.dtype), affine, permutation, rising))
    return results


def top_k(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """The values are some of the operand's; the indices are below the axis' size."""
    source, out = eqn.invars[0].aval, eqn.outvars[1].aval
    axis = eqn.params.get("axis", -1) % len(source.shape)
    n = source.shape[axis]
    whole = axis if eqn.params["k"] == n else None
    return elements(facts[0]), integer(out, 0, max(n - 1, 0), None, whole)


def approx_top_k(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """As top_k, but a row with no element above the least one may give -1 for an index."""
    source, out = eqn.invars[0].aval, eqn.outvars[1].aval
    n = source.shape[eqn.params["reduction_dimension"]]
    return UNKNOWN, integer(out, -1, max(n - 1, 0))


def numpy_search(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """`jnp.searchsorted`: up to the size of the sorted array. `jnp.nonzero`: an index or a fill."""
    nothing = [default_of(v.aval) for v in eqn.outvars]
    found = numpy_primitive(eqn)
    if found is None:
        return nothing
    name, params = found
    shape = eqn.invars[0].aval.shape
    if name == "searchsorted":
        up = _sorted_search(eqn, facts, params)
        return [integer(eqn.outvars[0].aval, 0, shape[params["dimension"]], rising=up)]
    results = []
    for i, (axis, var) in enumerate(zip(params["axes"], eqn.outvars)):
        fact = integer(var.aval, 0, max(shape[axis] - 1, 0))
        if len(facts) > 1:
            fact = join(fact, elements(facts[1 + i]))
        results.append(complete(elements(fact), var.aval))
    return results


def _sorted_search(eqn: Any, facts: Facts, params: Any) -> tuple[int, ...]:
    """The axes along which the places of queries in a vector rise: none if it isn't in order."""
    vector, queries = (v.aval for v in eqn.invars)
    if len(vector.shape) != 1 or params["batch_dims"] or limits(queries.dtype) is None:
        return ()
    if not facts[0].rises(0, vector.shape[0]) or queries.shape != eqn.outvars[0].aval.shape:
        return ()
    return rising_axes(facts[1], queries.shape)


def argextreme(eqn: Any, facts: Facts) -> Fact:
    """argmax, argmin: below the axis' size."""
    (axis,) = eqn.params["axes"]
    n = eqn.invars[0].aval.shape[axis]
    return integer(eqn.outvars[0].aval, 0, max(n - 1, 0))


def _reduced(eqn: Any) -> int:
    shape = eqn.invars[0].aval.shape
    return math.prod(shape[d] for d in eqn.params["axes"])


def reduce_extreme(eqn: Any, facts: Facts) -> Fact:
    """reduce_max, reduce_min: one of the elements; of none, the dtype's limit."""
    out = eqn.outvars[0].aval
    if not _reduced(eqn):
        return default(out.dtype)
    if limits(out.dtype) is None:
        return elements(facts[0])
    return integer(out, *facts[0].range(out.dtype))


def reduce_sum(eqn: Any, facts: Facts) -> Fact:
    """``n`` elements added up."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return _whole_sum(out, facts[0], _reduced(eqn), 0)
    lo, hi = facts[0].range(out.dtype)
    n = _reduced(eqn)
    return integer(out, n * lo, n * hi)


def _whole_sum(out: Aval, fact: Fact, most: int, least: int, first: Fact | None = None) -> Fact:
    """Sums of ``least`` to ``most`` integers in floats, where no partial sum can round.

    Args:
        out: The type of the sums.
        fact: What is known of each number.
        most: How many are added at most.
        least: How many at least; the sum of none is zero.
        first: What is known of a number that each sum starts with.
    """
    bounds = fact.integers()
    start = (0, 0) if first is None else first.integers()
    if bounds is None or start is None:
        return UNKNOWN
    lo, hi = bounds
    reach = max(map(abs, start)) + most * max(abs(lo), abs(hi))
    if whole(out, -reach, reach) is UNKNOWN:
        return UNKNOWN
    lows, highs = (lo * least, lo * most), (hi * least, hi * most)
    return whole(out, start[0] + min(lows), start[1] + max(highs))


def _bounded_product(eqn: Any, facts: Facts) -> Fact:
    """Products of zeros and ones are zeros and ones."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is None:
        return UNKNOWN
    lo, hi = facts[0].range(out.dtype)
    return integer(out, min(lo, 1), 1) if lo >= 0 and hi <= 1 else default(out.dtype)


def _reduce_logical(empty: int) -> Rule:
    """reduce_and, reduce_or of bools: one of the elements; of none, ``empty``."""

    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        if limits(out.dtype) != (0, 1):
            return default(out.dtype)
        return integer(out, *(facts[0].range(out.dtype) if _reduced(eqn) else (empty, empty)))

    return rule


def cumsum(eqn: Any, facts: Facts) -> Fact:
    """Between one and ``n`` elements added up; of a constant, an arithmetic progression."""
    out = eqn.outvars[0].aval
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    if limits(out.dtype) is None:
        return _whole_sum(out, facts[0], max(out.shape[axis], 1), 1)
    lo, hi = facts[0].range(out.dtype)
    n = out.shape[axis]
    affine = None
    if lo == hi:
        step = -lo if reverse else lo
        strides = tuple(step if d == axis else 0 for d in range(len(out.shape)))
        affine = Affine(n * lo if reverse else lo, strides)
    rising = (axis,) if (hi <= 0 if reverse else lo >= 0) else ()
    return integer(out, min(lo, n * lo), max(hi, n * hi), affine, rising=rising)


def _extreme_so_far(greatest: bool) -> Rule:
    """cummax, cummin: elements of the operand; from the side where there is least, in order."""

    def rule(eqn: Any, facts: Facts) -> Fact:
        out = eqn.outvars[0].aval
        if limits(out.dtype) is None:
            return elements(facts[0])
        ordered = eqn.params["reverse"] is not greatest
        rising = (eqn.params["axis"],) if ordered else ()
        return integer(out, *facts[0].range(out.dtype), rising=rising)

    return rule


def kept(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Elements are those of the operand, anywhere: all_gather, pmax and so on."""
    return [
        complete(elements(f), v.aval) if hasattr(v.aval, "dtype") else UNKNOWN
        for f, v in zip(facts, eqn.outvars)
    ]


def ppermute(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Another device's elements, or zeros where no device sends."""
    return [_or_zero(f, v.aval) for f, v in zip(facts, eqn.outvars)]


def _or_zero(fact: Fact, aval: Aval) -> Fact:
    if limits(aval.dtype) is None:
        return join(elements(fact), floating(0.0))
    lo, hi = fact.range(aval.dtype)
    return integer(aval, min(lo, 0), max(hi, 0))


def gather(eqn: Any, facts: Facts) -> Fact:
    """Elements of the operand, and the fill value where an index may be out of bounds.

    An index that is promised to be in bounds is taken to be.
    """
    params = eqn.params
    out = eqn.outvars[0].aval
    if limits(out.dtype) is not None and _permutes(eqn, facts, 0):
        return integer(out, *facts[0].range(out.dtype), None, 0)
    fact = elements(facts[0])
    mode = GatherScatterMode.from_any(params["mode"])
    if mode not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        if mode is not GatherScatterMode.FILL_OR_DROP:
            return default(out.dtype)
        if not _in_bounds(eqn, facts[1]):
            fact = join(fact, _fill(params["fill_value"], out))
    if limits(out.dtype) is None:
        return fact
    return integer(out, *fact.range(out.dtype), rising=_gathered_in_order(eqn, facts, mode))


def _gathered_in_order(eqn: Any, facts: Facts, mode: Any) -> tuple[int, ...]:
    """The axes along which elements of a rising vector rise, taken at rising indices."""
    vector, index = eqn.invars[0].aval, eqn.invars[1].aval
    dims = eqn.params["dimension_numbers"]
    if len(vector.shape) != 1 or dims.offset_dims or dims.start_index_map != (0,):
        return ()
    if index.shape[:-1] != eqn.outvars[0].aval.shape or not facts[0].rises(0, vector.shape[0]):
        return ()
    if mode is GatherScatterMode.FILL_OR_DROP and not _in_bounds(eqn, facts[1]):
        return ()
    return tuple(d for d in rising_axes(facts[1], index.shape) if d < len(index.shape) - 1)


def _fill(value: Any, out: Aval) -> Fact:
    if value is None:
        return default(out.dtype)
    if limits(out.dtype) is not None:
        return integer(out, int(value), int(value))
    return floating(float(value)) if not isinstance(value, complex) else UNKNOWN


def _in_bounds(eqn: Any, index: Fact) -> bool:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    dims = eqn.params["dimension_numbers"].start_index_map
    lo, hi = index.range(eqn.invars[1].aval.dtype)
    return lo >= 0 and all(hi <= shape[d] - sizes[d] for d in dims)


def _permutes(eqn: Any, facts: Facts, values: int) -> bool:
    """Whether a one-dimensional permutation is gathered or scattered by another one."""
    array, index = eqn.invars[0].aval, eqn.invars[1].aval
    n = array.shape[0] if len(array.shape) == 1 else None
    return (
        n is not None
        and index.shape == (n, 1)
        and eqn.outvars[0].aval.shape == eqn.invars[values].aval.shape == (n,)
        and facts[1].permutation == 0
        and facts[values].permutation == 0
    )


def scatter(eqn: Any, facts: Facts) -> Fact:
    """Elements of the operand and of the updates; also for scatter_min and scatter_max."""
    out = eqn.outvars[0].aval
    return complete(join(elements(facts[0]), elements(facts[2])), out)


def scatter_replace(eqn: Any, facts: Facts) -> Fact:
    """As `scatter`; a permutation put in the places that another one names is a permutation."""
    out = eqn.outvars[0].aval
    if limits(out.dtype) is not None and _permutes(eqn, facts, 2):
        return integer(out, *facts[2].range(out.dtype), None, 0)
    return scatter(eqn, facts)


def _scatter_sum(sign: int) -> Rule:
    def rule(eqn: Any, facts: Facts) -> Fact:
        """Each element receives at most one update per index."""
        out, updates = eqn.outvars[0].aval, eqn.invars[2].aval
        window = eqn.params["dimension_numbers"].update_window_dims
        most = math.prod(n for d, n in enumerate(updates.shape) if d not in window)
        if limits(out.dtype) is None:
            bounds = facts[2].integers()
            if bounds is None:
                return UNKNOWN
            added = bounds if sign > 0 else (-bounds[1], -bounds[0])
            return _whole_sum(out, Fact(*added), most, 0, elements(facts[0]))
        lo, hi = facts[0].range(out.dtype)
        ends = [sign * most * bound for bound in facts[2].range(out.dtype)]
        return integer(out, lo + min(0, *ends), hi + max(0, *ends))

    return rule


RULES: dict[str, Rule] = {
    "sort_p": sort,
    "top_k_p": top_k,
    "approx_top_k_p": approx_top_k,
    "call_hi_primitive_p": numpy_search,
    "argmax_p": argextreme,
    "argmin_p": argextreme,
    "reduce_max_p": reduce_extreme,
    "reduce_min_p": reduce_extreme,
    "reduce_sum_p": reduce_sum,
    "reduce_prod_p": _bounded_product,
    "reduce_and_p": _reduce_logical(1),
    "reduce_or_p": _reduce_logical(0),
    "cumsum_p": cumsum,
    "cumprod_p": _bounded_product,
    "cummax_p": _extreme_so_far(True),
    "cummin_p": _extreme_so_far(False),
    "all_gather_p": kept,
    "all_gather_invariant_p": kept,
    "all_to_all_p": kept,
    "pmax_p": kept,
    "pmin_p": kept,
    "ppermute_p": ppermute,
    "gather_p": gather,
    "scatter_p": scatter_replace,
    "scatter_min_p": scatter,
    "scatter_max_p": scatter,
    "scatter_add_p": _scatter_sum(1),
    "scatter_sub_p": _scatter_sum(-1),
}

SOURCES = frozenset(
    {
        "sort_p",
        "cummax_p",
        "cummin_p",
        "top_k_p",
        "approx_top_k_p",
        "call_hi_primitive_p",
        "argmax_p",
        "argmin_p",
        "reduce_and_p",
        "reduce_or_p",
    }
)
