"""A SwiGLU over a grouped GEMM that is nearly one: what stands between, for a report to say."""

from __future__ import annotations

from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from ..compat.source import source_line
from .graph import Scope
from .grouped_gemm import grouped_gemm
from .pattern import Mismatch
from .swiglu import products_after, silu_behind, stopped_at
from .swiglu_factors import near_by_factors

_BETWEEN = ("add_p", "sub_p", "neg_p", "min_p", "max_p", "clamp_p", "select_n_p", "div_p",
            "reshape_p", "squeeze_p", "transpose_p", "gather_p", "tanh_p")  # fmt: skip
_FAR = 16
"""Equations behind a factor among which the GEMM is looked for."""


def near_swiglu(scope: Scope, index: int) -> Mismatch | None:
    """Why a product of an activated part of a GEMM with another is no SwiGLU of its halves.

    Looked for only where there is a grouped GEMM at ``index``; None where no product of two parts
    of it, or of GEMMs of the same rows, one activated, follows within few equations.
    """
    if grouped_gemm(scope.eqns[index]) is None:
        return None
    for product in products_after(scope, index, through=_BETWEEN):
        eqn = scope.eqns[product]
        factors = near_by_factors(scope, product, index)
        if factors is not None:
            return factors
        for a, b in (eqn.invars, eqn.invars[::-1]):
            gate = silu_behind(scope, a)
            if gate is None or not all(_comes_from(scope, v, index) for v in (gate, b)):
                continue
            for name, atom in (("gate", gate), ("up", b)):
                stop = _stop(scope, atom)
                if stop is not None:
                    path = scope.eqns[index].primitive.name, name
                    return Mismatch(path, _shown(stop), "a half of the GEMM's columns as it is")
    return None


def _stop(scope: Scope, atom: Atom) -> Eqn | None:
    """The single operation that stands between a factor and its GEMM; no call, which may do all."""
    index = stopped_at(scope, atom)
    if index is None:
        return None
    eqn = scope.eqns[index]
    named = any(eqn.primitive is primitive(p) for p in (*_BETWEEN, "slice_p", "split_p"))
    return eqn if named else None


def _comes_from(scope: Scope, atom: Atom, index: int) -> bool:
    """Whether the equation ``index`` is among the few that an atom is made by."""
    waiting, seen = [atom], set[int]()
    while waiting and len(seen) < _FAR:
        here = waiting.pop(0)
        made = None if jaxprs.is_literal(here) else scope.definition(here)
        if made is None or made[0] in seen:
            continue
        if made[0] == index:
            return True
        seen.add(made[0])
        eqn = scope.eqns[made[0]]
        if grouped_gemm(eqn) is None:
            waiting.extend(a for a in eqn.invars if a.aval.ndim)
    return False


def _shown(eqn: Eqn) -> str:
    """An operation with what it is told of places, and its line."""
    told: dict[str, Any] = {}
    if eqn.primitive is primitive("slice_p"):
        names = ("start_indices", "limit_indices", "strides")
        told = {n: eqn.params[n] for n in names if eqn.params[n] is not None}
    elif eqn.primitive is primitive("split_p"):
        told = {n: eqn.params[n] for n in ("sizes", "axis")}
    shown = ", ".join(f"{name}={value}" for name, value in told.items())
    of = f"({shown}) of {eqn.invars[0].aval.str_short(short_dtypes=True)}" if told else ""
    return f"{eqn.primitive.name}{of} at {source_line(eqn)}"
