"""The `optimize` transform: trace once, find sites, substitute to a fixed point, evaluate."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np

from ..compat import jaxprs, tracing
from ..compat.jaxprs import Body, Eqn
from ..matchers.fact import UNKNOWN
from ..matchers.facts import Analysis
from ..matchers.graph import Dataflow, Scope
from ..matchers.pattern import Mismatch
from . import registry
from .base import (
    Accepted,
    Contract,
    Match,
    Pass,
    PassNotApplicable,
    Reason,
    Site,
    SiteDeclined,
    Status,
)
from .interpreter import Interpreter
from .report import NotEnteredGroup, Report

MAX_ROUNDS = 16
"""Rounds of match and substitute before `optimize` stops and says so."""

MAX_CACHED = 256
"""Signatures that one optimized function remembers; the oldest goes first."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Optimized:
    """A rewritten jaxpr and what was done to it."""

    closed: Body
    report: Report


def optimize(
    fn: F,
    *,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
) -> F:
    """A function that computes what ``fn`` computes, by better ops where a pass applies.

    Composes with `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan` and `jax.shard_map` in either
    order. ``fn`` is traced once per call under an outer trace, and once per signature in eager
    calls; like under `jax.jit`, its Python side effects happen then. An argument leaf that is no
    array (a string, a Python number) is closed over, as a static argument would be.

    ``optimize(jax.jit(f, **options))`` is ``jax.jit(optimize(f), **options)``: donation, shardings
    and static arguments stay.

    Args:
      fn: the function, usually the whole train step: what is inside a `jax.custom_vjp` is only
        seen after `jax.grad` has run.
      passes: names of the passes to run; each must find a site. None runs all that ``contract``
        admits, and those with nothing to do stay quiet.
      contract: the loosest contract to allow, ``"bitwise"``, ``"value"`` or ``"rounding"``; only
        looked at where ``passes`` is None.
      disable: names of passes not to run.

    Raises:
      ValueError: an unknown pass or contract.
      PassNotApplicable: when called, where a pass asked for by name applies nowhere.
    """
    chosen = registry.select(passes, _contract(contract), disable)
    named = passes is not None
    if tracing.is_jitted(fn):
        wrap = functools.partial(_wrap, passes=chosen, named=named, jitted=True)
        return tracing.rejit(fn, wrap)  # type: ignore[no-any-return]
    return _wrap(fn, passes=chosen, named=named, jitted=False)  # type: ignore[return-value]


def explain(
    fn: Callable[..., Any],
    *args: Any,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    **kwargs: Any,
) -> Report:
    """What `optimize` would do to ``fn(*args, **kwargs)``: every site, applied or declined.

    Args:
      fn: the function.
      *args: arguments; a `jax.ShapeDtypeStruct` stands for an array of its shape and dtype.
      passes: as for `optimize`, but a pass that applies nowhere is reported, not raised.
      contract: as for `optimize`.
      disable: as for `optimize`.
      **kwargs: keyword arguments of ``fn``.
    """
    chosen = registry.select(passes, _contract(contract), disable)
    if tracing.is_jitted(fn):
        closed = tracing.trace_jitted(fn, args, kwargs)
    else:
        closed = _trace(fn, args, kwargs).closed
    return rewrite(closed, chosen, name=_name(fn)).report


def assert_applied(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Mapping[str, int],
    **kwargs: Any,
) -> Report:
    """Assert how many sites each pass rewrites in ``fn(*args, **kwargs)``.

    Args:
      fn: the function, not yet optimized.
      args: its arguments, or `jax.ShapeDtypeStruct`s.
      expected: sites by pass; a body that several equations run counts once. Passes not named
        may rewrite any number.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      AssertionError: with the counts and the whole report.
    """
    names = [registry.by_name(name).name for name in expected]
    report = explain(fn, *args, **kwargs)
    counts = report.counts()
    wrong = [f"{n}: applied {counts.get(n, 0)}, wanted {expected[n]}" for n in names
             if counts.get(n, 0) != expected[n]]  # fmt: skip
    if wrong:
        raise AssertionError("; ".join(wrong) + f"\n{report}")
    return report


