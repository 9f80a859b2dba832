"""The `optimize` transform: trace once, find sites, substitute to a fixed point, evaluate."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, overload

import jax
import numpy as np

from ..compat import jaxprs, tracing
from ..compat.collector import full_collections_postponed
from ..compat.jaxprs import Body
from . import registry
from .base import Contract, Measured, Pass, PassNotApplicable
from .engine.lines import Lines
from .engine.meter import Meter
from .engine.rewrite import Optimized, rewrite
from .frozen import Frozen, Request, argument_paths, assumed, declared, request
from .report import Report

MAX_CACHED = 256
"""Signatures that one optimized function remembers; the oldest goes first."""

Choose = Mapping[str, str] | Literal["heuristic", "measured"] | Measured | None
F = TypeVar("F", bound=Callable[..., Any])


class MeasureWarning(UserWarning):
    """Sites were to be decided by estimated cycles, and were by rule of thumb."""


@overload
def optimize(
    fn: None = None,
    *,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> Callable[[F], F]: ...


@overload
def optimize(
    fn: F,
    *,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> F: ...


def optimize(
    fn: F | None = None,
    *,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> F | Callable[[F], F]:
    """A function that computes what ``fn`` computes, by better ops where a pass applies.

    Composes with `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan` and `jax.shard_map` in either
    order. ``fn`` is traced once per call under an outer trace, and once per signature in eager
    calls; like under `jax.jit`, its Python side effects happen then. An argument leaf that is no
    array (a string, a Python number) is closed over, as a static argument would be.

    ``optimize(jax.jit(f, **options))`` is ``jax.jit(optimize(f), **options)``: donation, shardings
    and static arguments stay.

    Args:
      fn: the function, usually the whole train step: what is inside a `jax.custom_vjp` is only
        seen after `jax.grad` has run. Without it, a decorator with these options.
      passes: names of the passes to run; each must find a site. None runs all that ``contract``
        admits, and those with nothing to do stay quiet.
      contract: the loosest contract to allow, ``"bitwise"``, ``"value"`` or ``"rounding"``; only
        looked at where ``passes`` is None.
      disable: names of passes not to run.
      choose: for passes that know several ways, which one to use, as in
        ``{"inverse_permutation": "counting"}``; sites where it isn't open are declined. By default,
        and with ``"heuristic"``, each pass takes the way that it thinks best. ``"measured"``, or a
        `Measured` with limits of its own, compiles each site for a TPU as it is and in each way,
        with libtpu on this host, takes the cheapest and declines where nothing is cheaper. A site
        that can't be measured is decided by rule of thumb, with a `MeasureWarning`.
      frozen: parameters that are not trained: their gradients, which ``fn`` returns, become zeros
        and are not computed. A `Frozen`; or, where the whole output is the gradients, what its
        ``leaves`` may be: a regex on paths, a function of a path, or a tree of bools. A gradient
        that something else reads is kept, and the report says by what.
      assume: ``"finite_grads"``: a gradient that is multiplied by zero is neither inf nor NaN.

    Raises:
      ValueError: an unknown pass, contract, way or assumption, a choice for a pass that knows one
        way only, or a regex that can't be compiled; when called, a declaration that fits no leaf of
        the output.
      TypeError: a declaration of another kind, or passes that are no sequence of names.
      PassNotApplicable: when called, where a pass asked for by name applies nowhere.
    """
    if fn is None:
        return lambda fn: optimize(
            fn, passes=passes, contract=contract, disable=disable, choose=choose,
            frozen=frozen, assume=assume,
        )  # fmt: skip
    if not callable(fn):
        raise TypeError(f"optimize: found {fn!r} of type {type(fn).__name__}, wanted a function")
    chosen, asked = _selected(passes, contract, disable, choose)
    told = _Told.of(frozen, assume, chosen)
    named = passes is not None
    options: dict[str, Any] = {"passes": chosen, "told": told, "named": named, "asked": asked}
    if tracing.is_jitted(fn):
        return cast(F, tracing.rejit(fn, functools.partial(_wrap, jitted=True, **options)))
    return cast(F, _wrap(fn, jitted=False, **options))


def explain(
    fn: Callable[..., Any],
    *args: Any,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    lines: bool = False,
    **kwargs: Any,
) -> Report:
    """What `optimize` would do to ``fn(*args, **kwargs)``: every site, applied or declined.

    Args:
      fn: the function.
      *args: arguments; a `jax.ShapeDtypeStruct` stands for an array of its shape and dtype.
      passes: as for `optimize`, but a pass that applies nowhere is reported, not raised.
      contract: as for `optimize`.
      disable: as for `optimize`.
      choose: as for `optimize`.
      frozen: as for `optimize`.
      assume: as for `optimize`.
      lines: note at each site all lines that it takes equations from (`Site.lines`).
      **kwargs: keyword arguments of ``fn``.
    """
    chosen, asked = _selected(passes, contract, disable, choose)
    told = _Told.of(frozen, assume, chosen)
    closed, request = _requested(fn, args, kwargs, told)
    if not lines:
        return _rewritten(closed, chosen, asked, _name(fn), request).report
    noted = Lines()
    done = _rewritten(closed, noted.noting(chosen), asked, _name(fn), request)
    return noted.annotated(done.report)


def rewritten(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    alter: Callable[[Sequence[Pass]], Sequence[Pass]],
    *,
    passes: Iterable[str] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> Report:
    """As `explain`, by passes that ``alter`` may change, as to record what they do."""
    chosen, _ = _selected(passes, contract, disable, None)
    told = _Told.of(frozen, assume, chosen)
    closed, request = _requested(fn, args, kwargs, told)
    return rewrite(closed, alter(chosen), name=_name(fn), request=request).report


def _requested(fn: Callable[..., Any], args: Any, kwargs: Any, told: _Told) -> tuple[Body, Request]:
    """A function's trace, and what is asked of the passes for it."""
    if tracing.is_jitted(fn):
        closed, out_tree, is_traced = tracing.trace_jitted(fn, args, kwargs)
    else:
        traced = _trace(fn, args, kwargs)
        closed, out_tree, is_traced = traced.closed, traced.out_tree, tracing.is_dynamic
    return closed, told.request(fn, args, kwargs, is_traced, closed, out_tree)


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
      expected: sites by pass: equations, told apart by the line they are called from, however
        often they run (`Site.calls`). Passes not named
        may rewrite any number.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      AssertionError: with the counts and the whole report.
    """
    if not isinstance(expected, Mapping) or not isinstance(args, tuple | list):
        raise TypeError(
            f"assert_applied: found args of type {type(args).__name__} and expected of type "
            f"{type(expected).__name__}; wanted a tuple of arguments and a dict of counts by pass"
        )
    names = [registry.by_name(name).name for name in expected]
    report = explain(fn, *args, **kwargs)
    counts = report.counts()
    if not report.applied and getattr(fn, "__relower_optimized__", False):
        report = replace(report, notes=(*report.notes, "the function given is already optimized"))
    wrong = [f"{n}: applied {counts.get(n, 0)}, wanted {expected[n]}" for n in names
             if counts.get(n, 0) != expected[n]]  # fmt: skip
    if wrong:
        raise AssertionError("; ".join(wrong) + f"\n{report}")
    return report


def _selected(
    passes: Iterable[str] | None, contract: str, disable: Iterable[str], choose: Choose
) -> tuple[tuple[Pass, ...], Measured | None]:
    """The passes to run, and how to measure where that is asked for."""
    asked = Measured() if choose == "measured" else choose
    by_rule = asked == "heuristic" or isinstance(asked, Measured)
    ways = None if by_rule else cast(Any, asked)  # anything but ways by pass is refused there
    chosen = registry.select(passes, _contract(contract), disable, ways)
    return chosen, asked if isinstance(asked, Measured) else None


def _rewritten(
    closed: Body, passes: Sequence[Pass], asked: Measured | None, name: str, request: Request
) -> Optimized:
    if asked is None:
        return rewrite(closed, passes, name=name, request=request)
    meter = Meter(asked)
    done = rewrite(closed, meter.measuring(passes), name=name, request=request)
    return replace(done, report=meter.annotated(done.report))


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


@dataclass(frozen=True)
class _Told:
    """What the caller says of a function."""

    frozen: Frozen | None
    assume: frozenset[str]

    @classmethod
    def of(cls, frozen: Any, assume: Any, passes: Sequence[Pass]) -> _Told:
        told = cls(declared(frozen), assumed(assume))
        if (told.frozen or told.assume) and all(p.program is None for p in passes):
            names = ", ".join(p.name for p in passes) or "none"
            raise ValueError(
                f"{'frozen' if told.frozen else 'assume'} is for the pass frozen_gradient: found "
                f"the passes {names}, wanted it among them"
            )
        return told

    def request(
        self,
        fn: Any,
        args: Any,
        kwargs: Any,
        is_traced: Callable[[Any], bool],
        closed: Body,
        out_tree: Any,
    ) -> Request:
        names = argument_paths(fn, args, kwargs, is_traced)
        if len(names) != len(jaxprs.invars(closed)):
            names = []  # which of them are static arguments isn't known here
        return request(self.frozen, self.assume, names, out_tree)


def _wrap(
    fn: Callable[..., Any],
    passes: Sequence[Pass],
    told: _Told,
    named: bool,
    jitted: bool,
    asked: Measured | None,
) -> Callable[..., Any]:
    """``fn`` rewritten on each new signature, evaluated under the caller's trace.

    Under ``jitted``, jit hands over its static arguments as they are: a numpy scalar is one.
    """
    cache: dict[Any, tuple[Body, Any]] = {}
    is_dynamic = tracing.is_dynamic_under_jit if jitted else tracing.is_dynamic

    def fresh(args: Any, kwargs: Any, avals: Sequence[Any]) -> tuple[Body, Any, bool]:
        traced = tracing.trace(fn, args, kwargs, avals, is_dynamic)
        request = told.request(fn, args, kwargs, is_dynamic, traced.closed, traced.out_tree)
        done = _rewritten(traced.closed, passes, asked, _name(fn), request)
        _warn(done.report)
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
        if known is not None:
            closed, out_tree = known
        else:
            closed, out_tree, holds_tracers = fresh(args, kwargs, avals)
            if key is not None and not holds_tracers:
                cache[key] = closed, out_tree
                if len(cache) > MAX_CACHED:
                    cache.pop(next(iter(cache)), None)
        return jax.tree.unflatten(out_tree, tracing.evaluate(closed, *dynamic))

    # `functools.wraps` copies the name of a function; a partial or an object has none to copy.
    optimized.__name__ = tracing.name_of(fn)
    optimized.__relower_optimized__ = True  # type: ignore[attr-defined]
    return optimized


def _warn(report: Report) -> None:
    """Says which sites that were to be measured were not: `optimize` returns no report."""
    guessed = [s for s in report.sites if s.measured is not None and s.measured.why is not None]
    if guessed:
        whys = Counter(s.measured.why for s in guessed if s.measured is not None)
        what = "; ".join(f"{why} ({count} sites)" for why, count in whys.items())
        warnings.warn(
            f"{report.name}: choose='measured' took the rule of thumb where nothing could be "
            f"measured: {what}",
            MeasureWarning,
            stacklevel=4,
        )


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
