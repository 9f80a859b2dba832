"""Recognise the backward of ``silu(gate) * up`` on what a grouped GEMM has made.

However it is written, it is two polynomials of the cotangent, of gate, up, and the gate's logistic:
these are compared, and not the operations that spell them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import dtypes

from ..compat import jaxprs
from ..compat.bodies import Flow
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .disjoint_pads import find_sum
from .graph import OUTPUT, Scope
from .grouped_gemm import grouped_gemm
from .polynomial import Leaf, Polynomials
from .swiglu import half_of, is_needed, narrower

_TYPES = (np.dtype("float32"), dtypes.bfloat16)
_FAR = 32
"""Equations after a GEMM among which its backward is looked for."""


@dataclass(frozen=True)
class Saved:
    """What the forward left of gate and up."""

    arrays: tuple[Atom, ...]
    """Gate and up, ``[m, n]``; or the one array that they are the halves of. Empty where one of
    them isn't at hand in this body."""
    gate_first: bool = True
    """Of one array, whether the first half is the gate's."""


@dataclass(frozen=True)
class DSwiGlu:
    """The gradients of gate and up, made of the result of a grouped GEMM of one body."""

    gemm: int
    saved: Saved
    results: tuple[int, ...]
    """The equation that lays them side by side, or those of the gate's gradient and the up's."""
    parts: tuple[Var, ...]
    """What is read of these: one variable, or the gate's gradient and the up's."""
    gate_first: bool
    """Where they lie side by side, whether the gate's comes first."""
    narrowed: tuple[Any, ...]
    """Types that a value between is rounded to."""
    others: tuple[int, ...]
    """Equations that read what lies between, `OUTPUT` for the body's outputs."""
    weighted: bool
    """Whether the cotangent is multiplied by something else, too."""


@dataclass(frozen=True)
class _Found:
    """The gradients of gate and up among what is computed of a value."""

    between: set[int]
    """Equations by element that the value goes through."""
    ends: tuple[Var, Var]
    leaves: tuple[Leaf, Leaf]
    """Gate and up."""
    weighted: bool
    algebra: Polynomials


def find_dswiglu(scope: Scope, index: int) -> DSwiGlu | str | None:
    """The backward whose cotangent the grouped GEMM at ``index`` makes.

    The name of an equation, where the backward is in a body that this equation runs.
    """
    if grouped_gemm(scope.eqns[index]) is None:
        return None
    dh = scope.eqns[index].outvars[0]
    found = _recognised(scope, dh)
    if found is not None:
        return _site(scope, index, found)
    for reader in scope.readers(dh):
        inside = None if reader == OUTPUT else scope.inside(reader)
        if inside is None:
            continue
        body, entered = inside
        given = zip(entered.inputs, jaxprs.invars(entered.body), strict=True)
        for port, var in given:
            handed = port.outer is not None and scope.eqns[reader].invars[port.outer] is dh
            if handed and port.flow is Flow.SAME and _recognised(body, var) is not None:
                return str(scope.eqns[reader].primitive.name)
    return None


def _recognised(scope: Scope, dh: Var) -> _Found | None:
    between, ends = _after(scope, dh)
    if not 2 <= len(ends) <= 4:
        return None
    algebra = Polynomials(scope, dh)
    found = [(algebra.of(v), v) for v in ends]
    likely: list[_Found] = []
    for of_up, d_up in found:
        known = algebra.gate_of(of_up)
        if known is None:
            continue
        gate, more = known
        for of_gate, d_gate in found:
            up = algebra.up_of(of_gate, gate, more)
            if up is not None and d_up is not d_gate:
                likely.append(_Found(between, (d_gate, d_up), (gate, up), bool(more), algebra))
    # Products of a weighted cotangent with what the forward left look alike: the gradients lie
    # side by side.
    likely.sort(key=lambda f: (f.weighted, _together(scope, f.ends) is None))
    return likely[0] if likely else None


def _after(scope: Scope, dh: Var) -> tuple[set[int], list[Var]]:
    """Equations by element after a value, and their results that others read too, in order."""
    shape = dh.aval.shape
    seen: set[int] = set()
    ends: list[Var] = []
    waiting = [dh]
    while waiting and len(seen) < _FAR:
        var = waiting.pop(0)
        for reader in scope.readers(var):
            eqn = None if reader == OUTPUT else scope.eqns[reader]
            if eqn is None or not _by_element(eqn, shape):
                if var not in ends:
                    ends.append(var)
            elif reader not in seen:
                seen.add(reader)
                waiting.extend(v for v in eqn.outvars if not jaxprs.is_dropped(v))
    return seen, ends


def _by_element(eqn: Eqn, shape: tuple[int, ...]) -> bool:
    names = ("mul_p", "add_p", "add_jaxvals_p", "sub_p", "neg_p", "convert_element_type_p", "jit_p")
    return any(eqn.primitive is primitive(n) for n in names) and all(
        v.aval.shape == shape and dtypes.issubdtype(v.aval.dtype, np.floating) for v in eqn.outvars
    )


