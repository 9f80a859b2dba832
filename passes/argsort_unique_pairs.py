"""argsort_unique_pairs: a stable sort by one key becomes an unstable sort of unique pairs.

before:  ``sort((key, iota), num_keys=1, is_stable=True)``
after:   ``sort((key, iota), num_keys=2, is_stable=False)``

The positions break every tie in the order in which a stable sort would leave them, and a third
operand that repeats them is dropped. It helps because the TPU compiler makes a sort stable by
carrying an iota of its own beside the operands: 781,708 → 712,985 estimated TPU7x cycles for
655,360 keys, from 1,117,714 where the positions were carried twice (libtpu 0.0.52). It costs
nothing, and the compiler doesn't do it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..matchers.argsort import find_argsort, sort_primitive
from ..matchers.graph import Scope
from ..matchers.pattern import Mismatch
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts.argsort_edits import pairs_edits
from .parts.argsort_site import (
    argsort_of,
    carried,
    has_one_key,
    is_stable,
    sorted_positions,
)
from .parts.mutants import reversed_ties
from .suggestion import Suggestion


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    found = find_argsort(scope, index)
    if found is None or isinstance(found, Mismatch):
        return found
    # An unstable sort by one key is a near miss; one by more is what this pass makes.
    candidate = found.stable or (found.order is not None and found.num_keys == 1)
    return Match(scope, index, {"argsort": found}) if candidate else None


def _has_positions(match: Match) -> Reason | None:
    argsort = argsort_of(match)
    if argsort.order is not None:
        return None
    return Reason("no-positions", "no operand is known to rise or fall along the sort axis",
                  carried(argsort), f"an iota along axis {argsort.axis}")  # fmt: skip


def _replace(match: Match) -> Replacement:
    argsort = argsort_of(match)
    eqn, axis, order = argsort.eqn, argsort.axis, argsort.order
    assert order is not None
    rising, others, repeats = argsort.rising, argsort.others, argsort.repeats

    def pairs(*operands: Any) -> Sequence[Any]:
        key, positions = operands[0], operands[order]
        # Falling positions tie-break the wrong way round: their negation rises.
        second = positions if rising else lax.neg(positions)
        others_in = [operands[i] for i in others]
        # Bound as it is: `lax.sort` would cast all operands to vary over the same mesh axes, where
        # the positions that this replaces may be typed as equal on all devices.
        keys, second, *others_out = sort_primitive().bind(
            key, second, *others_in, dimension=axis, is_stable=False, num_keys=2
        )
        positions = second if rising else lax.neg(second)
        results = {0: keys, order: positions, **dict(zip(others, others_out, strict=True))}
        results.update({i: positions.astype(operands[i].dtype) for i in repeats})
        return [results[i] for i in range(len(operands))]

    return Replacement(
        tuple(eqn.invars), tuple(eqn.outvars), pairs, (axis, order, rising, others, repeats)
    )


def _safe_to_negate(match: Match) -> Reason | None:
    argsort = argsort_of(match)
    if argsort.order is None or argsort.rising:
        return None
    dtype = argsort.positions.aval.dtype
    if jnp.issubdtype(dtype, jnp.signedinteger):
        # An affine form is exact and non-negative-or-bounded, so only the least value can't be
        # negated; a fact that reaches it is no proof.
        fact = match.scope.fact(argsort.positions)
        if fact.lo is not None and fact.lo > jnp.iinfo(dtype).min:
            return None
    return Reason("falling-positions", "positions that fall along the axis can't be negated safely",
                  str(dtype), "a signed dtype and a lower bound above its least value")  # fmt: skip


def _suggest(match: Match) -> Suggestion:
    said = "sort keys and positions by both and unstably: positions break every tie"
    return Suggestion(said, pairs_edits(match.scope, argsort_of(match), num_keys=2))


def before(keys: jax.Array) -> jax.Array:
    """A stable argsort of ``keys``, ``i32[n]``."""
    return jnp.argsort(keys)


def after(keys: jax.Array) -> jax.Array:
    """The same order from an unstable sort of pairs."""
    positions = lax.iota(jnp.int32, keys.shape[0])
    return lax.sort((keys, positions), is_stable=False, num_keys=2)[1]


PASS = Pass(
    name="argsort_unique_pairs",
    contract=Contract.BITWISE,
    summary="stable sort by one key, carrying positions → unstable sort of unique pairs",
    measure="stable sorts",
    suggest=_suggest,
    roots=lambda: frozenset({sort_primitive()}),
    find=_find,
    requirements=(
        is_stable(),
        has_one_key(),
        Requirement(
            "no-positions",
            "Another operand rises or falls strictly along the sort axis.",
            _has_positions,
        ),
        Requirement(
            "falling-positions",
            "Positions that fall (a descending argsort) can be negated without overflow.",
            _safe_to_negate,
        ),
    ),
    profitable=lambda match: None,
    mutants=reversed_ties(sorted_positions),
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example((jax.ShapeDtypeStruct((4096,), jnp.int32),), "integer keys"),
        Example((jax.ShapeDtypeStruct((4096,), jnp.float32),), "float keys"),
    ),
)
