"""Recognise the identity matrix, of any number of equal copies: 1 where row and column agree."""

from __future__ import annotations

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .fact import Affine
from .graph import Scope, Value
from .wrapped_index import same_value


def bare(scope: Scope, atom: Atom) -> Value:
    """An array of matrices before dimensions in front of them were taken away or added."""
    value = scope.resolve(atom)
    while not jaxprs.is_literal(value.atom):
        producer = value.scope.producer(value.atom)
        if producer is None or not keeps_matrices(producer.eqn):
            break
        value = producer.scope.resolve(producer.eqn.invars[0])
    return value


def keeps_matrices(eqn: Eqn) -> bool:
    """Whether an equation only adds or drops dimensions of size one in front of matrices."""
    if eqn.primitive in same_value():
        return True
    names = ("squeeze_p", "reshape_p", "broadcast_in_dim_p")
    if eqn.primitive not in [primitive(n) for n in names] or len(eqn.invars) != 1:
        return False
    shapes: list[tuple[int, ...]] = [
        getattr(a.aval, "shape", ()) for a in (eqn.invars[0], eqn.outvars[0])
    ]
    if any(len(s) < 2 for s in shapes) or (
        eqn.params.get("dimensions") and (eqn.primitive is primitive("reshape_p"))
    ):
        return False
    before, after = ([n for n in s[:-2] if n != 1] for s in shapes)
    return before == after and shapes[0][-2:] == shapes[1][-2:] and shapes[0][-1] > 1


def is_identity(scope: Scope, atom: Atom) -> bool:
    """Whether an array is, in its last two dimensions, the identity matrix."""
    return _agrees(scope, atom, mask=False)


def _agrees(scope: Scope, atom: Atom, mask: bool) -> bool:
    """``mask``: a bool that is true on the diagonal and nowhere else; else 1 there and 0 else."""
    shape: tuple[int, ...] = getattr(atom.aval, "shape", ())
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
    if keeps_matrices(eqn):
        return _agrees(scope, eqn.invars[0], mask)
    if eqn.primitive is primitive("convert_element_type_p"):
        inner = eqn.invars[0]
        from_mask = not mask and inner.aval.dtype == bool
        return _agrees(scope, inner, mask or from_mask)
    if eqn.primitive is primitive("select_n_p") and not mask and len(eqn.invars) == 3:
        zero, one = (scope.fact(a).constant for a in eqn.invars[1:])
        if zero is None or one is None or (zero.value, one.value) != (0, 1) or zero.negative:
            return False
        return _agrees(scope, eqn.invars[0], True)
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
