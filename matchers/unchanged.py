"""Parameters that a train step returns as it got them."""

from __future__ import annotations

import jax.numpy as jnp

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .graph import Scope

_DEEP = 12
"""Operations behind one another that are looked through."""


def unchanged(root: Scope) -> dict[int, bool]:
    """Parameters, by input, that the program returns as they are, and whether with zero added."""
    found: dict[int, bool] = {}
    for atom in jaxprs.opened(root.body).outvars:
        value = root.resolve(atom)
        producer = None if jaxprs.is_literal(value.atom) else root.producer(atom)
        updated = False
        if producer is not None and producer.eqn.primitive is primitive("add_p"):
            for operand in (0, 1):
                scope = producer.scope
                if is_nothing(scope, producer.eqn.invars[1 - operand]):
                    value, updated = scope.resolve(producer.eqn.invars[operand]), True
        if value.scope is root and not jaxprs.is_literal(value.atom):
            position = root.position(value.atom)
            aval = value.atom.aval
            # A count of steps is no parameter.
            if position is not None and aval.shape and jnp.issubdtype(aval.dtype, jnp.floating):
                found[position] = updated or found.get(position, False)
    return found


def is_nothing(scope: Scope, atom: Atom, deep: int = _DEEP) -> bool:
    """Whether a value is zero whichever branches are taken, as long as no counter isn't finite.

    Gradients that are summed up over several steps, as by `optax.MultiSteps`, end in an update that
    is made in one branch and multiplied by whether that is the one.
    """
    if scope.fact(atom).is_zero():
        return True
    value = scope.resolve(atom)
    if jaxprs.is_literal(value.atom) or not deep:
        return False
    inner = value.scope
    made = inner.definition(value.atom)
    if made is None:
        return inner.fact(value.atom).is_zero()
    index, result = made
    eqn = inner.eqns[index]
    if eqn.primitive is primitive("cond_p"):
        return all(
            is_nothing(branch, jaxprs.opened(branch.body).outvars[result], deep - 1)
            for branch in inner.children.get(index, {}).values()
        )
    if eqn.primitive is primitive("mul_p"):
        for one, other in (eqn.invars, eqn.invars[::-1]):
            if _counts(inner, one) and is_nothing(inner, other, deep - 1):
                return True
        return False
    if eqn.primitive is primitive("select_n_p"):
        return all(is_nothing(inner, a, deep - 1) for a in eqn.invars[1:])
    passed = ("convert_element_type_p", "broadcast_in_dim_p", "reshape_p", "neg_p")
    return any(eqn.primitive is primitive(p) for p in passed) and (
        is_nothing(inner, eqn.invars[0], deep - 1)
    )


def _counts(scope: Scope, atom: Atom) -> bool:
    """Whether a factor was an integer or a flag, which are finite."""
    made = scope.producer(atom)
    return (
        made is not None
        and made.eqn.primitive is primitive("convert_element_type_p")
        and not jnp.issubdtype(made.eqn.invars[0].aval.dtype, jnp.floating)
    )