def rewrite(closed: Body, passes: Sequence[Pass], *, name: str = "") -> Optimized:
    """Rewrite a closed jaxpr to a fixed point of the passes.

    Each round matches on the dataflow of every body, substitutes what was accepted, and analyses
    only bodies that changed.
    """
    analysis = Analysis()
    refused: dict[tuple[Any, ...], Reason] = {}
    sites: list[Site] = []
    notes: list[str] = []
    taken: set[str] = set()
    visited: tuple[int, int, tuple[NotEnteredGroup, ...]] | None = None
    rounds = 0
    while rounds < MAX_ROUNDS:
        rounds += 1
        flow = Dataflow(closed, analysis, (UNKNOWN,) * len(jaxprs.invars(closed)))
        visited = visited or _visited(flow)
        accepted, found = _match(flow, passes, refused, taken)
        interpreter = Interpreter(accepted)
        while accepted:
            try:
                done = interpreter.rewrite(flow.root)
                break
            except SiteDeclined as declined:
                _refuse(declined, accepted, refused)
                # A pass of less preference may take what this one had to give back.
                accepted, found = _match(flow, passes, refused, taken)
                interpreter = interpreter.again(accepted)
        sites = _merge(sites, found.values())
        if accepted:
            closed = done.body
            for body, scope in interpreter.origins:
                analysis.rewritten(body, scope.facts)
        flow.release()
        if not accepted:
            break
    else:
        notes.append(f"stopped after {MAX_ROUNDS} rounds with sites still applying")
    assert visited is not None
    equations, bodies, coverage = visited
    report = Report(
        name=name,
        passes=tuple(p.name for p in passes),
        sites=tuple(sorted(sites, key=_order)),
        coverage=coverage,
        equations=equations,
        bodies=bodies,
        rounds=rounds,
        superseded=tuple(sorted(taken)),
        notes=tuple(notes),
    )
    return Optimized(closed, report)


_Key = tuple[int, int]


def _merge(earlier: Sequence[Site], found: Iterable[Site]) -> list[Site]:
    """The sites so far: the last verdict on each, and those that applied.

    A site that stays declined is found again in every round, one that applied is not, and one
    that another rewrite has removed stays as it was declined.
    """
    found = list(found)
    judged = {s.place for s in found}
    return [s for s in earlier if s.status is Status.APPLIED or s.place not in judged] + found


def _match(
    flow: Dataflow,
    passes: Sequence[Pass],
    refused: Mapping[tuple[Any, ...], Reason],
    taken: set[str],
) -> tuple[dict[_Key, Accepted], dict[tuple[_Key, str], Site]]:
    """Judge every candidate of every live equation; ``taken`` gathers passes that lost a site."""
    by_root: dict[Any, list[Pass]] = {}
    for p in passes:
        for root in p.roots():
            by_root.setdefault(root, []).append(p)
    accepted: dict[_Key, Accepted] = {}
    found: dict[tuple[_Key, str], Site] = {}
    for scope in flow.scopes:
        for index in scope.live:
            for p in by_root.get(scope.eqns[index].primitive, ()):
                verdict = _judge(p, scope, index, refused)
                if verdict is None:
                    continue
                site, match = verdict
                key = (id(scope), index)
                found[key, p.name] = site
                if match is not None:
                    accepted[key] = Accepted(match, p.replace(match), p)
                    taken.update(_rivals(p, by_root[scope.eqns[index].primitive], scope, index))
                    break
    return accepted, found


def _rivals(p: Pass, rivals: Sequence[Pass], scope: Scope, index: int) -> set[str]:
    """Passes of less preference that would have had a candidate where ``p`` applied."""
    later = rivals[rivals.index(p) + 1 :]
    return {r.name for r in later if isinstance(r.find(scope, index), Match)}