def _site(scope: Scope, index: int, found: _Found) -> DSwiGlu | None:
    ends = found.ends
    together = _together(scope, ends)
    if together is None:
        made = (scope.definition(v) for v in ends)
        results = tuple(dict.fromkeys(m[0] for m in made if m is not None))
        gate_first, joining = True, set[int]()
    else:
        result, gate_first, joining = together
        results = (result,)
    saved = _saved(scope, found.algebra, found.leaves, None if together is None else gate_first)
    if not _made_before(scope, saved.arrays, index):
        return None
    path = {index, *found.between, *joining, *results}
    parts = ends if together is None else (scope.eqns[results[0]].outvars[0],)
    inner = [v for i in path for v in scope.eqns[i].outvars
             if v not in parts and not jaxprs.is_dropped(v)]  # fmt: skip
    gone = frozenset({*results, *joining})
    others = {r for v in inner for r in scope.readers(v) if r not in path and (
        r == OUTPUT or any(is_needed(scope, o, gone) for o in scope.eqns[r].outvars)
    )}  # fmt: skip
    narrowed = tuple(found.algebra.narrowed)
    return DSwiGlu(index, saved, results, parts, gate_first, narrowed, tuple(sorted(others)),
                   found.weighted)  # fmt: skip


def _made_before(scope: Scope, atoms: Sequence[Atom], index: int) -> bool:
    """Whether all of ``atoms`` are there before an equation.

    Gate and up are, of a backward. Seen from the GEMM that makes up, the cotangent takes up's part
    in the same polynomials; and it comes later.
    """
    made = (scope.definition(a) for a in atoms if jaxprs.is_var(a))
    return all(m is None or m[0] < index for m in made)


def _together(scope: Scope, ends: tuple[Var, Var]) -> tuple[int, bool, set[int]] | None:
    """The equation that alone reads both and lays them side by side; whether the first is first.

    And the equations on the way there.
    """
    first, second = (_only_reader(scope, v) for v in ends)
    if first is None or second is None:
        return None
    eqn = scope.eqns[first]
    gate_first: bool | None = None
    result, joining = first, set[int]()
    if first == second and eqn.primitive is primitive("concatenate_p"):
        if eqn.params["dimension"] == 1 and len(eqn.invars) == 2:
            gate_first = eqn.invars[0] is ends[0]
    elif eqn.primitive is primitive("pad_p"):
        joined = _only_reader(scope, eqn.outvars[0])
        added = None if joined is None else find_sum(scope, joined)
        if joined is not None and added is not None and not added.others:
            gate_first = _order(added.parts, ends)
            result, joining = joined, {first, second}
    if gate_first is None:
        return None
    after = _only_reader(scope, scope.eqns[result].outvars[0])
    if after is not None and _rounds(scope.eqns[after]):
        return after, gate_first, joining | {result}
    return result, gate_first, joining


def _order(parts: Sequence[Any], ends: tuple[Var, Var]) -> bool | None:
    """Whether the first of two padded halves comes first; None where they are no such halves."""
    n = int(ends[0].aval.shape[1])
    at: dict[Any, int] = {}
    for part in parts:
        rows, columns = (tuple(map(int, c)) for c in part.config)
        if part.zero and rows == (0, 0, 0) and columns in ((0, n, 0), (n, 0, 0)):
            at[part.operand] = 0 if columns == (0, n, 0) else 1
    order = [at.get(v) for v in ends]
    return order[0] == 0 if len(parts) == 2 and order in ([0, 1], [1, 0]) else None


def _rounds(eqn: Eqn) -> bool:
    if eqn.primitive is not primitive("convert_element_type_p"):
        return False
    return (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) == _TYPES


def _only_reader(scope: Scope, var: Var) -> int | None:
    readers = scope.readers(var)
    return readers[0] if len(readers) == 1 and readers[0] != OUTPUT else None


def _saved(
    scope: Scope, algebra: Polynomials, leaves: tuple[Leaf, Leaf], gate_first: bool | None
) -> Saved:
    """Gate and up; as one array where its halves lie as the result's are to."""
    atoms = [algebra.atom_of(leaf) for leaf in leaves]
    if atoms[0] is None or atoms[1] is None:
        return Saved(())
    found = [_half(scope, a) for a in atoms if a is not None]
    (first, one), (second, other) = found
    if one is not None and one is other and {first, second} == {0, 1}:
        if gate_first in (None, first == 0):
            return Saved((_widened(scope, one),), first == 0)
    return Saved((atoms[0], atoms[1]))


def _half(scope: Scope, atom: Atom) -> tuple[int | None, Atom | None]:
    """Which half of which array's columns an atom is."""
    made = None if jaxprs.is_literal(atom) else scope.definition(atom)
    half = None if made is None else half_of(scope.eqns[made[0]], made[1], 1)
    return (None, None) if made is None or half is None else (half, scope.eqns[made[0]].invars[0])


def _widened(scope: Scope, atom: Atom) -> Atom:
    """An array before it was widened."""
    made = None if jaxprs.is_literal(atom) else scope.definition(atom)
    eqn = None if made is None else scope.eqns[made[0]]
    if eqn is None or eqn.primitive is not primitive("convert_element_type_p"):
        return atom
    source = eqn.invars[0]
    kept = source.aval.dtype in _TYPES and not narrower(
        eqn.outvars[0].aval.dtype, source.aval.dtype
    )
    return source if kept else atom
