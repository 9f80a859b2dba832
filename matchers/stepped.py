"""Recognise an array whose value is a function of its flat index in one step pattern.

``value[p] = offset + stride · ((p // div) mod mod)``, p the row-major index: an iota, one with
every element repeated (`jnp.repeat`), one repeated as a whole (`jnp.tile`), and both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .fact import Affine, limits
from .graph import Scope


@dataclass(frozen=True)
class Stepped:
    """``value[p] = offset + stride · ((p // div) mod mod)`` in exact integers."""

    offset: int
    stride: int
    div: int
    mod: int

    def range(self) -> tuple[int, int]:
        """Least and greatest value that the formula gives."""
        last = self.offset + self.stride * (self.mod - 1)
        return min(self.offset, last), max(self.offset, last)


def find_stepped(scope: Scope, atom: Atom) -> Stepped | None:
    """The form of an array, of any dtype and shape, by its row-major index; None if not known.

    A constant array has a stride of 0.
    """
    if not getattr(atom.aval, "shape", ()) or 0 in atom.aval.shape:
        return None
    affine = scope.fact(atom).affine
    if affine is not None:
        return _of_affine(affine, atom.aval.shape)
    producer = scope.producer(atom)
    if producer is None:
        value = scope.resolve(atom)
        affine = None if value.scope is scope else value.scope.fact(value.atom).affine
        return None if affine is None else _of_affine(affine, atom.aval.shape)
    return _of_equation(producer.scope, producer.eqn)


def _of_affine(affine: Affine, shape: Sequence[int]) -> Stepped | None:
    """Merges dimensions that count on where the next one ends; the rest must not move."""
    if affine.offset is None:
        return None
    moving: list[tuple[int, int, int]] = []
    size = 1
    for stride, n in zip(reversed(affine.strides), reversed(shape)):
        if n > 1 and stride:
            below = moving[-1] if moving else None
            if below is not None and below[1] * below[2] == size and stride == below[0] * below[2]:
                moving[-1] = (below[0], below[1], below[2] * n)
            else:
                moving.append((stride, size, n))
        size *= n
    if len(moving) > 1:
        return None
    return Stepped(affine.offset, *(moving[0] if moving else (0, 1, 1)))


def _of_equation(scope: Scope, eqn: Eqn) -> Stepped | None:
    made = eqn.primitive
    out = eqn.outvars[0].aval
    if made is primitive("iota_p"):  # of floats; facts know those of integers
        strides = tuple(int(d == eqn.params["dimension"]) for d in range(len(out.shape)))
        return _of_affine(Affine(0, strides), out.shape)
    if made in (primitive("name_p"), primitive("pvary_p"), primitive("squeeze_p")):
        return find_stepped(scope, eqn.invars[0])
    if made is primitive("reshape_p"):
        return None if eqn.params["dimensions"] else find_stepped(scope, eqn.invars[0])
    if made is primitive("broadcast_in_dim_p"):
        return _broadcast(find_stepped(scope, eqn.invars[0]), eqn)
    if made is primitive("tile_p"):
        return _tiled(find_stepped(scope, eqn.invars[0]), eqn)
    if made is primitive("convert_element_type_p"):
        return _representable(find_stepped(scope, eqn.invars[0]), eqn)
    if made in (primitive("add_p"), primitive("sub_p"), primitive("mul_p")):
        return _representable(_by_constant(scope, eqn), eqn)
    return None


def _broadcast(inner: Stepped | None, eqn: Eqn) -> Stepped | None:
    """Dimensions added behind a vector repeat every element; those in front, the whole."""
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if inner is None or source.size == out.size:
        return inner
    axis = eqn.params["broadcast_dimensions"][0]
    if len(source.shape) != 1 or source.shape[0] != out.shape[axis]:
        return None
    if math.prod(out.shape[:axis]) > 1 and inner.div * inner.mod != source.size:
        return None
    return replace(inner, div=inner.div * math.prod(out.shape[axis + 1 :]))


def _tiled(inner: Stepped | None, eqn: Eqn) -> Stepped | None:
    """A whole that repeats every ``div · mod`` elements goes on doing so."""
    shape = eqn.invars[0].aval.shape
    whole = inner is not None and len(shape) == 1 and inner.div * inner.mod == math.prod(shape)
    return inner if whole else None


def _representable(form: Stepped | None, eqn: Eqn) -> Stepped | None:
    """The form, unless a value could wrap around in the result's dtype."""
    limit = limits(eqn.outvars[0].aval.dtype)
    if form is None or limit is None:
        return form
    lo, hi = form.range()
    return form if limit[0] <= lo and hi <= limit[1] else None


def _by_constant(scope: Scope, eqn: Eqn) -> Stepped | None:
    """The sum, difference or product of a form and a known integer."""
    a, b = eqn.invars
    known = scope.fact(b).constant
    form = None if known is None else _of_operand(scope, a, eqn)
    if known is None and eqn.primitive is not primitive("sub_p"):
        known = scope.fact(a).constant
        form = None if known is None else _of_operand(scope, b, eqn)
    if form is None or known is None or not isinstance(known.value, int):
        return None
    if eqn.primitive is primitive("mul_p"):
        return replace(form, offset=form.offset * known.value, stride=form.stride * known.value)
    step = -known.value if eqn.primitive is primitive("sub_p") else known.value
    return replace(form, offset=form.offset + step)


def _of_operand(scope: Scope, atom: Atom, eqn: Eqn) -> Stepped | None:
    """The form of an operand that isn't broadcast."""
    same = not jaxprs.is_literal(atom) and atom.aval.shape == eqn.outvars[0].aval.shape
    return find_stepped(scope, atom) if same else None