def _judge(
    p: Pass, scope: Scope, index: int, refused: Mapping[tuple[Any, ...], Reason]
) -> tuple[Site, Match | None] | None:
    """A pass's verdict on one equation; None where it is no candidate."""
    symbolic = _symbolic_shape(scope.eqns[index])
    if symbolic is not None:
        return replace(_site(p, scope, index), reasons=(symbolic,)), None
    match = p.find(scope, index)
    if match is None:
        return None
    site = _site(p, scope, index)
    if isinstance(match, Mismatch):
        path = " → ".join(match.path)
        reason = Reason("near-miss", f"the pattern stopped at {path}", match.found, match.wanted)
        return replace(site, reasons=(reason,)), None
    reasons = [r for r in (q.check(match) for q in p.requirements) if r is not None]
    if not reasons:
        unprofitable = p.profitable(match)
        reasons = [] if unprofitable is None else [unprofitable]
    earlier = refused.get(_refusal_key(p, scope, index))
    if not reasons and earlier is not None:
        reasons = [earlier]
    if reasons:
        return replace(site, reasons=tuple(reasons)), None
    return replace(site, status=Status.APPLIED), match


def _symbolic_shape(eqn: Eqn) -> Reason | None:
    """Why an equation on arrays of symbolic size, as in `jax.export`, is left alone."""
    for atom in (*eqn.invars, *eqn.outvars):
        if not all(type(n) is int for n in getattr(atom.aval, "shape", ())):
            return Reason("symbolic-shape", "passes reason about sizes that are known",
                          atom.aval.str_short(short_dtypes=True), "a static shape")  # fmt: skip
    return None


def _site(p: Pass, scope: Scope, index: int) -> Site:
    eqn = scope.eqns[index]
    return Site(
        pass_name=p.name,
        status=Status.DECLINED,
        reasons=(),
        primitive=eqn.primitive.name,
        shape=eqn.outvars[-1].aval.str_short(short_dtypes=True),
        source=scope.source_line(eqn),
        scope=scope.name_stack(eqn),
        calls=max(1, len(scope.callers)),
    )


def _refusal_key(p: Pass, scope: Scope, index: int) -> tuple[Any, ...]:
    """Identifies a site from one round to the next: equations keep their objects."""
    return p.name, id(scope.eqns[index])


def _refuse(
    declined: SiteDeclined,
    accepted: Mapping[_Key, Accepted],
    refused: dict[tuple[Any, ...], Reason],
) -> None:
    """Remember which equations can't be substituted, and why.

    The same equation in other contexts goes with them: what was done to it may be shared.
    """
    offered = {_refusal_key(s.rewrite, s.match.scope, s.match.index) for s in accepted.values()}
    blamed = {
        _refusal_key(s.rewrite, s.match.scope, s.match.index) for s in declined.blamed
    } & offered
    if not blamed:
        raise declined  # the fault lies with no site of this round: to try again would not end
    refused.update(dict.fromkeys(blamed, declined.reason))


def _visited(flow: Dataflow) -> tuple[int, int, tuple[NotEnteredGroup, ...]]:
    """How many live equations in how many bodies there are, and what was not entered."""
    equations = sum(len(s.live) for s in flow.scopes)
    return equations, sum(1 for _ in flow.scopes), _coverage(flow)


def _coverage(flow: Dataflow) -> tuple[NotEnteredGroup, ...]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for scope in flow.scopes:
        for index, skipped in scope.not_entered:
            counts[scope.eqns[index].primitive.name, skipped.param, skipped.reason] += 1
    return tuple(NotEnteredGroup(*key, n) for key, n in sorted(counts.items()))


def _order(site: Site) -> tuple[Any, ...]:
    return (site.status is not Status.APPLIED, site.source or "", site.scope, site.pass_name)


def _contract(name: str) -> Contract:
    try:
        return Contract(name)
    except ValueError:
        known = ", ".join(repr(c.value) for c in Contract)
        raise ValueError(f"contract is {name!r}; wanted one of {known}") from None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> tracing.Traced:
    leaves = jax.tree.leaves((args, kwargs))
    avals = [tracing.type_of(leaf) for leaf in leaves if tracing.is_dynamic(leaf)]
    return tracing.trace(fn, args, kwargs, avals)


