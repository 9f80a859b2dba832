"""The range of an argsort's keys, and how many bits it takes beside the slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .argsort import Argsort
from .graph import Scope


@dataclass(frozen=True)
class KeyRange:
    """Inclusive bounds of the keys, and the bits that tell keys and slots apart."""

    lo: int
    hi: int
    key_bits: int
    slot_bits: int


def slot_bits(argsort: Argsort) -> int:
    """Bits for a place along the sort axis."""
    return max(argsort.length - 1, 0).bit_length()


def is_integer_key(argsort: Argsort) -> bool:
    """Whether the keys are integers or bools."""
    dtype = argsort.key.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.integer)) or dtype == jnp.bool_


def key_range(scope: Scope, argsort: Argsort, word_bits: int) -> KeyRange | None:
    """The keys' range, its limits those of the dtype where only they are known.

    None where neither bound is known, or one bound and the dtype's limit span too much for a word
    of ``word_bits`` bits, and for keys that are no integers.
    """
    if not is_integer_key(argsort):
        return None
    fact, slots = scope.fact(argsort.key), slot_bits(argsort)
    lo, hi = fact.range(argsort.key.aval.dtype)
    found = KeyRange(lo, hi, (hi - lo).bit_length(), slots)
    known = fact.lo is not None and fact.hi is not None
    return found if known or found.key_bits + slots <= word_bits else None


def positions_span(scope: Scope, argsort: Argsort) -> int:
    """How far the positions reach along the sort axis, from the first to the last."""
    return abs(positions_step(scope, argsort)) * max(argsort.length - 1, 0)


def positions_step(scope: Scope, argsort: Argsort) -> int:
    """By how much each position along the sort axis exceeds the one before; may be negative."""
    affine: Any = scope.fact(argsort.positions).affine
    return 0 if affine is None else int(affine.strides[argsort.axis])


def exact_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in which differences of ``dtype``'s values are exact: at least 32 bits wide."""
    return np.dtype(np.int32 if np.dtype(dtype).itemsize < 4 else dtype)
