"""Recognise the identity matrix, of any number of equal copies: 1 where row and column agree."""

from __future__ import annotations

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .fact import Affine
from .graph import Scope


def is_identity(scope: Scope, atom: Atom) -> bool:
    """Whether an array is, in its last two dimensions, the identity matrix."""
    return _agrees(scope, atom, mask=False)


def _agrees(scope: Scope, atom: Atom, mask: bool) -> bool:
    """``mask``: a bool that is true on the diagonal and nowhere else; else 1 there and 0 else."""
    shape = getattr(atom.aval, "shape", ())
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2:
        return False
    producer = scope.producer(atom)
    if producer is None:
        return False
    scope, eqn = producer.scope, producer.eqn
    if eqn.primitive is primitive("broadcast_in_dim_p"):
        inner = eqn.invars[0]
        dims = tuple(eqn.params["broadcast_dimensions"])
        rank = len(getattr(inner.aval, "shape", ()))
        kept = rank >= 2 and dims[-2:] == (len(shape) - 2, len(shape) - 1)
        # The rows and columns of one element would be repeated.
        return kept and inner.aval.shape[-2:] == shape[-2:] and _agrees(scope, inner, mask)
    if eqn.primitive is primitive("convert_element_type_p"):
        inner = eqn.invars[0]
        from_mask = not mask and inner.aval.dtype == bool
        return _agrees(scope, inner, mask or from_mask)
    if eqn.primitive is primitive("select_n_p") and not mask and len(eqn.invars) == 3:
        zero, one = (scope.fact(a).constant for a in eqn.invars[1:])
        known = zero is not None and one is not None and (zero.value, one.value) == (0, 1)
        return known and not zero.negative and _agrees(scope, eqn.invars[0], True)
    if eqn.primitive is primitive("eq_p") and mask:
        return _diagonal(scope, eqn.invars[0], eqn.invars[1], len(shape))
    return False


def _diagonal(scope: Scope, a: Atom, b: Atom, rank: int) -> bool:
    """Whether two integer arrays agree where row and column do, and nowhere else."""
    found = [None if jaxprs.is_literal(x) else scope.fact(x).affine for x in (a, b)]
    if any(f is None or f.offset is None for f in found):
        return False
    first, second = found
    assert isinstance(first, Affine)
    assert isinstance(second, Affine)
    rows, columns = ((0,) * (rank - 2) + last for last in ((1, 0), (0, 1)))
    return first.offset == second.offset and {first.strides, second.strides} == {rows, columns}
