"""All passes, in order of preference: where several match one site, the first takes it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .base import Contract, Pass
from .plugins import Plugin, as_guest, fault_of, offered

DEFAULT = "default"
"""Among names of passes: all that the contract admits and that run unasked."""


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


@functools.cache
def plugins() -> Mapping[str, Plugin]:
    """Passes that installed packages offer, by name; they run only where they are asked for."""
    return {p.name: p for p in offered(p.name for p in all_passes())}


def by_name(name: str) -> Pass:
    """The pass called ``name``, one of relower's or of an installed package.

    Raises:
      ValueError: no such pass; names the nearest. Or it can't be loaded (`PluginError`).
      TypeError: no string.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"found the pass {name!r} of type {type(name).__name__}; wanted a name, as in "
            "'argsort_packed_key'"
        )
    known = {p.name: p for p in all_passes()}
    if name in known:
        return known[name]
    if name in plugins():
        return plugins()[name].load()
    names = list(dict.fromkeys([*known, *plugins()]))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"no pass called {name!r}{hint} Known passes: {', '.join(names)}")


@dataclass(frozen=True)
class Selection:
    """The passes to run."""

    passes: tuple[Pass, ...]
    """In order of preference: relower's own before others'."""
    named: frozenset[str]
    """Those asked for by name, each of which must find a site."""


def select(
    passes: Iterable[str | Pass] | None,
    contract: Contract | None,
    disable: Iterable[str],
    choose: Mapping[str, str] | None = None,
) -> Selection:
    """The passes to run: those asked for, or all that the contract admits, without those disabled.

    Some run only if they are named: with today's compiler they may cost more than they save, or
    they belong to another package.

    Args:
      passes: names, `Pass` objects, ``"default"`` for all that the contract admits; or None, which
        is ``["default"]``.
      contract: the loosest that ``"default"`` admits; None is `Contract.BITWISE`.
      disable: names of passes not to run.
      choose: for some passes, the name of the alternative to use.

    Raises:
      ValueError: an unknown pass or alternative, a choice for one that has no alternatives, a
        contract beside names only, or a name that is also disabled.
      TypeError: anything but sequences of names, and a mapping.
    """
    off = {by_name(n).name for n in _listed("disable", disable)}
    ways = _ways(choose)
    asked = [DEFAULT] if passes is None else _listed("passes", passes)
    named = {p.name: p for p in _distinct(map(_pass, (a for a in asked if a != DEFAULT)))}
    if contract is not None and DEFAULT not in asked:
        raise ValueError(
            f"contract says what 'default' stands for: found {contract.value!r} beside the passes "
            f"{', '.join(named) or 'none'}; wanted 'default' among them, or no contract"
        )
    twice = sorted(named.keys() & off)
    if twice:
        raise ValueError(f"disable: found {', '.join(twice)}, which is asked for by name, too: "
                         "wanted it in one of the two")  # fmt: skip
    admitted = contract or Contract.BITWISE
    chosen = [
        p for p in all_passes()
        if p.name in named or (DEFAULT in asked and admitted.admits(p.contract) and not p.by_name)
    ]  # fmt: skip
    own = {p.name for p in all_passes()}
    chosen += [p for name, p in named.items() if name not in own]
    return Selection(
        tuple(
            p.choosing(ways[p.name]) if p.name in ways else p for p in chosen if p.name not in off
        ),
        frozenset(named),
    )


def _pass(asked: Any) -> Pass:
    """The pass of a name; or one given as it is, which may not take the name of another."""
    if isinstance(asked, str):
        return by_name(asked)
    if not isinstance(asked, Pass):
        raise TypeError(
            f"found the pass {asked!r} of type {type(asked).__name__}; wanted a name, as in "
            "'argsort_packed_key', or a relower.passes.Pass"
        )
    fault = fault_of(asked)
    if fault is not None:
        raise TypeError(f"passes: found {fault}, or a name")
    own = {p.name: p for p in all_passes()}
    if own.get(asked.name, asked) is not asked:
        raise ValueError(
            f"passes: found a pass of your own called {asked.name!r}; wanted another name than "
            "that of one of relower's"
        )
    return asked if asked.name in own else as_guest(asked)


def _distinct(passes: Iterable[Pass]) -> Iterator[Pass]:
    seen: dict[str, Pass] = {}
    for p in passes:
        if seen.setdefault(p.name, p) != p:
            raise ValueError(f"passes: found two passes called {p.name!r}; wanted distinct names")
        yield p


def _listed(option: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str):
        raise TypeError(f"{option} is the string {given!r}; wanted a sequence, as in [{given!r}]")
    if not isinstance(given, Iterable):
        raise TypeError(
            f"{option} is {given!r} of type {type(given).__name__}; wanted a sequence of names of "
            "passes, as in ['argsort_packed_key']"
        )
    return list(given)


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
