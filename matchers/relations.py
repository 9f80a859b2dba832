"""Facts that no single equation shows: they need the equations that made its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .fact import Constant, Fact, limits, meet
from .transfer_numeric import quotient_range

Producers = Callable[[Any], Any]
"""From a variable to the equation that makes it, in the same body, or None."""

_ONE = Constant.of(1)


def floor_divided(eqn: Any, producer: Producers, fact_of: Callable[[Any], Fact]) -> Fact | None:
    """The range of ``a // b`` as jax writes it for signed integers; None if ``eqn`` isn't that.

    ``select(sign(a) != sign(b) and rem(a, b) != 0, div(a, b), div(a, b) - 1)``. Read one by one,
    these equations allow ``a // b`` to be -1 for an ``a`` of zero.
    """
    selected = _select(eqn)
    if selected is None:
        return None
    rounds_down, quotient, less = selected
    division = _made_by("div_p", quotient, producer)
    lowered = _made_by("sub_p", less, producer)
    if division is None or lowered is None:
        return None
    a, b = division.invars
    if not _same(lowered.invars[0], quotient) or fact_of(lowered.invars[1]).constant != _ONE:
        return None
    if not _is_correction(rounds_down, a, b, producer, fact_of):
        return None
    found = quotient_range(
        fact_of(a).range(a.aval.dtype), fact_of(b).range(b.aval.dtype), lambda n, d: n // d
    )
    limit = limits(quotient.aval.dtype)
    if found is None or limit is None or found[1] > limit[1]:
        return None
    return meet(Fact(), eqn.outvars[0].aval, *found)


def _select(eqn: Any) -> tuple[Any, Any, Any] | None:
    """Predicate, false case and true case of a select of two, also of one in a call of its own."""
    if eqn.primitive is primitive("select_n_p"):
        return tuple(eqn.invars) if len(eqn.invars) == 3 else None
    body = eqn.params.get("jaxpr") if eqn.primitive is primitive("jit_p") else None
    if body is None or len(eqn.outvars) != 1:
        return None
    inner = jaxprs.opened(body)
    if len(inner.eqns) != 1 or list(inner.outvars) != list(inner.eqns[0].outvars):
        return None
    chosen = _select(inner.eqns[0])
    if chosen is None:
        return None
    outer = dict(zip(inner.invars, eqn.invars))
    if any(jaxprs.is_literal(atom) or atom not in outer for atom in chosen):
        return None
    predicate, false_case, true_case = (outer[atom] for atom in chosen)
    return predicate, false_case, true_case


def _is_correction(
    atom: Any, a: Any, b: Any, producer: Producers, fact_of: Callable[[Any], Fact]
) -> bool:
    both = _made_by("and_p", atom, producer)
    if both is None:
        return False
    for signs, inexact in (both.invars, both.invars[::-1]):
        unlike = _made_by("ne_p", signs, producer)
        remains = _made_by("ne_p", inexact, producer)
        if unlike is None or remains is None:
            continue
        left = _made_by("sign_p", unlike.invars[0], producer)
        rest = _made_by("rem_p", remains.invars[0], producer)
        if left is None or rest is None:
            continue
        if (
            _same(left.invars[0], a)
            and _is_sign(unlike.invars[1], b, producer, fact_of)
            and _same(rest.invars[0], a)
            and _same(rest.invars[1], b)
            and fact_of(remains.invars[1]).is_zero()
        ):
            return True
    return False


def _is_sign(atom: Any, b: Any, producer: Producers, fact_of: Callable[[Any], Fact]) -> bool:
    """Whether an atom is the sign of ``b``, taken here or, of a known one, before a loop."""
    sign = _made_by("sign_p", atom, producer)
    if sign is not None:
        return _same(sign.invars[0], b)
    lo, hi = fact_of(b).range(b.aval.dtype)
    known = fact_of(atom).constant
    return known is not None and ((lo > 0 and known.value == 1) or (hi < 0 and known.value == -1))


def _made_by(name: str, atom: Any, producer: Producers) -> Any:
    eqn = None if jaxprs.is_literal(atom) else producer(atom)
    return eqn if eqn is not None and eqn.primitive is primitive(name) else None


def _same(x: Any, y: Any) -> bool:
    if jaxprs.is_literal(x) and jaxprs.is_literal(y):
        return x.aval == y.aval and bool(x.val == y.val)
    return x is y
