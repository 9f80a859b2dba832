"""Recognise a binary search among a loop's carried values: two bounds that close in on each other.

``mid = low + (high - low) // 2``, after which ``low`` stays or becomes ``mid`` and ``high`` stays
or becomes ``mid``. Then ``low <= mid <= high`` throughout, which ranges alone can't show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .fact import Fact, integer, limits


def find_bisections(
    body: Any, carried: Sequence[Any], results: Sequence[Any], initial: Sequence[Fact]
) -> dict[int, Fact]:
    """What holds of carried values that are the bounds of a binary search, by position.

    Args:
        body: The loop's body.
        carried: Its inputs that carry values.
        results: Its outputs that are the next ones.
        initial: What is known of the first ones.
    """
    makers = {v: e for e in jaxprs.opened(body).eqns for v in e.outvars}
    found: dict[int, Fact] = {}
    for low, (var, out) in enumerate(zip(carried, results)):
        if limits(getattr(var.aval, "dtype", None)) in (None, (0, 1)):
            continue
        cases = _cases(makers, out)
        mid = next((c for c in cases if c is not var), None)
        high_var = None if mid is None else _other_end(makers, mid, var)
        high = next((i for i, v in enumerate(carried) if v is high_var), None)
        if high is None or any(c is not var and c is not mid for c in cases):
            continue
        if any(c is not high_var and c is not mid for c in _cases(makers, results[high])):
            continue
        fact = _between(initial[low], initial[high], var.aval)
        if fact is not None:
            found[low] = found[high] = fact
    return found


def _between(low: Fact, high: Fact, aval: Any) -> Fact | None:
    limit = limits(aval.dtype)
    (least, first), (last, greatest) = low.range(aval.dtype), high.range(aval.dtype)
    if limit is None or first > last or greatest - least > limit[1]:
        return None
    return integer(aval, least, greatest)


def _cases(makers: Mapping[Any, Any], atom: Any) -> list[Any]:
    """What an output may be: the cases of a select, which may stand in a call of its own."""
    eqn = None if jaxprs.is_literal(atom) else makers.get(atom)
    if eqn is None:
        return [atom]
    if eqn.primitive is primitive("select_n_p"):
        return list(eqn.invars[1:])
    inner = _only_result(eqn)
    if inner is None or inner[0].primitive is not primitive("select_n_p"):
        return [atom]
    made, outer = inner
    return [atom if jaxprs.is_literal(c) else outer.get(c, atom) for c in made.invars[1:]]


def _other_end(makers: Mapping[Any, Any], mid: Any, low: Any) -> Any | None:
    """``high`` where ``mid`` is ``low + (high - low) // n``, and n at least 1."""
    total = None if jaxprs.is_literal(mid) else makers.get(mid)
    if total is None or total.primitive is not primitive("add_p"):
        return None
    for base, step in (total.invars, total.invars[::-1]):
        gap = _divided(makers, step) if base is low else None
        apart = None if gap is None or jaxprs.is_literal(gap) else makers.get(gap)
        if apart is not None and apart.primitive is primitive("sub_p") and apart.invars[1] is low:
            return apart.invars[0]
    return None


def _divided(makers: Mapping[Any, Any], atom: Any) -> Any | None:
    """The dividend of a division, rounded towards zero, by a literal of at least 1."""
    eqn = None if jaxprs.is_literal(atom) else makers.get(atom)
    if eqn is None:
        return None
    outer: Mapping[Any, Any] = {}
    inside = makers
    if eqn.primitive is primitive("jit_p"):
        inner = _only_result(eqn)
        if inner is None:
            return None
        inside = {v: e for e in jaxprs.opened(eqn.params["jaxpr"]).eqns for v in e.outvars}
        eqn, outer = inner
    if eqn.primitive is not primitive("div_p"):
        return None
    dividend, divisor = eqn.invars
    maker = None if jaxprs.is_literal(divisor) else inside.get(divisor)
    if maker is not None and maker.primitive is primitive("convert_element_type_p"):
        divisor = maker.invars[0]
    divisor = divisor if jaxprs.is_literal(divisor) else outer.get(divisor, divisor)
    if not jaxprs.is_literal(divisor) or divisor.aval.shape != ():
        return None
    if not 1 <= int(divisor.val) < 128:
        return None
    return outer.get(dividend) if outer else dividend


def _only_result(eqn: Any) -> tuple[Any, dict[Any, Any]] | None:
    """The equation in a call that makes its one result, and the operands by the call's inputs."""
    if eqn.primitive is not primitive("jit_p") or len(eqn.outvars) != 1:
        return None
    body = jaxprs.opened(eqn.params["jaxpr"])
    if len(body.invars) != len(eqn.invars):
        return None
    (result,) = body.outvars
    for made in body.eqns:
        if len(made.outvars) == 1 and made.outvars[0] is result:
            return made, dict(zip(body.invars, eqn.invars))
    return None
