"""Find the inverse of a permutation among the values that a body already has."""

from __future__ import annotations

from collections.abc import Iterator

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Var
from .argsort import sort_primitive
from .fact import limits
from .graph import Scope, Value
from .origin import origin


def find_inverse(scope: Scope, atom: Atom, before: int) -> Var | None:
    """A variable that holds the inverse of the permutation that indices come from.

    Args:
      scope: the body.
      atom: indices of shape ``[n]`` or ``[n, 1]``, known to be a permutation.
      before: the index of the equation that wants the inverse.
    """
    return inverse_of(scope, origin(scope, atom), atom.aval.shape[0], before)


def inverse_of(scope: Scope, permutation: Value, n: int, before: int) -> Var | None:
    """A variable that holds the inverse of a permutation of ``n``, given by its `origin`.

    The inverse is the permutation's argsort; or, of a permutation that is itself the argsort of
    one, the latter. Only values that somebody reads anyway and that are there before equation
    ``before`` count, so that nothing is computed for it.
    """
    key = argsorted_key(permutation)
    for var in _index_variables(scope, n, before):
        candidate = origin(scope, var)
        if key is not None and candidate == key and _is_permutation(key):
            return var
        if argsorted_key(candidate) == permutation:
            return var
    return None


def argsorted_key(value: Value) -> Value | None:
    """What a value is the argsort of: the key of the sort that carried the positions to it."""
    producer = None if jaxprs.is_literal(value.atom) else value.scope.producer(value.atom)
    if producer is None or producer.eqn.primitive is not sort_primitive():
        return None
    eqn, inner = producer.eqn, producer.scope
    positions = eqn.invars[producer.result]
    shape = positions.aval.shape
    if producer.result == 0 or len(shape) != 1 or not inner.fact(positions).is_iota(0, shape):
        return None
    return origin(inner, eqn.invars[0])


def _is_permutation(value: Value) -> bool:
    return value.scope.fact(value.atom).permutation == 0


def _index_variables(scope: Scope, n: int, before: int) -> Iterator[Var]:
    """Integer vectors of length ``n`` that are in scope and read, in order."""
    made = (v for i in scope.live if i < before for v in scope.eqns[i].outvars)
    for var in (*jaxprs.constvars(scope.body), *jaxprs.opened(scope.body).invars, *made):
        aval = var.aval
        if getattr(aval, "shape", None) in ((n,), (n, 1)) and limits(aval.dtype) is not None:
            if scope.readers(var):
                yield var
