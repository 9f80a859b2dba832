"""Whether a value, in a wide type, is one that a narrower type holds exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import dtypes

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from .graph import Scope
from .swiglu import narrower

_MOVES = (
    "broadcast_in_dim_p", "reshape_p", "transpose_p", "slice_p", "dynamic_slice_p", "squeeze_p",
    "rev_p", "name_p", "pvary_p", "neg_p", "gather_p", "copy_p",
)  # fmt: skip
"""Primitives whose results are values of their first operand, or their negatives. What a gather
fills in is held by any float type."""
_MOST = 64


def is_held(scope: Scope, atom: Atom, dtype: Any) -> bool:
    """Whether each element of a float array is a number of the type ``dtype``."""
    return _is_held(scope, atom, dtype, _MOST)


def _is_held(scope: Scope, atom: Atom, dtype: Any, deep: int) -> bool:
    own = atom.aval.dtype
    if not dtypes.issubdtype(own, np.floating):
        return False
    if not narrower(dtype, own):
        return True
    value = scope.resolve(atom)
    if jaxprs.is_literal(value.atom):
        number = np.asarray(value.atom.val)
        return bool(np.all(number.astype(dtype).astype(own) == number))
    made = value.scope.definition(value.atom)
    if made is None or not deep:
        return False
    inner, eqn = value.scope, value.scope.eqns[made[0]]
    if eqn.primitive is primitive("optimization_barrier_p"):
        return _is_held(inner, eqn.invars[made[1]], dtype, deep - 1)
    if eqn.primitive is primitive("convert_element_type_p") or any(
        eqn.primitive is primitive(n) for n in _MOVES
    ):
        return _is_held(inner, eqn.invars[0], dtype, deep - 1)
    if eqn.primitive is primitive("select_n_p"):
        return all(_is_held(inner, a, dtype, deep - 1) for a in eqn.invars[1:])
    if eqn.primitive is primitive("concatenate_p"):
        return all(_is_held(inner, a, dtype, deep - 1) for a in eqn.invars)
    return False
