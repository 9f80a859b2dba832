"""Recognise ``silu(gate) * up`` of what one grouped GEMM, or two of one operand, have made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import dtypes

from ..compat import jaxprs
from ..compat.bodies import Flow
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .graph import OUTPUT, Scope
from .grouped_gemm import GroupedGemm, grouped_gemm
from .logistic import Spelling, denominator_of, silu_of

_PASSED = ("convert_element_type_p", "name_p", "split_p", "slice_p", "logistic_p", "jit_p")
_FAR = 24
"""Equations after a GEMM among which its activation is looked for."""


@dataclass(frozen=True)
class Traced:
    """One operand of the activation, traced back to the GEMM that made it."""

    gemm: int
    """The GEMM's equation."""
    half: int | None
    """Which half of the GEMM's columns it is; None for all of them."""
    part: Var
    """The half as it was cut out, or the GEMM's result."""
    cut: int | None
    """The equation that cuts it out."""
    casts: tuple[Any, ...]
    """Types that it passes through on its way to the activation."""
    names: tuple[int, ...]
    """Equations that give the part a name which a remat policy may save."""
    whole_names: tuple[int, ...]
    """Those that name both halves together."""
    path: tuple[int, ...]
    """All equations between the GEMM and the part, the latter's included."""


@dataclass(frozen=True)
class SwiGlu:
    """A product of an activated gate with something else, over GEMMs of one body."""

    gate: Traced
    up: Traced | None
    """None where the other factor is no GEMM's."""
    product: int
    """The equation of the product."""
    result: int
    """The product's, or that of the cast that alone reads it."""
    silu_dtype: Any
    """In which the gate is activated."""
    spelling: Spelling
    """How its activation is written."""
    casts: tuple[Any, ...]
    """Types between the activation and the product."""

    @property
    def first(self) -> int:
        """The first GEMM's equation."""
        return self.gate.gemm if self.up is None else min(self.gate.gemm, self.up.gemm)


def find_swiglu(scope: Scope, index: int) -> SwiGlu | None:
    """The activation over the grouped GEMM at ``index``, the first of those it is made of."""
    if grouped_gemm(scope.eqns[index]) is None:
        return None
    near: SwiGlu | None = None
    for product in products_after(scope, index):
        eqn = scope.eqns[product]
        for a, b in (eqn.invars, eqn.invars[::-1]):
            found = _activation(scope, product, a, b)
            if found is None or found.first != index:
                continue
            if found.up is not None and alike(scope, found.gate, found.up):
                return found
            if found.up is not None:
                near = near or found
    return near


def alike(scope: Scope, gate: Traced, up: Traced) -> bool:
    """Whether two operands are the two halves of one GEMM, or two GEMMs of the same rows."""
    if gate.gemm == up.gemm:
        return {gate.half, up.half} == {0, 1}
    a, b = (_gemm_at(scope, t.gemm) for t in (gate, up))
    if gate.half is not None or up.half is not None or a is None or b is None:
        return False
    shared = [[g.lhs, g.group_sizes, *([] if g.group_offset is None else [g.group_offset])]
              for g in (a, b)]  # fmt: skip
    same = len(shared[0]) == len(shared[1]) and all(
        scope.resolve(x) == scope.resolve(y) for x, y in zip(*shared)
    )
    rest = [(g.transpose_rhs, g.dtype, g.precision, g.plain, g.is_kernel, g.rhs.aval.shape,
             g.rhs.aval.dtype) for g in (a, b)]  # fmt: skip
    return same and rest[0] == rest[1]


def is_needed(scope: Scope, var: Var, without: frozenset[int]) -> bool:
    """Whether ``var`` is read, in the end, by more than the equations ``without``."""
    seen: set[int] = set()
    waiting = [var]
    while waiting:
        for reader in scope.readers(waiting.pop()):
            if reader == OUTPUT:
                return True
            if reader in without or reader in seen:
                continue
            seen.add(reader)
            eqn = scope.eqns[reader]
            if jaxprs.true_effects(eqn):
                return True
            waiting.extend(v for v in eqn.outvars if not jaxprs.is_dropped(v))
    return False


