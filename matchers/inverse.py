"""Find the inverse of a permutation among the values that a program already has."""

from __future__ import annotations

from collections.abc import Iterator

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Var
from .argsort import sort_primitive
from .fact import limits
from .graph import Scope, Value
from .origin import Origin, enclosing, origin

_First = dict[Origin, tuple[int, Var]]
"""Variables with the index of the equation that makes each, -1 of an input."""


def find_inverse(scope: Scope, atom: Atom, before: int) -> Var | None:
    """A variable that holds the inverse of the permutation that indices come from.

    The inverse is the permutation's argsort; or, of a permutation that is itself the argsort of
    one, the latter. Only values that somebody reads anyway and that are there before equation
    ``before`` count, so that nothing is computed for it.

    Args:
      scope: the body.
      atom: indices of shape ``[n]`` or ``[n, 1]``, known to be a permutation.
      before: the index of the equation that wants the inverse.
    """
    return inverse_of(scope, origin(scope, atom), atom.aval.shape[0], before)


def find_inverse_elsewhere(scope: Scope, atom: Atom) -> Value | None:
    """The inverse of a permutation that came out of another loop, where it was at hand.

    A forward scan's order, say, in the backward scan: the forward's body has the inverse, which
    `passes.thread` can bring.
    """
    made = origin(scope, atom)
    if not made.crossed:
        return None
    for source in enclosing(made.value.scope):
        var = inverse_of(source, Origin(made.value), atom.aval.shape[0], len(source.eqns))
        if var is not None:
            return Value(source, var)
    return None


def bytes_if_brought(scope: Scope, atom: Atom) -> int:
    """Bytes that a value like ``atom`` takes, kept for all iterations of the loops it came by."""
    crossed = set(origin(scope, atom).crossed)
    kept = int(atom.aval.size * atom.aval.dtype.itemsize)
    while (caller := scope.caller) is not None:
        if (id(caller.scope), caller.index) in crossed:
            length = caller.scope.eqns[caller.index].params.get("length")
            kept *= length if type(length) is int else 1
        scope = caller.scope
    return kept


def inverse_of(scope: Scope, permutation: Origin, n: int, before: int) -> Var | None:
    """As `find_inverse`, of a permutation of ``n`` given by its origin."""
    key = argsorted_key(permutation)
    found = [_argsorts(scope, n).get(permutation)]
    if key is not None and _is_permutation(key.value):
        found.append(_indices_by_origin(scope, n).get(key))
    first = min((f for f in found if f is not None), default=None, key=lambda f: f[0])
    return first[1] if first is not None and first[0] < before else None


def _argsorts(scope: Scope, n: int) -> _First:
    """The first variable that is the argsort of each origin.

    That is a sort's result, or comes from another body. What this body makes of one is later.
    """
    memo = "argsorts", n
    found: _First | None = scope.memo.get(memo)
    if found is None:
        found = scope.memo[memo] = {}
        for at, var in _index_variables(scope, n):
            if at < 0 or at in scope.children or scope.eqns[at].primitive is sort_primitive():
                key = argsorted_key(origin(scope, var))
                if key is not None:
                    found.setdefault(key, (at, var))
    return found


def _indices_by_origin(scope: Scope, n: int) -> _First:
    """The first variable of each origin."""
    memo = "indices by origin", n
    found: _First | None = scope.memo.get(memo)
    if found is None:
        found = scope.memo[memo] = {}
        for at, var in _index_variables(scope, n):
            found.setdefault(origin(scope, var), (at, var))
    return found


def argsorted_key(made: Origin) -> Origin | None:
    """What a value is the argsort of: the key of the sort that carried the positions to it."""
    inner, atom = made.value.scope, made.value.atom
    found = None if jaxprs.is_literal(atom) else inner.definition(atom)
    if found is None or inner.eqns[found[0]].primitive is not sort_primitive():
        return None
    eqn, result = inner.eqns[found[0]], found[1]
    positions = eqn.invars[result]
    shape = positions.aval.shape
    if result == 0 or len(shape) != 1 or not inner.fact(positions).is_iota(0, shape):
        return None
    key = origin(inner, eqn.invars[0])
    return Origin(key.value, made.crossed + key.crossed)


def stable_order_key(made: Origin) -> Origin | None:
    """The integers ``[n]`` that a value is the stable ascending argsort of."""
    key = argsorted_key(made)
    if key is None or limits(key.value.atom.aval.dtype) in (None, (0, 1)):
        return None
    producer = made.value.scope.producer(made.value.atom)
    assert producer is not None
    eqn, inner = producer.eqn, producer.scope
    keys = eqn.params["num_keys"]
    if keys == 1:
        return key if eqn.params["is_stable"] else None
    return key if inner.fact(eqn.invars[1]).is_iota(0, eqn.invars[1].aval.shape) else None


def came_by_loop(scope: Scope, atom: Atom) -> bool:
    """Whether an index was made in another body's loop."""
    return bool(origin(scope, atom).crossed)


def _is_permutation(value: Value) -> bool:
    return value.scope.fact(value.atom).permutation == 0


def _index_variables(scope: Scope, n: int) -> Iterator[tuple[int, Var]]:
    """Integer vectors of length ``n`` that are in scope and there anyway, by what makes them.

    What enters a body from outside is there whether the body reads it or not.
    """
    vectors: dict[int, list[tuple[int, Var]]] | None = scope.memo.get("integer vectors")
    if vectors is None:
        vectors = scope.memo["integer vectors"] = {}
        for i, var in _integer_vectors(scope):
            vectors.setdefault(var.aval.shape[0], []).append((i, var))
    return ((i, v) for i, v in vectors.get(n, ()) if i < 0 or scope.readers(v))


def _integer_vectors(scope: Scope) -> Iterator[tuple[int, Var]]:
    """All integers of shape ``[n]`` or ``[n, 1]`` in scope, of any ``n``: looked for once."""
    for var in (*jaxprs.constvars(scope.body), *jaxprs.opened(scope.body).invars):
        if _is_index(var):
            yield -1, var
    eqns = scope.eqns
    for i in scope.live:  # of every equation: that most results are no vectors is found out here
        for var in eqns[i].outvars:
            shape = getattr(var.aval, "shape", None)
            if not shape or len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
                continue
            if limits(var.aval.dtype) is not None:
                yield i, var


def _is_index(var: Var) -> bool:
    shape = getattr(var.aval, "shape", None)
    if not shape or len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        return False
    return limits(var.aval.dtype) is not None
