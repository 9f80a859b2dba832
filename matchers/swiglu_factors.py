"""A product of SwiGLU's factors that is none but for one thing: what that is, to be reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from ..compat.source import source_line
from .graph import Scope, Value
from .logistic import denominator_of, logistic_of
from .pattern import Mismatch
from .swiglu import Traced, alike, part_of_gemm, silu_behind
from .weight_gradient import is_transposed

_FAR = 16
"""Equations of a product that are looked through."""


@dataclass
class _Factors:
    """What a product is of, seen through products, casts, names and calls."""

    plain: list[Value] = field(default_factory=list)
    logistics: list[Value] = field(default_factory=list)
    """What the logistics among them are of."""
    numbers: int = 0
    """How many literals there are among them."""


def near_by_factors(scope: Scope, product: int, index: int) -> Mismatch | None:
    """Why a product of gate, up and a logistic, of the GEMM at ``index`` first, is no SwiGLU.

    None where its factors are others: those of SwiGLU's derivative are.
    """
    found = _factors(scope, scope.eqns[product].outvars[0])
    if found is None or not found.logistics:
        return None
    gates = [v for v in found.logistics if v in found.plain]
    scaled = None if gates else _scaled(found)
    gate = gates[0] if gates else scaled
    if gate is None:
        return None
    rest = [v for v in found.plain if v != gate]
    parts = [(v, part) for v in rest if (part := _part(scope, v)) is not None]
    one = _part(scope, gate)
    if one is None or len(parts) != 1 or len(found.plain) - len(rest) != 1:
        return None
    up, other = parts[0]
    if min(one.gemm, other.gemm) != index or not alike(scope, one, other):
        return None
    derived = any(_reads_gemm(v, (one, other), scope) for v in rest if v != up)
    if derived or is_transposed(scope, product):
        return None
    eqn = scope.eqns[product]
    where = source_line(eqn)
    path = scope.eqns[index].primitive.name
    if up in gates:
        return Mismatch((path, "up"), f"silu of both factors at {where}",
                        "one of them as the GEMM made it")  # fmt: skip
    if scaled is not None:
        return Mismatch((path, "gate"), f"the logistic of a multiple of it, multiplied at {where}",
                        "its own logistic")  # fmt: skip
    if len(found.logistics) > 1:
        return None
    direct = any(silu_behind(scope, a) is not None for a in eqn.invars)
    if len(rest) > 1 or found.numbers or direct:
        return Mismatch((path, "up" if direct else "product"), f"a further factor at {where}",
                        "silu(gate) * up before any other product")  # fmt: skip
    return Mismatch((path, "product"), f"gate, its logistic and up in another order at {where}",
                    "(gate * logistic(gate)) * up")  # fmt: skip


def _factors(scope: Scope, atom: Atom) -> _Factors | None:
    found = _Factors()
    waiting = [Value(scope, atom)]
    for _ in range(_FAR):
        if not waiting:
            return found
        value = _behind(waiting.pop())
        where, of = value.scope, value.atom
        made = where.producer(of)
        if made is None:
            if jaxprs.is_literal(of):
                found.numbers += 1
            else:
                found.plain.append(value)
            continue
        eqn = made.eqn
        logistic = logistic_of(where, of)
        if logistic is not None:
            found.logistics.append(_behind(Value(logistic.scope, logistic.atom)))
        elif eqn.primitive is primitive("mul_p"):
            waiting += [Value(made.scope, a) for a in eqn.invars]
        elif eqn.primitive is primitive("div_p"):
            below = denominator_of(made.scope, eqn.invars[1])
            if below is None:
                found.plain.append(value)
                continue
            found.logistics.append(_behind(Value(*below)))
            waiting.append(Value(made.scope, eqn.invars[0]))
        else:
            found.plain.append(value)
    return None


def _behind(value: Value) -> Value:
    """A value before its casts between floats and its names, seen through calls."""
    value = value.scope.resolve(value.atom)
    passed = {primitive("convert_element_type_p"), primitive("name_p")}
    while (made := value.scope.producer(value.atom)) is not None:
        if made.eqn.primitive not in passed:
            break
        value = made.scope.resolve(made.eqn.invars[0])
    return value


def _scaled(found: _Factors) -> Value | None:
    """The factor of whose multiple the one logistic is."""
    if len(found.logistics) != 1:
        return None
    value = found.logistics[0]
    of = _factors(value.scope, value.atom)
    if of is None or of.logistics:
        return None
    shared = [v for v in of.plain if v in found.plain]
    return shared[0] if len(shared) == 1 else None


def _part(scope: Scope, value: Value) -> Traced | None:
    return part_of_gemm(scope, value.atom) if value.scope is scope else None


def _reads_gemm(value: Value, parts: tuple[Traced, Traced], scope: Scope) -> bool:
    """Whether a further factor is made of what a GEMM made, as in SwiGLU's derivative."""
    waiting, seen = [value], set[tuple[int, int]]()
    while waiting and len(seen) < _FAR:
        here = waiting.pop(0)
        made = here.scope.producer(here.atom)
        if made is None:
            continue
        if made.scope is scope and made.index in (parts[0].gemm, parts[1].gemm):
            return True
        place = id(made.scope), made.index
        if place not in seen:
            seen.add(place)
            waiting += [Value(made.scope, a) for a in made.eqn.invars]
    return False
