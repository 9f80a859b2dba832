"""inverse_permutation: an argsort of a permutation need not be stable, nor compare positions.

before:  ``sort((p, iota, …), num_keys=1, is_stable=True)`` with ``p`` a permutation of 0 … n-1
after:   ``sort((p, iota, …), num_keys=1, is_stable=False)``; the sorted keys are an iota

A permutation leaves no ties, so there is nothing for a stable sort or for further keys to decide.
It helps because the TPU compiler makes a sort stable by carrying an iota of its own beside the
operands: 106,054 → 81,987 estimated TPU7x cycles for 81,920 positions (libtpu 0.0.52). It costs
nothing. The compiler can't do it: it doesn't know that the keys differ.

Where two positions fit one word and the sort carries nothing else, argsort_packed_key is better
still and takes the site first. Not tried here are ways without any sort: ranks counted from the
bounded keys that the permutation was made of (202,479 cycles for all of 512 experts, but one
device's part of them may be worth it), and a scatter of an iota (568,598).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.weak_types import weak
from ..matchers.argsort import Argsort, find_argsort, sort_primitive
from ..matchers.fact import Fact
from ..matchers.graph import Scope
from ..matchers.pattern import Mismatch
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    found = find_argsort(scope, index)
    if found is None or isinstance(found, Mismatch):
        return found
    # An unstable sort by one key is what this pass makes.
    candidate = found.stable or found.num_keys > 1
    return Match(scope, index, {"argsort": found}) if candidate else None


def _argsort(match: Match) -> Argsort:
    return match.captures["argsort"]  # type: ignore[no-any-return]


def _permutation(match: Match) -> Reason | None:
    argsort = _argsort(match)
    if match.scope.fact(argsort.key).permutation == argsort.axis:
        return None
    found = _described(match.scope.fact(argsort.key), argsort.key.aval)
    wanted = f"a permutation of 0 … {argsort.length - 1} along axis {argsort.axis}"
    return Reason("not-a-permutation", "the key is not known to be a permutation", found, wanted)


def _described(fact: Fact, aval: Any) -> str:
    shape = aval.str_short(short_dtypes=True)
    if fact.permutation is not None:
        return f"{shape}, a permutation along axis {fact.permutation}"
    if fact.lo is None and fact.hi is None:
        return f"{shape} of unknown range"
    lo, hi = ("unknown" if bound is None else bound for bound in (fact.lo, fact.hi))
    return f"{shape} with lo={lo}, hi={hi}"


def _replace(match: Match) -> Replacement:
    argsort = _argsort(match)
    eqn, axis, repeats = argsort.eqn, argsort.axis, argsort.repeats
    aval = eqn.outvars[0].aval
    # An iota is made whole on every device: where the keys are split over some, they stay.
    whole = not any(spec is not None for spec in aval.sharding.spec)

    def by_key(*operands: Any) -> Sequence[Any]:
        kept = [i for i in range(len(operands)) if i not in repeats]
        # Bound as it is, as in argsort_unique_pairs: `lax.sort` would cast all operands to vary
        # over the same mesh axes.
        results = sort_primitive().bind(
            *(operands[i] for i in kept), dimension=axis, is_stable=False, num_keys=1
        )
        done = dict(zip(kept, results, strict=True))
        done.update({i: done[argsort.order].astype(operands[i].dtype) for i in repeats})
        if whole:
            keys = lax.broadcasted_iota(aval.dtype, aval.shape, axis)
            done[0] = weak(keys) if aval.weak_type else keys
        return [done[i] for i in range(len(operands))]

    return Replacement(
        tuple(eqn.invars), tuple(eqn.outvars), by_key, (axis, argsort.order, repeats, whole)
    )


def before(scores: jax.Array) -> jax.Array:
    """The rank of each score, by way of the order; ``scores`` is ``f32[n]``."""
    return jnp.argsort(jnp.argsort(scores))


def after(scores: jax.Array) -> jax.Array:
    """The same, with a second sort that need not be stable."""
    order = jnp.argsort(scores)
    return lax.sort((order, lax.iota(jnp.int32, order.size)), is_stable=False, num_keys=1)[1]


PASS = Pass(
    name="inverse_permutation",
    contract=Contract.BITWISE,
    summary="stable sort by a permutation → unstable sort by one key",
    measure="stable sorts and sorts by several keys",
    roots=lambda: frozenset({sort_primitive()}),
    find=_find,
    requirements=(
        Requirement(
            "not-a-permutation",
            "The first key is known to be a permutation of 0 … n - 1 along the sort axis.",
            _permutation,
        ),
    ),
    profitable=lambda match: None,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (Example((jax.ShapeDtypeStruct((1 << 17,), jnp.float32),), "scores"),),
)
