"""Recognise where a program computes the inverse of a permutation, and where it masks one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .fact import limits
from .graph import OUTPUT, Scope
from .inverse import argsorted_key, stable_order_key
from .motion import is_pure
from .origin import Origin, behind, origin, reach
from .window import Window, key_window


def inverse_call(scope: Scope, index: int) -> Atom | None:
    """The permutation, of this body, that a call returns the argsort of and does nothing else."""
    eqn = scope.eqns[index]
    if eqn.primitive is not primitive("jit_p") or len(eqn.outvars) != 1 or not is_pure(eqn):
        return None
    key = _inverted(scope, eqn.outvars[0])
    return None if key is None else next((a for a in eqn.invars if _is(scope, a, key)), None)


def sorted_keys(scope: Scope, permutation: Atom) -> Atom | None:
    """The integers ``[n]``, of this body, that a permutation is the stable order of."""
    key = stable_order_key(origin(scope, permutation))
    return None if key is None or key.crossed else reach(scope, key.value)


@dataclass(frozen=True)
class MaskedInverse:
    """A select that reads an inverse only where the keys lie in a window."""

    operand: int
    """Which operand of the equation is the inverse."""
    key: Atom
    """The integers that the permutation is the stable order of."""
    lo: int | Atom
    """The window's least key."""
    width: int
    mask: Atom
    """Where it holds, the inverse is chosen."""
    unmasked: str | None
    """A reader of the inverse that is no such select; None if there is none."""


def masked_inverse(scope: Scope, index: int) -> MaskedInverse | None:
    """``select(mask, other, inverse)``, in either order and also as the body of a call."""
    found = _masked(scope, index)
    if found is None:
        return None
    operand, key, window, mask = found
    lo = window.lo if isinstance(window.lo, int) else reach(scope, window.lo)
    if lo is None:
        return None
    inverse = scope.eqns[index].invars[operand]
    unmasked = None
    for reader in scope.readers(inverse):
        other = None if reader == OUTPUT else _masked(scope, reader)
        if other is None or other[2] != window:
            unmasked = "an output" if reader == OUTPUT else scope.eqns[reader].primitive.name
            break
    return MaskedInverse(operand, key, lo, window.width, mask, unmasked)


def _masked(scope: Scope, index: int) -> tuple[int, Atom, Window, Atom] | None:
    eqn = scope.eqns[index]
    if eqn.primitive not in (primitive("select_n_p"), primitive("jit_p")) or len(eqn.outvars) != 1:
        return None
    if not _is_index(eqn.outvars[0]) or not is_pure(eqn):
        return None
    chosen = scope.producer(eqn.outvars[0])
    if chosen is None or chosen.eqn.primitive is not primitive("select_n_p"):
        return None
    mask, *cases = chosen.eqn.invars
    if len(cases) != 2 or mask.aval.shape != cases[0].aval.shape:
        return None
    if not any(_inverted(scope, a) for a in eqn.invars):
        return None
    case, other = cases[1], cases[0]  # what a mask that doesn't hold chooses stands first
    value = behind(chosen.scope.resolve(case))
    if behind(chosen.scope.resolve(other)) == value:
        return None
    same = (i for i, a in enumerate(eqn.invars) if behind(scope.resolve(a)) == value)
    operand = next(same, None)
    if operand is None or sum(a is eqn.invars[operand] for a in eqn.invars) != 1:
        return None
    inverted = _inverted(scope, eqn.invars[operand])
    order = None if inverted is None else stable_order_key(inverted)
    key = None if order is None or order.crossed else reach(scope, order.value)
    window = None if key is None else key_window(chosen.scope, mask, scope.resolve(key))
    outer = reach(scope, chosen.scope.resolve(mask))
    if window is None or key is None or outer is None:
        return None
    return operand, key, window, outer


def _inverted(scope: Scope, atom: Atom) -> Origin | None:
    """The permutation ``[n]`` that an integer vector is the argsort of."""
    if jaxprs.is_literal(atom) or not _is_index(atom):
        return None
    key = argsorted_key(origin(scope, atom))
    if key is None or key.value.scope.fact(key.value.atom).permutation != 0:
        return None
    return key


def _is(scope: Scope, atom: Atom, made: Origin) -> bool:
    return not jaxprs.is_literal(atom) and _is_index(atom) and origin(scope, atom) == made


def _is_index(var: Any) -> bool:
    aval = var.aval
    return len(getattr(aval, "shape", ())) == 1 and limits(aval.dtype) not in (None, (0, 1))
