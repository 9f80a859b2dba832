"""Requirements that passes on argsorts share."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from ...matchers.argsort import Argsort
from ...matchers.key_range import exact_dtype, is_integer_key, key_range, positions_span
from ..base import Match, Reason, Requirement


def argsort_of(match: Match) -> Argsort:
    """The argsort that a match holds."""
    return match.captures["argsort"]  # type: ignore[no-any-return]


def unique_pairs(argsort: Argsort) -> bool:
    """Whether the sort compares the key and then positions that rise, so that no ties are left."""
    return argsort.num_keys == 2 and argsort.order == 1 and argsort.rising


def never(argsort: Argsort) -> bool:
    """For passes that take no sort of pairs."""
    return False


def is_stable(pairs: Callable[[Argsort], bool] = never) -> Requirement:
    """That equal keys keep their order, or that ``pairs`` says there are none."""

    def check(match: Match) -> Reason | None:
        argsort = argsort_of(match)
        distinct = match.scope.fact(argsort.key).permutation == argsort.axis
        if argsort.stable or pairs(argsort) or (distinct and pairs is not never):
            return None
        wanted = "is_stable=True" + _or_pairs(pairs)
        return Reason("not-stable", "the sort may leave equal keys in any order",
                      "is_stable=False", wanted)  # fmt: skip

    sentence = "The sort is stable" + (", or leaves no ties." if _or_pairs(pairs) else ".")
    return Requirement("not-stable", sentence, check)


def has_one_key(pairs: Callable[[Argsort], bool] = never) -> Requirement:
    """That the sort compares one operand, or what ``pairs`` admits."""

    def check(match: Match) -> Reason | None:
        argsort = argsort_of(match)
        if argsort.num_keys == 1 or pairs(argsort):
            return None
        return Reason("num-keys", "the sort compares more than one operand",
                      f"num_keys={argsort.num_keys}", "num_keys=1" + _or_pairs(pairs))  # fmt: skip

    sentence = "The sort compares one operand" + (", or unique pairs." if _or_pairs(pairs) else ".")
    return Requirement("num-keys", sentence, check)


def _or_pairs(pairs: Callable[[Argsort], bool]) -> str:
    return "" if pairs is never else ", or unique pairs"


def sorted_positions(match: Match) -> tuple[int, int]:
    """Which operand and result holds the positions, and along which axis they are sorted."""
    argsort = argsort_of(match)
    assert argsort.order is not None
    return argsort.order, argsort.axis


def carried(argsort: Argsort) -> str:
    """The operands beside the key, for reasons."""
    return ", ".join(a.aval.str_short(short_dtypes=True) for a in argsort.eqn.invars[1:])


def _integer_key(match: Match) -> Reason | None:
    argsort = argsort_of(match)
    if is_integer_key(argsort):
        return None
    dtype = str(argsort.key.aval.dtype)
    return Reason("key-dtype", "the key is no integer", dtype, "an integer or bool key")


HAS_INTEGER_KEY = Requirement("key-dtype", "The key is an integer or a bool.", _integer_key)


def has_known_range(word_bits: int) -> Requirement:
    """That the keys have bounds, if only the dtype's where they and the slot fit a word."""

    def check(match: Match) -> Reason | None:
        argsort = argsort_of(match)
        known = key_range(match.scope, argsort, word_bits) is not None
        if known or not is_integer_key(argsort):
            return None
        fact = match.scope.fact(argsort.key)
        lo, hi = ("unknown" if bound is None else bound for bound in (fact.lo, fact.hi))
        return Reason("unknown-range", "the range of the keys is not known", f"lo={lo}, hi={hi}",
                      "both bounds, from the code or from relower.assume_range")  # fmt: skip

    return Requirement("unknown-range", "The range of the keys is known.", check)


def _steps_fit(match: Match) -> Reason | None:
    argsort = argsort_of(match)
    if argsort.order is None:
        return None
    dtype, span = argsort.positions.aval.dtype, positions_span(match.scope, argsort)
    most = jnp.iinfo(exact_dtype(dtype)).max
    if span <= most:
        return None
    return Reason("wide-positions", "the positions span more than their dtype holds",
                  f"{span} in {dtype}", f"at most {most}")  # fmt: skip


POSITIONS_FIT = Requirement(
    "wide-positions", "The positions span no more than their dtype holds.", _steps_fit
)
