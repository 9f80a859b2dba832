"""Find the order in a sorted word that somebody packed of a key and a position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .fact import Fact

Producers = Callable[[Any], Any]
"""From a variable to the equation that makes it, in the same body, or None."""


def packed_order(eqn: Any, producer: Producers, fact_of: Callable[[Any], Fact]) -> int | None:
    """The axis along which ``eqn`` makes a permutation by masking sorted words; None if it doesn't.

    ``sort(key << s | iota) & (2^m - 1)`` with ``iota < 2^m`` and ``m <= s``: whatever the keys
    are, the low bits are those of the iota, and a sort only moves them along its axis.
    """
    if eqn.primitive is not primitive("and_p"):
        return None
    for word, mask in (eqn.invars, eqn.invars[::-1]):
        bits = _mask_bits(fact_of(mask))
        sort = _made_by("sort_p", word, producer)
        if bits is None or sort is None or len(sort.invars) != 1:
            continue
        axis = sort.params["dimension"]
        packed = _made_by("or_p", sort.invars[0], producer)
        if packed is None or packed.outvars[0].aval.shape[axis] > 2**bits:
            continue
        for high, low in (packed.invars, packed.invars[::-1]):
            if fact_of(low).is_iota(axis, low.aval.shape) and _is_shifted(
                high, bits, producer, fact_of
            ):
                return int(axis)
    return None


def _mask_bits(mask: Fact) -> int | None:
    """``m`` where every element is ``2^m - 1``."""
    value = None if mask.constant is None else mask.constant.value
    if not isinstance(value, int) or value < 0 or value & (value + 1):
        return None
    return value.bit_length()


def _is_shifted(atom: Any, bits: int, producer: Producers, fact_of: Callable[[Any], Fact]) -> bool:
    """Whether the low ``bits`` bits are zero, by a shift of less than the word's width."""
    shift = _made_by("shift_left_p", atom, producer)
    if shift is None:
        return False
    by = fact_of(shift.invars[1]).constant
    width = 8 * atom.aval.dtype.itemsize
    return by is not None and isinstance(by.value, int) and bits <= by.value < width


def _made_by(name: str, atom: Any, producer: Producers) -> Any:
    eqn = None if jaxprs.is_literal(atom) else producer(atom)
    return eqn if eqn is not None and eqn.primitive is primitive(name) else None
