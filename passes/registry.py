"""All passes, in order of preference: where several match one site, the first takes it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

from .base import Contract, Pass


@functools.cache
def all_passes() -> tuple[Pass, ...]:
    """Every pass, in order of preference."""
    from . import (
        affine_gather,
        argsort_packed_key,
        argsort_unique_pairs,
        counting_scatter,
        nonnegative_index,
        permutation_scatter,
        sorted_scatter,
        top_k_scatter,
    )

    return (
        argsort_packed_key.PASS,
        argsort_unique_pairs.PASS,
        nonnegative_index.PASS,
        affine_gather.PASS,
        permutation_scatter.PASS,
        top_k_scatter.PASS,
        counting_scatter.PASS,
        sorted_scatter.PASS,
    )


def by_name(name: str) -> Pass:
    """The pass called ``name``.

    Raises:
      ValueError: no such pass; names the nearest.
    """
    known = {p.name: p for p in all_passes()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no pass called {name!r}{hint} Known passes: {', '.join(known)}")
    return known[name]


def select(
    passes: Iterable[str] | None, contract: Contract, disable: Iterable[str]
) -> tuple[Pass, ...]:
    """The passes to run: those named, or all that the contract admits, without those disabled."""
    off = {by_name(n).name for n in disable}
    if passes is None:
        return tuple(p for p in all_passes() if contract.admits(p.contract) and p.name not in off)
    if isinstance(passes, str):
        raise TypeError(f"passes is the string {passes!r}; wanted a sequence, as in [{passes!r}]")
    named = {by_name(n).name for n in passes}
    return tuple(p for p in all_passes() if p.name in named and p.name not in off)
