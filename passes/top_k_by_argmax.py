"""top_k_by_argmax: a top_k with a small k becomes k searches for the greatest element left.

before:  ``top_k(x, k)`` along the last axis
after:   k times the greatest of what is left and the first place where it stands, in one reduction

top_k orders floats by IEEE's total order (+NaN, +inf, …, +0, -0, …, -inf, -NaN) and equal elements
by their index, so the searches run on integers that order as the floats' bits do. What is left
after a choice is what comes after it in that order, so that no element need be marked as taken by a
value that another element may hold. The chosen integers turn back into the values' bits. No
gradient passes through integers: the values have the derivative that top_k's have, the tangents at
the places.

A compiler may keep a bfloat16 that it computed in float32 as it is, unrounded, where nothing forces
the rounding; which bits top_k then returns depends on how it reads its operand. It is read here in
the very way XLA's top_k does (`reads_widened`), so that compiled bits agree as well.

It helps because TPUs sort whole rows to find a few elements: 922,316 → 198,747 estimated TPU7x
cycles for f32[8192,512] and k = 10 (libtpu 0.0.52, bundle estimates of all operations added up;
252,309 where the value and its place are searched for one after the other).
The passes are in proportion to k, so a k that is not small against the stages of a sort is left
alone. The compiler doesn't do it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.top_k import reads_widened
from ..compat.tracing import primitive
from ..compat.weak_types import weak
from ..matchers.graph import Scope
from ..matchers.pattern import Mismatch
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts import greatest
from .parts.mutants import reversed_ties

MOST = 16
"""The greatest k that is rewritten: each is unrolled into the program."""

_PARAMS = frozenset({"axis", "is_stable", "k"})
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _top_k() -> Any:
    return primitive("lax.lax.top_k_p")


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    eqn = scope.eqns[index]
    unnamed = set(eqn.params) - _PARAMS
    if unnamed:
        name = min(unnamed)
        return Mismatch(("top_k", f"param {name}"), repr(eqn.params[name]), "no such param")
    return Match(scope, index, {"k": eqn.params["k"], "axis": eqn.params["axis"]})


def _stable(match: Match) -> Reason | None:
    if match.eqn.params.get("is_stable", True):
        return None
    return Reason("not-stable", "top_k may leave equal elements in any order",
                  "is_stable=False", "is_stable=True")  # fmt: skip


def _last_axis(match: Match) -> Reason | None:
    axis, last = match.captures["axis"], len(match.eqn.invars[0].aval.shape) - 1
    if axis == last:
        return None
    return Reason("axis", "top_k runs along another axis than the last",
                  f"axis {axis}", f"axis {last}")  # fmt: skip


def _not_empty(match: Match) -> Reason | None:
    k, aval = match.captures["k"], match.eqn.invars[0].aval
    if k and aval.size:
        return None
    found = f"k = {k} of {aval.str_short(short_dtypes=True)}"
    return Reason("empty", "there is nothing to choose", found, "k of 1 or more, and elements")


def _sortable(match: Match) -> Reason | None:
    dtype = match.eqn.invars[0].aval.dtype
    integer = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits >= 8
    if integer or dtype == jnp.bool_ or dtype.name in _FLOATS:
        return None
    wanted = f"bool, an integer of 8 bits or more, {', '.join(_FLOATS)}"
    return Reason("dtype", "no integers are known to order as the elements do", str(dtype), wanted)


def _profitable(match: Match) -> Reason | None:
    k, n = match.captures["k"], match.eqn.invars[0].aval.shape[-1]
    levels = (n - 1).bit_length()
    most = min(MOST, levels * (levels + 1) // 4)
    if k <= most:
        return None
    return Reason("large-k", "k passes cost more than half the stages of a sort, or are too many",
                  f"k = {k} of {n}", f"at most {most}")  # fmt: skip


def _replace(match: Match) -> Replacement:
    eqn, k = match.eqn, match.captures["k"]
    weak_types = tuple(v.aval.weak_type for v in eqn.outvars)

    def searches(x: Any) -> Sequence[Any]:
        results = greatest.greatest(x, k, reads_widened(x.dtype, x.shape[-1]))
        return [weak(r) if w else r for r, w in zip(results, weak_types, strict=True)]

    return Replacement(tuple(eqn.invars), tuple(eqn.outvars), searches, (k, weak_types))


def before(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two best experts of each token; ``scores`` is ``f32[tokens, experts]``."""
    best: tuple[jax.Array, jax.Array] = lax.top_k(scores, 2)
    return best


def after(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same without a sort."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = lax.broadcasted_iota(jnp.int32, key.shape, 1)
    least, none = jnp.int32(-(2**31)), jnp.int32(key.shape[1])

    def greater(a: Any, b: Any) -> Any:
        (one, here), (other, there) = a, b
        first = (one > other) | ((one == other) & (here < there))
        return lax.select(first, one, other), lax.select(first, here, there)

    best, first = lax.reduce((key, place), (least, none), greater, (1,))
    best, first = (lax.expand_dims(x, [1]) for x in (best, first))
    left = (key < best) | ((key == best) & (place > first))
    rest = jnp.where(left, key, least), jnp.where(left, place, none)
    second, other = lax.reduce(rest, (least, none), greater, (1,))
    second, other = (lax.expand_dims(x, [1]) for x in (second, other))
    keys, ids = lax.concatenate([best, second], 1), lax.concatenate([first, other], 1)
    return lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32), ids


PASS = Pass(
    name="top_k_by_argmax",
    contract=Contract.BITWISE,
    summary="top_k with a small k → k searches for the greatest element left",
    measure="top_k operations",
    suggest="search for the greatest element left, k times: the function `after` of this pass",
    roots=lambda: frozenset({_top_k()}),
    find=_find,
    requirements=(
        Requirement("not-stable", "Equal elements come in the order of their indices.", _stable),
        Requirement("axis", "top_k runs along the last axis.", _last_axis),
        Requirement("empty", "k is at least 1, and the operand has elements.", _not_empty),
        Requirement(
            "dtype",
            "The elements are bools, integers of 8 bits or more, or floats of 16, 32 or 64 bits.",
            _sortable,
        ),
    ),
    profitable=_profitable,
    mutants=reversed_ties(lambda match: (1, -1)),
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (Example((jax.ShapeDtypeStruct((512, 64), jnp.float32),), "router scores"),),
)