def _wrap(
    fn: Callable[..., Any], passes: Sequence[Pass], named: bool, jitted: bool
) -> Callable[..., Any]:
    """``fn`` rewritten on each new signature, evaluated under the caller's trace.

    Under ``jitted``, jit hands over its static arguments as they are: a numpy scalar is one.
    """
    cache: dict[Any, tuple[Body, Any]] = {}
    is_dynamic = tracing.is_dynamic_under_jit if jitted else tracing.is_dynamic

    def fresh(args: Any, kwargs: Any, avals: Sequence[Any]) -> tuple[Body, Any, bool]:
        traced = tracing.trace(fn, args, kwargs, avals, is_dynamic)
        done = rewrite(traced.closed, passes, name=_name(fn))
        if named:
            _require_all(passes, done.report)
        return done.closed, traced.out_tree, traced.holds_tracers

    @functools.wraps(fn)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        dynamic = [leaf for leaf in leaves if is_dynamic(leaf)]
        avals = [tracing.type_of(leaf) for leaf in dynamic]
        if tracing.is_staging():
            # The trace around this one is what is kept; to keep this too would double it.
            with full_collections_postponed():
                closed, out_tree, _ = fresh(args, kwargs, avals)
                return jax.tree.unflatten(out_tree, tracing.evaluate(closed, *dynamic))
        key = _cache_key(leaves, in_tree, avals, is_dynamic)
        known = None if key is None else cache.get(key)
        if known is None:
            *known, holds_tracers = fresh(args, kwargs, avals)
            if key is not None and not holds_tracers:
                cache[key] = known
                if len(cache) > MAX_CACHED:
                    cache.pop(next(iter(cache)), None)
        closed, out_tree = known
        return jax.tree.unflatten(out_tree, tracing.evaluate(closed, *dynamic))

    return optimized


@contextlib.contextmanager
def full_collections_postponed() -> Iterator[None]:
    """Without the full passes of Python's cyclic garbage collector, which go on afterwards.

    A trace and its rewrite allocate by the hundred thousand and leave few cycles behind. Each full
    pass looks at every object of jax and of the program, and would take about as long as the
    rewrite; young objects are collected as always.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _cache_key(
    leaves: Sequence[Any], in_tree: Any, avals: Sequence[Any], is_dynamic: Callable[[Any], bool]
) -> Any:
    """Hashable and complete, or None where the call can't be cached."""
    static = tuple(None if is_dynamic(leaf) else _static_key(leaf) for leaf in leaves)
    key = (static, in_tree, tuple(avals), tracing.trace_context())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _static_key(leaf: Any) -> Any:
    """Tells apart what Python calls equal: 1 and True, and zeros of either sign."""
    exact = repr(leaf) if isinstance(leaf, float | complex | np.generic) else leaf
    return type(leaf), exact


def _require_all(passes: Sequence[Pass], report: Report) -> None:
    """Raise one error that names every unmet requirement of every pass that applied nowhere."""
    applied = report.counts()
    idle = [p for p in passes if p.name not in applied]
    lines: list[str] = []
    for p in idle:
        mine = [s for s in report.declined if s.pass_name == p.name]
        if not mine and p.name in report.superseded:
            continue  # every candidate went to a pass that is preferred
        lines.append(f"{p.name} applies nowhere in {report.name}:")
        if not mine:
            roots = ", ".join(sorted(root.name for root in p.roots()))
            lines.append(f"  no candidate among {report.equations} live equations (roots: {roots})")
        for s in mine:
            lines.append(f"  {s.primitive} → {s.shape} at {s.source or 'unknown line'}  {s.scope}")
            lines.extend(f"    {r.code}: {r}" for r in s.reasons)
    if lines:
        raise PassNotApplicable("\n".join(lines))