def narrower(dtype: Any, than: Any) -> bool:
    """Whether ``dtype`` doesn't hold every value of the type ``than``."""
    one, other = dtypes.finfo(dtype), dtypes.finfo(than)
    return bool(one.nmant < other.nmant or one.maxexp < other.maxexp)


def products_after(scope: Scope, index: int, through: Sequence[str] = ()) -> Iterator[int]:
    """Products that what a GEMM made goes into, through casts, cuts, names and activations.

    Args:
      scope: the body.
      index: the GEMM's equation.
      through: names of further primitives to go through.
    """
    passed = {primitive(p) for p in (*_PASSED, *through)}
    seen: set[int] = set()
    waiting = list(scope.eqns[index].outvars)
    while waiting and len(seen) < _FAR:
        for reader in scope.readers(waiting.pop(0)):
            if reader == OUTPUT or reader in seen:
                continue
            seen.add(reader)
            eqn = scope.eqns[reader]
            if eqn.primitive is primitive("mul_p"):
                yield reader
            elif eqn.primitive not in passed and not _is_quotient(scope, eqn):
                continue
            waiting.extend(v for v in eqn.outvars if not jaxprs.is_dropped(v))


def _is_quotient(scope: Scope, eqn: Eqn) -> bool:
    """Whether an equation divides by ``1 + exp(-x)``, which is to multiply by a logistic."""
    return eqn.primitive is primitive("div_p") and denominator_of(scope, eqn.invars[1]) is not None


def silu_behind(scope: Scope, atom: Atom) -> Atom | None:
    """What an atom is SiLU of, but for casts."""
    found = _silu(scope, _behind_casts(scope, atom)[0])
    return None if found is None else found[0]


def stopped_at(scope: Scope, atom: Atom) -> int | None:
    """The equation that an atom comes from, seen through casts, names and the cut of a half.

    None where it is a grouped GEMM, or of no equation of this body.
    """
    part = _behind_casts(scope, atom)[0]
    cut = _cut(scope, part)
    if cut is not None:
        part = _behind_casts(scope, cut[2])[0]
    made = None if jaxprs.is_literal(part) else scope.definition(part)
    return None if made is None or grouped_gemm(scope.eqns[made[0]]) is not None else made[0]


def _activation(scope: Scope, product: int, gate: Atom, up: Atom) -> SwiGlu | None:
    activated, casts, names, _ = _behind_casts(scope, gate)
    found = None if names else _silu(scope, activated)
    # From here on in the body of the product: what another body makes has no equation here.
    traced = None if found is None else part_of_gemm(scope, found[0])
    if found is None or traced is None:
        return None
    dtype, spelling = found[0].aval.dtype, found[1]
    other = part_of_gemm(scope, up)
    result, out = product, scope.eqns[product].outvars[0]
    readers = scope.readers(out)
    if len(readers) == 1 and readers[0] != OUTPUT:
        cast = scope.eqns[readers[0]]
        if cast.primitive is primitive("convert_element_type_p") and _is_narrowing(cast):
            result = readers[0]
    return SwiGlu(traced, other, product, result, dtype, spelling, casts)


def _is_narrowing(eqn: Eqn) -> bool:
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return (source, target) == (np.dtype("float32"), dtypes.bfloat16)


def _silu(scope: Scope, atom: Atom) -> tuple[Atom, Spelling] | None:
    """What an atom is SiLU of, as an atom of ``scope``, and how that is written."""
    found = silu_of(scope, atom)
    of = None if found is None else _handed_in(scope, found.scope, found.atom)
    return None if found is None or of is None else (of, found.spelling)


