"""The ways in which inverse_permutation replaces a sort by a permutation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...compat import vma
from ...compat.jaxprs import Atom, Eqn
from ...compat.tracing import rebind, type_of
from ...compat.weak_types import weak
from ...kernels.counting_rank import counting_rank, counting_ranks
from ...matchers.argsort import Argsort, sort_primitive
from ...matchers.graph import Value
from .. import argsort_packed_key
from ..base import Match, Reason, Replacement

Way = Replacement | Reason


def pairs(match: Match) -> Way:
    """The same sort, unstable and by the permutation alone."""
    argsort: Argsort = match.captures["argsort"]
    if not argsort.stable and argsort.num_keys == 1:
        return Reason("unstable-already", "the sort is unstable and by one key already",
                      "num_keys=1", "is_stable=True, or more keys")  # fmt: skip
    axis, repeats, order = argsort.axis, argsort.repeats, argsort.order

    def by_key(*operands: Any) -> Sequence[Any]:
        kept = [i for i in range(len(operands)) if i not in repeats]
        # Bound as it is, as in argsort_unique_pairs: `lax.sort` would cast all operands to vary
        # over the same mesh axes.
        results = sort_primitive().bind(
            *(operands[i] for i in kept), dimension=axis, is_stable=False, num_keys=1
        )
        done = dict(zip(kept, results, strict=True))
        if order is not None:
            done.update({i: done[order].astype(operands[i].dtype) for i in repeats})
        done[0] = _sorted_keys(argsort, done[0])
        return [done[i] for i in range(len(operands))]

    return _of_sort(argsort, by_key, ("pairs", axis, order, repeats))


def packed(match: Match) -> Way:
    """One operand, permutation and slot in one word: as argsort_packed_key does it."""
    unmet = (q.check(match) for q in argsort_packed_key.PASS.requirements)
    reason = next((r for r in unmet if r is not None), None)
    return reason or argsort_packed_key.PASS.replace(match)


def scatter(match: Match) -> Way:
    """Each position written to the place that the permutation names."""
    argsort: Argsort = match.captures["argsort"]
    reason = _only_an_order(match)
    if reason is not None:
        return reason

    def scattered(*operands: Any) -> Sequence[Any]:
        key, positions = operands[0], operands[argsort.order or 0]
        inverse = (
            jnp.zeros_like(positions)
            .at[key]
            .set(
                positions,
                mode="promise_in_bounds",
                unique_indices=True,
                wrap_negative_indices=False,
            )
        )
        return _all_results(argsort, operands, inverse)

    return _of_sort(argsort, scattered, ("scatter", argsort.order))


def at_hand(match: Match, inverse: Atom | None, wants: Value | None = None) -> Way:
    """The inverse, found at hand, or brought from ``wants``."""
    if inverse is None and wants is None:
        return Reason("no-inverse", "the inverse of the permutation is not at hand",
                      "a permutation without it", "what it is the argsort of")  # fmt: skip
    operand = match.captures["permutation"] if inverse is None else inverse
    return _for_order(match, (operand,), lambda found: found.reshape(-1), ("at_hand",), wants)


def counting(match: Match) -> Way:
    """Ranks counted from the keys that the permutation is the order of."""
    key: Atom | None = match.captures["key"]
    if key is None:
        return Reason("no-keys", "the keys that were sorted are not at hand",
                      "a permutation",
                      "the stable argsort of integers, before it in its body")  # fmt: skip
    lo, hi = match.scope.fact(key).range(key.aval.dtype)
    values = hi - lo + 1
    if values * key.aval.shape[0] > MOST_CELLS:
        return Reason("too-many-values", "the keys can have too many values to count each",
                      f"{values} for {key.aval.shape[0]} keys",
                      f"{MOST_CELLS} together")  # fmt: skip
    ranks = lambda key: counting_ranks(key, lo, values)
    return _for_order(match, (key,), ranks, ("counting", lo, values), None)


MOST_CELLS = 1 << 28
"""One-hot elements that counting may make: one for each key and value."""


def window(match: Match) -> Way:
    """Ranks counted in a window only, for a select that reads no others."""
    eqn, operand = match.eqn, match.captures["operand"]
    key, lo, width = (match.captures[n] for n in ("key", "lo", "width"))
    bound = () if isinstance(lo, int) else (lo,)
    inverse = eqn.invars[operand].aval

    def masked(key: Any, mask: Any, *rest: Any) -> Sequence[Any]:
        least, given = (rest[0], list(rest[1:])) if bound else (lo, list(rest))
        ranks = lax.convert_element_type(counting_rank(key, least, width), inverse.dtype)
        if vma.varying(type_of(ranks)) <= vma.varying(inverse):
            given[operand] = ranks
            return rebind(eqn, given)
        # The window differs between devices that share the inverse: the select, perhaps in a call,
        # is typed for one that is the same on all of them. What it gives elsewhere is all it does.
        given[operand] = vma.pvary(lax.full(inverse.shape, 0, inverse.dtype), vma.varying(inverse))
        return [jnp.where(mask, ranks, rebind(eqn, given)[0])]

    # In place of the inverse, which is to be read no more, stands another operand.
    others = tuple(key if i == operand else a for i, a in enumerate(eqn.invars))
    tag = ("window", operand, lo if not bound else None, width)
    operands = (key, match.captures["mask"], *bound, *others)
    return Replacement(operands, tuple(eqn.outvars), masked, tag)


def _for_order(
    match: Match,
    operands: tuple[Atom, ...],
    order: Callable[..., Any],
    key: tuple[Any, ...],
    wants: Value | None,
) -> Way:
    """Put ``order(*operands)`` in place of a sort's positions, or of a call that returns them."""
    argsort: Argsort | None = match.captures.get("argsort")
    if argsort is None:
        (out,) = match.eqn.outvars
        dtype, shape = out.aval.dtype, out.aval.shape
        fn = lambda *given: [order(*given).astype(dtype).reshape(shape)]
        return Replacement(operands, (out,), fn, key, wants)
    reason = _only_an_order(match)
    if reason is not None:
        return reason
    n = len(operands)

    def results(*given: Any) -> Sequence[Any]:
        return _all_results(argsort, given[n:], order(*given[:n]))

    eqn: Eqn = argsort.eqn
    return Replacement((*operands, *eqn.invars), tuple(eqn.outvars), results, key, wants)


