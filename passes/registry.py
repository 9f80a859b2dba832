"""All passes, in order of preference: where several match one site, the first takes it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping

from .base import Contract, Pass


@functools.cache
def all_passes() -> tuple[Pass, ...]:
    """Every pass, in order of preference."""
    from . import (
        affine_gather,
        argsort_packed_key,
        argsort_unique_pairs,
        concat_cotangents,
        counting_scatter,
        frozen_gradient,
        gmm_dswiglu,
        gmm_swiglu,
        inverse_permutation,
        late_cast,
        nonnegative_index,
        packed_all_gather,
        packed_psum_scatter,
        permutation_scatter,
        router_grad_from_wo_input,
        shared_lhs_dot,
        sorted_scatter,
        split_fused_wi,
        stable_stack,
        top_k_by_argmax,
        top_k_scatter,
        triangular_inverse,
    )

    return (
        inverse_permutation.PASS,
        argsort_packed_key.PASS,
        argsort_unique_pairs.PASS,
        nonnegative_index.PASS,
        affine_gather.PASS,
        permutation_scatter.PASS,
        top_k_scatter.PASS,
        counting_scatter.PASS,
        sorted_scatter.PASS,
        top_k_by_argmax.PASS,
        packed_all_gather.PASS,
        frozen_gradient.PASS,
        concat_cotangents.PASS,
        split_fused_wi.PASS,
        router_grad_from_wo_input.PASS,
        shared_lhs_dot.PASS,
        gmm_swiglu.PASS,
        gmm_dswiglu.PASS,
        late_cast.PASS,
        triangular_inverse.PASS,
        stable_stack.PASS,
        packed_psum_scatter.PASS,
    )


def by_name(name: str) -> Pass:
    """The pass called ``name``.

    Raises:
      ValueError: no such pass; names the nearest.
      TypeError: no string.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"found the pass {name!r} of type {type(name).__name__}; wanted a name, as in "
            "'argsort_packed_key'"
        )
    known = {p.name: p for p in all_passes()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no pass called {name!r}{hint} Known passes: {', '.join(known)}")
    return known[name]


def select(
    passes: Iterable[str] | None,
    contract: Contract,
    disable: Iterable[str],
    choose: Mapping[str, str] | None = None,
) -> tuple[Pass, ...]:
    """The passes to run: those named, or all that the contract admits, without those disabled.

    Some run only if they are named: with today's compiler they may cost more than they save.

    Args:
      passes: names, or None.
      contract: the loosest that is admitted, where ``passes`` is None.
      disable: names of passes not to run.
      choose: for some passes, the name of the alternative to use.

    Raises:
      ValueError: an unknown pass or alternative, or a choice for one that has no alternatives.
      TypeError: anything but sequences of names, and a mapping.
    """
    off = _names("disable", disable)
    ways = _ways(choose)
    if passes is None:
        named = {p.name for p in all_passes() if contract.admits(p.contract) and not p.by_name}
    else:
        named = _names("passes", passes)
    chosen = (p for p in all_passes() if p.name in named and p.name not in off)
    return tuple(p.choosing(ways[p.name]) if p.name in ways else p for p in chosen)


def _names(option: str, given: Iterable[str]) -> set[str]:
    if isinstance(given, str):
        raise TypeError(f"{option} is the string {given!r}; wanted a sequence, as in [{given!r}]")
    if not isinstance(given, Iterable):
        raise TypeError(
            f"{option} is {given!r} of type {type(given).__name__}; wanted a sequence of names of "
            "passes, as in ['argsort_packed_key']"
        )
    return {by_name(n).name for n in given}


def _ways(choose: Mapping[str, str] | None) -> dict[str, str]:
    if choose is not None and not isinstance(choose, Mapping):
        raise TypeError(
            f"choose is {choose!r}; wanted alternatives by pass, as in "
            "{'inverse_permutation': 'counting'}, or 'measured', or 'heuristic'"
        )
    ways = {by_name(name).name: way for name, way in (choose or {}).items()}
    for name, way in ways.items():
        by_name(name).choosing(way)  # raises where there is nothing to choose from
    return ways