def _handed_in(scope: Scope, inner: Scope, atom: Atom) -> Atom | None:
    """The atom of ``scope`` that enters a call there as an atom of ``inner``."""
    while inner is not scope:
        if jaxprs.is_literal(atom) or inner.definition(atom) is not None:
            return None
        caller, position = inner.caller, inner.position(atom)
        port = None if caller is None or position is None else caller.entered.inputs[position]
        if caller is None or port is None or port.flow is not Flow.SAME or port.outer is None:
            return None
        inner, atom = caller.scope, caller.scope.eqns[caller.index].invars[port.outer]
    return atom


def part_of_gemm(scope: Scope, atom: Atom) -> Traced | None:
    """The GEMM of this body that an atom is a part of."""
    part, casts, names, _ = _behind_casts(scope, atom)
    cut = _cut(scope, part)
    var, half = part, None
    path: tuple[int, ...] = ()
    whole_names: tuple[int, ...] = ()
    if cut is not None:
        index, half, source = cut
        var, more, whole_names, before = _behind_casts(scope, source)
        casts, path = casts + more, (index, *before)
    made = None if jaxprs.is_literal(var) else scope.definition(var)
    if made is None or grouped_gemm(scope.eqns[made[0]]) is None:
        return None
    return Traced(made[0], half, part, None if cut is None else cut[0], casts, names,
                  whole_names, path)  # fmt: skip


def _behind_casts(
    scope: Scope, atom: Atom
) -> tuple[Atom, tuple[Any, ...], tuple[int, ...], tuple[int, ...]]:
    """An atom before its casts between floats and its names; their types; the equations."""
    casts: list[Any] = []
    names: list[int] = []
    path: list[int] = []
    while not jaxprs.is_literal(atom) and (made := scope.definition(atom)) is not None:
        eqn = scope.eqns[made[0]]
        if eqn.primitive is primitive("name_p"):
            names.append(made[0])
        elif eqn.primitive is primitive("convert_element_type_p") and _is_float(eqn):
            casts.append(eqn.outvars[0].aval.dtype)
        else:
            break
        path.append(made[0])
        atom = eqn.invars[0]
    return atom, tuple(casts), tuple(names), tuple(path)


def _is_float(eqn: Eqn) -> bool:
    return all(dtypes.issubdtype(v.aval.dtype, np.floating) for v in (*eqn.invars, *eqn.outvars))


def _cut(scope: Scope, atom: Atom) -> tuple[int, int, Atom] | None:
    """The equation that cuts a half of the columns out, which half, and of what."""
    made = None if jaxprs.is_literal(atom) else scope.definition(atom)
    if made is None:
        return None
    eqn = scope.eqns[made[0]]
    half = half_of(eqn, made[1], eqn.outvars[0].aval.ndim - 1)
    return None if half is None else (made[0], half, eqn.invars[0])


def half_of(eqn: Eqn, result: int, axis: int) -> int | None:
    """Which half of its operand along ``axis`` a result of a split or slice is."""
    if eqn.primitive is primitive("split_p"):
        return _split_half(eqn.params, axis, result)
    if eqn.primitive is primitive("slice_p"):
        return _slice_half(eqn.params, eqn.invars[0].aval.shape, axis)
    return None


def _split_half(params: Mapping[str, Any], axis: int, result: int) -> int | None:
    sizes = tuple(int(s) for s in params["sizes"])
    return result if params["axis"] == axis and len(sizes) == 2 and sizes[0] == sizes[1] else None


def _slice_half(params: Mapping[str, Any], shape: tuple[int, ...], axis: int) -> int | None:
    strides = params["strides"]
    if strides is not None and set(strides) != {1}:
        return None
    starts, limits = params["start_indices"], params["limit_indices"]
    others = (d for d in range(len(shape)) if d != axis)
    if shape[axis] % 2 or any((starts[d], limits[d]) != (0, shape[d]) for d in others):
        return None
    middle = shape[axis] // 2
    return {(0, middle): 0, (middle, shape[axis]): 1}.get((starts[axis], limits[axis]))


def _gemm_at(scope: Scope, index: int) -> GroupedGemm | None:
    return grouped_gemm(scope.eqns[index])
