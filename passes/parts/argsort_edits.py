"""How to write an argsort by hand as passes rewrite it."""

from __future__ import annotations

import numpy as np

from ...matchers.argsort import Argsort
from ...matchers.graph import Scope
from ...matchers.key_range import KeyRange
from ..suggestion import Edit
from .packed_word import WORD_BITS

_KEYWORDS = (("stable", (True,)), ("axis", (0, -1)))


def packed_edits(scope: Scope, argsort: Argsort, found: KeyRange) -> tuple[Edit, ...]:
    """``jnp.argsort(key)`` as an unstable sort of one word; none where the site is another."""
    if not _plain(scope, argsort) or found.lo != 0 or not found.slot_bits:
        return ()
    bits = "({new:bits} := ({0}.size - 1).bit_length())"
    key = "{0}.astype({jnp}.uint32)"
    word = f"({key} << {bits}) | {{lax}}.iota({{jnp}}.uint32, {{0}}.size)"
    sort = f"{{lax}}.sort({word}, is_stable=False)"
    text = f"({sort} & ((1 << {{new:bits}}) - 1)).astype({{jnp}}.int32)"
    most = 2 ** (WORD_BITS - found.key_bits)
    given = f"keys in [0, {found.hi}], at most {most:,} rows"
    return (Edit("call", text, ("argsort",), 1, _KEYWORDS, given),)


def pairs_edits(scope: Scope, argsort: Argsort, num_keys: int) -> tuple[Edit, ...]:
    """``jnp.argsort(key)`` as an unstable sort of keys and positions."""
    if not _plain(scope, argsort):
        return ()
    pairs = "({0}, {lax}.iota({jnp}.int32, {0}.size))"
    text = f"{{lax}}.sort({pairs}, num_keys={num_keys}, is_stable=False)[1]"
    given = "the keys are a permutation" if num_keys == 1 else ""
    return (Edit("call", text, ("argsort",), 1, _KEYWORDS, given),)


def _plain(scope: Scope, argsort: Argsort) -> bool:
    """Whether it is a vector's, which carries int32 positions that rise from 0, and is stable."""
    if argsort.key.aval.ndim != 1 or argsort.order is None or argsort.others:
        return False
    positions = argsort.positions
    from_zero = scope.fact(positions).is_iota(0, positions.aval.shape)
    int32 = positions.aval.dtype == np.int32
    return bool(argsort.stable and argsort.num_keys == 1 and argsort.rising and from_zero and int32)
