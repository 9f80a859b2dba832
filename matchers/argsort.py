"""Recognise an argsort: a sort by one key that carries the positions along.

The positions are any integers that rise or fall strictly along the sort axis, which covers an iota
from another scope, a reversed one (a descending argsort) and one with an offset.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..compat.jaxprs import Atom, Eqn
from ..compat.tracing import primitive
from .graph import Scope
from .pattern import Mismatch

_PARAMS = frozenset({"dimension", "is_stable", "num_keys"})


@functools.cache
def sort_primitive() -> Any:
    """The primitive of `jax.lax.sort`."""
    return primitive("lax.lax.sort_p")


@dataclass(frozen=True)
class Argsort:
    """A sort of one key and its positions."""

    eqn: Eqn
    axis: int
    length: int
    """Elements along the sort axis."""
    stable: bool
    num_keys: int
    key: Atom
    order: int | None
    """The operand that holds the positions; None if no operand is monotone along the axis."""
    rising: bool
    """Whether the positions rise, rather than fall, along the axis."""
    repeats: tuple[int, ...]
    """Other operands that hold the same value as operand ``order``, maybe in another dtype."""
    others: tuple[int, ...]
    """Operands that are neither key nor positions."""

    @property
    def positions(self) -> Atom:
        """The operand that holds the positions."""
        assert self.order is not None
        return self.eqn.invars[self.order]


def find_argsort(scope: Scope, index: int) -> Argsort | Mismatch | None:
    """The argsort that an equation is; None for a sort of one operand, which carries nothing."""
    eqn = scope.eqns[index]
    if len(eqn.invars) < 2:
        return None
    unnamed = set(eqn.params) - _PARAMS
    if unnamed:
        name = min(unnamed)
        return Mismatch(("sort", f"param {name}"), repr(eqn.params[name]), "no such param")
    axis = eqn.params["dimension"]
    length = eqn.invars[0].aval.shape[axis]
    order = _monotone_operand(scope, eqn, axis, length)
    same = () if order is None else _repeats(scope, eqn, order)
    return Argsort(
        eqn=eqn,
        axis=axis,
        length=length,
        stable=eqn.params["is_stable"],
        num_keys=eqn.params["num_keys"],
        key=eqn.invars[0],
        order=order,
        rising=order is not None and scope.fact(eqn.invars[order]).increasing(axis, length),
        repeats=same,
        others=tuple(i for i in range(1, len(eqn.invars)) if i != order and i not in same),
    )


def _monotone_operand(scope: Scope, eqn: Eqn, axis: int, length: int) -> int | None:
    for position, atom in enumerate(eqn.invars[1:], start=1):
        fact = scope.fact(atom)
        if fact.increasing(axis, length) or fact.decreasing(axis, length):
            if fact.affine is None:  # one element or none: monotone, but of any dtype
                continue
            return position
    return None


def _repeats(scope: Scope, eqn: Eqn, order: int) -> tuple[int, ...]:
    """Operands with the same value: the same variable, or the same known affine form.

    An affine form is exact, so the dtypes may differ: differentiating a sort of pairs adds an iota
    of unsigned integers beside the signed one.
    """
    first = eqn.invars[order]
    fact = scope.fact(first)
    exact = fact.affine is not None and fact.affine.offset is not None
    found: list[int] = []
    for position, atom in enumerate(eqn.invars[1:], start=1):
        if position == order or atom.aval.weak_type != first.aval.weak_type:
            continue
        same_value = scope.resolve(atom) == scope.resolve(first)
        same_form = exact and scope.fact(atom).affine == fact.affine
        if same_value or same_form:
            found.append(position)
    return tuple(found)