def _only_an_order(match: Match) -> Reason | None:
    """Why a sort is more than the inverse of one permutation ``[n]``."""
    argsort: Argsort = match.captures["argsort"]
    whole = _is_whole(argsort.eqn.outvars[0].aval)
    if argsort.order is not None and not argsort.others and argsort.key.aval.ndim == 1 and whole:
        if match.scope.fact(argsort.positions).is_iota(0, argsort.positions.aval.shape):
            return None
    return Reason("carries-data", "the sort carries more than the positions 0 … n-1",
                  ", ".join(a.aval.str_short(short_dtypes=True) for a in argsort.eqn.invars),
                  "one permutation and one iota, on every device")  # fmt: skip


def _all_results(argsort: Argsort, operands: Sequence[Any], inverse: Any) -> list[Any]:
    keys = _sorted_keys(argsort, operands[0])
    return [keys, *(_like(inverse, operand) for operand in operands[1:])]


def _like(value: Any, operand: Any) -> Any:
    value = lax.convert_element_type(value, operand.dtype)
    return weak(value) if operand.aval.weak_type else value


def _sorted_keys(argsort: Argsort, keys: Any) -> Any:
    """An iota; but one is made whole on every device: where keys are split over some, they stay."""
    aval = argsort.eqn.outvars[0].aval
    if not _is_whole(aval):
        return keys
    iota = lax.broadcasted_iota(aval.dtype, aval.shape, argsort.axis)
    return weak(iota) if aval.weak_type else iota


def _is_whole(aval: Any) -> bool:
    return not any(spec is not None for spec in aval.sharding.spec)


def _of_sort(argsort: Argsort, fn: Callable[..., Any], key: tuple[Any, ...]) -> Replacement:
    return Replacement(tuple(argsort.eqn.invars), tuple(argsort.eqn.outvars), fn, key)
