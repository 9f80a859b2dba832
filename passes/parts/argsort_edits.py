"""How to write an argsort by hand as passes rewrite it."""

from __future__ import annotations

import numpy as np

from ...matchers.argsort import Argsort
from ...matchers.graph import Scope
from ...matchers.key_range import KeyRange
from ..suggestion import Edit

_KEYWORDS = (("stable", (True,)), ("axis", (0, -1)))


def packed_edits(scope: Scope, argsort: Argsort, found: KeyRange) -> tuple[Edit, ...]:
    """``jnp.argsort(key)`` as an unstable sort of one word; none where the site is another."""
    if not _plain(scope, argsort) or found.lo != 0 or not found.slot_bits:
        return ()
    b, n = found.slot_bits, argsort.length
    mask = 2**b - 1
    word = f"({{0}}.astype({{jnp}}.uint32) << {b}) | {{lax}}.iota({{jnp}}.uint32, {n})"
    text = f"({{lax}}.sort({word}, is_stable=False) & {mask}).astype({{jnp}}.int32)"
    return (Edit("call", text, ("argsort",), 1, _KEYWORDS),)


def pairs_edits(scope: Scope, argsort: Argsort, num_keys: int) -> tuple[Edit, ...]:
    """``jnp.argsort(key)`` as an unstable sort of keys and positions."""
    if not _plain(scope, argsort):
        return ()
    pairs = f"({{0}}, {{lax}}.iota({{jnp}}.int32, {argsort.length}))"
    text = f"{{lax}}.sort({pairs}, num_keys={num_keys}, is_stable=False)[1]"
    return (Edit("call", text, ("argsort",), 1, _KEYWORDS),)


def _plain(scope: Scope, argsort: Argsort) -> bool:
    """Whether it is a vector's, which carries int32 positions that rise from 0, and is stable."""
    if argsort.key.aval.ndim != 1 or argsort.order is None or argsort.others:
        return False
    positions = argsort.positions
    from_zero = scope.fact(positions).is_iota(0, positions.aval.shape)
    int32 = positions.aval.dtype == np.int32
    return bool(argsort.stable and argsort.num_keys == 1 and argsort.rising and from_zero and int32)
