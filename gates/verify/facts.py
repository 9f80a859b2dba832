"""Facts in words, and what of them says more than a value's type does."""

from __future__ import annotations

from typing import Any

from ...matchers.fact import Fact, default


def words(fact: Fact | None, aval: Any) -> str:
    """What is known of a value beyond its type; empty where that is nothing."""
    if fact is None or fact == default(aval.dtype):
        return ""
    said = []
    plain = default(aval.dtype)
    if (fact.lo, fact.hi) != (plain.lo, plain.hi):
        lo, hi = ("…" if b is None else str(b) for b in (fact.lo, fact.hi))
        said.append(f"in [{lo}, {hi}]" if fact.constant is None else f"= {fact.constant.value}")
    elif fact.constant is not None:
        said.append(f"= {fact.constant.value}")
    if fact.permutation is not None:
        said.append(f"a permutation along axis {fact.permutation}")
    said += [f"rising along axis {d}" for d in fact.rising]
    if fact.affine is not None and fact.constant is None:
        said.append(f"in steps of {fact.affine.strides}")
    return ", ".join(said)
