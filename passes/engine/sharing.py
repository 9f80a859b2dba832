"""Which sites are given one replacement: all that it may depend on, as keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ...compat import tracing, vma
from ...compat.jaxprs import Atom, Jaxpr
from ..base import Accepted, Match, Replacement


def trace_key(
    name: str, match: Match, way: Replacement, operands: Sequence[Atom], within: tuple[int, ...]
) -> tuple[object, ...]:
    """Equal for replacements of the pass ``name`` that are traced once for all.

    Args:
      name: the pass's.
      match: the site.
      way: what to put there.
      operands: its operands, as they are called by now.
      within: the shard_maps and kernels, by identity, in whose bodies it is traced.
    """
    eqns = [match.scope.eqns[i] for i in (match.index, *way.also)]
    return (
        name,
        way.key,
        tuple(a.aval for a in operands),
        tuple(v.aval for v in way.results),
        tuple((id(e.ctx), tuple(map(_plain, e.params.items()))) for e in eqns),
        within,
        tracing.trace_context(),
    )


def what_is_done(site: Accepted) -> tuple[object, ...]:
    """Equal for sites of one body at which the same is put in place."""
    done = site.replacement
    atoms = (*done.operands, *done.results)
    return site.rewrite.name, done.key, tuple(id(a) for a in atoms), len(done.operands), done.also


def varying_at_least(
    fn: Callable[..., Sequence[Any]], axes: Sequence[frozenset[str]]
) -> Callable[..., Sequence[Any]]:
    """``fn`` with each result cast to vary over the axes that the value it replaces varies over."""

    def cast(*operands: Any) -> Sequence[Any]:
        values = list(fn(*operands))
        for i, wanted in enumerate(axes[: len(values)]):
            values[i] = vma.pvary(values[i], wanted - vma.varying(tracing.type_of(values[i])))
        return values

    return cast


def own_replacement(site: Accepted) -> tuple[tuple[object, ...], Jaxpr] | None:
    """What one site would be given by itself, and the key by which it is shared; None for nothing.

    It is traced under the axes of the bodies around the site, as for the rewrite itself.
    """
    match, way = site.match, site.replacement
    if way.fn is None:
        return None
    with contextlib.ExitStack() as stack:
        around = [c.scope.eqns[c.index] for c in match.scope.path()]
        for eqn in around:
            stack.enter_context(tracing.inside(eqn))
        within = tuple(id(eqn) for eqn in around if tracing.is_place(eqn))
        axes = [vma.varying(v.aval) for v in way.results]
        key = trace_key(site.rewrite.name, match, way, way.operands, within)
        fn = varying_at_least(way.fn, axes)
        return key, tracing.trace_replacement(fn, way.operands, match.eqn)


def _plain(param: tuple[str, Any]) -> tuple[str, object]:
    """A param by its value, or by its identity where it can't be compared."""
    name, value = param
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, value
