"""A function that is rewritten on each new signature, and evaluated under the caller's trace."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from ...compat import nnx, tracing
from ...compat.collector import full_collections_postponed
from ...compat.jaxprs import Body
from ...compat.outputs import Outputs
from ...lowering.words import plural
from ..asked import Asked
from ..base import Pass, PassNotApplicable
from ..disable import DISABLED
from ..frozen import Request
from ..report import Report
from .addresses import Addresses
from .claims import NOT_CHECKED, Claims, tied
from .met import check_met
from .meter import Meter
from .rewrite import Optimized, rewrite
from .signature import cache_key

MAX_CACHED = 256
"""Signatures that one optimized function remembers; the oldest goes first."""


class MeasureWarning(UserWarning):
    """Sites were to be decided by estimated cycles, and were by rule of thumb."""


class FrozenWarning(UserWarning):
    """A gradient that was declared frozen is returned as it is, and no zeros in its place."""


class FactWarning(UserWarning):
    """Facts that a rewrite leaned on were to be checked, and can't be."""


def apply(
    asked: Asked, closed: Body, name: str, request: Request, addresses: Addresses | None
) -> Optimized:
    """A traced program rewritten as asked, sites measured and facts checked where that is asked.

    Args:
      asked: what is to be done.
      closed: the trace.
      name: that of the function, for the report.
      request: what is asked for this trace.
      addresses: where given, sites get theirs, and those that are turned off are left alone.
    """
    meter = None if asked.measured is None else Meter(asked.measured)
    run: Sequence[Pass] = asked.passes if meter is None else meter.measuring(asked.passes)
    claims = Claims() if asked.check_facts else None
    run = run if claims is None else claims.claiming(run)
    done = rewrite(closed, run, name=name, request=request, addresses=addresses)
    if claims is not None:
        notes = (*done.report.notes, *claims.notes)
        done = replace(done, closed=tied(done.closed), report=replace(done.report, notes=notes))
    if addresses is not None and addresses.disabled.addresses:
        check_met(addresses.disabled, done.report, closed, asked.passes, request)
    return done if meter is None else replace(done, report=meter.annotated(done.report))


def label_of(fn: Callable[..., Any]) -> str:
    """What reports call a function."""
    return getattr(fn, "__name__", type(fn).__name__)


def wrap(fn: Callable[..., Any], asked: Asked, *, jitted: bool) -> Callable[..., Any]:
    """``fn`` rewritten on each new signature, evaluated under the caller's trace.

    Under ``jitted``, jit hands over its static arguments as they are: a numpy scalar is one.
    """
    cache: dict[Any, tuple[Body, Outputs]] = {}
    is_dynamic = tracing.is_dynamic_under_jit if jitted else tracing.is_dynamic

    def fresh(args: Any, kwargs: Any, avals: Sequence[Any]) -> tuple[Body, Outputs, bool]:
        traced = tracing.trace(fn, args, kwargs, avals, is_dynamic)
        out_tree = traced.outputs.arrays
        request = asked.request(fn, args, kwargs, is_dynamic, traced.closed, out_tree)
        addresses = Addresses(asked.disabled) if asked.disabled else None
        done = apply(asked, traced.closed, label_of(fn), request, addresses)
        _warn(done.report, asked)
        if asked.named:
            _require_all([p for p in asked.passes if p.name in asked.named], done.report)
        return done.closed, traced.outputs, traced.holds_tracers

    @functools.cache
    def optimized_on_state() -> Callable[..., Any]:
        return wrap(nnx.on_state(fn), asked.on_state(), jitted=jitted)

    @functools.wraps(fn)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        if nnx.holds_objects(args, kwargs):
            on_state, objects = nnx.split(args, kwargs)
            out, state = optimized_on_state()(*on_state)
            nnx.update(objects, state)
            return out
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        dynamic = [leaf for leaf in leaves if is_dynamic(leaf)]
        avals = [tracing.type_of(leaf) for leaf in dynamic]
        if tracing.is_staging():
            # The trace around this one is what is kept; to keep this too would double it.
            with full_collections_postponed():
                closed, outputs, _ = fresh(args, kwargs, avals)
                return outputs.filled(tracing.evaluate(closed, *dynamic, once=True), leaves)
        key = cache_key(leaves, in_tree, avals, is_dynamic)
        known = None if key is None else cache.get(key)
        if known is not None:
            closed, outputs = known
        else:
            closed, outputs, holds_tracers = fresh(args, kwargs, avals)
            if key is not None and not holds_tracers:
                cache[key] = closed, outputs
                if len(cache) > MAX_CACHED:
                    cache.pop(next(iter(cache)), None)
        return outputs.filled(tracing.evaluate(closed, *dynamic), leaves)

    # `functools.wraps` copies the name of a function; a partial or an object has none to copy.
    optimized.__name__ = tracing.name_of(fn)
    optimized.__relower_optimized__ = True  # type: ignore[attr-defined]
    return optimized


def _warn(report: Report, asked: Asked) -> None:
    """Says what a report would: `optimize` returns none."""
    told = [*_guessed(report), *_kept(report), *(_unchecked(report) if asked.check_facts else ())]
    for category, text in told:
        warnings.warn(f"{report.name}: {text}", category, stacklevel=4)


def _guessed(report: Report) -> Iterator[tuple[type[Warning], str]]:
    """Which sites that were to be measured were not."""
    whys = Counter(
        s.measured.why
        for s in report.sites
        if s.measured is not None and s.measured.why is not None
    )
    if whys:
        what = "; ".join(f"{why} ({plural(count, 'site')})" for why, count in whys.items())
        yield (
            MeasureWarning,
            f"choose='measured' took the rule of thumb where nothing could be measured: {what}",
        )


def _kept(report: Report) -> Iterator[tuple[type[Warning], str]]:
    """Which declared gradients are no zeros, which whoever reads them next may count on."""
    for leaf in report.frozen:
        codes = [r.code for r in leaf.reasons]
        if leaf.way == "declared" and codes and DISABLED not in codes:
            yield (
                FrozenWarning,
                f"the gradient of {leaf.path} is declared frozen and returned all the same: "
                f"{codes[0]}: {leaf.reasons[0]}",
            )


def _unchecked(report: Report) -> Iterator[tuple[type[Warning], str]]:
    """Which facts nothing checks."""
    return ((FactWarning, note) for note in report.notes if note.startswith(NOT_CHECKED))


def _require_all(passes: Sequence[Pass], report: Report) -> None:
    """Raise one error that names every unmet requirement of every pass that applied nowhere."""
    applied = report.counts()
    idle = [p for p in passes if p.name not in applied]
    lines: list[str] = []
    for p in idle:
        mine = [s for s in report.declined if s.pass_name == p.name]
        if not mine and p.name in report.superseded:
            continue  # every candidate went to a pass that is preferred
        if any(r.code == DISABLED for s in mine for r in s.reasons):
            continue  # it would apply, but for what the caller turned off
        lines.append(f"{p.name} applies nowhere in {report.name}:")
        if not mine:
            roots = ", ".join(sorted(root.name for root in p.roots()))
            lines.append(f"  no candidate among {report.equations} live equations (roots: {roots})")
        for s in mine:
            lines.append(f"  {s.primitive} → {s.shape} at {s.source or 'unknown line'}  {s.scope}")
            lines.extend(f"    {r.code}: {r}" for r in s.reasons)
    if lines:
        raise PassNotApplicable("\n".join(lines))
