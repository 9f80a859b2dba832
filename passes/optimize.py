"""The `optimize` transform: trace once, find sites, substitute to a fixed point, evaluate."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, overload

import jax

from ..compat import jaxprs, nnx, tracing
from ..compat.collector import full_collections_postponed
from ..compat.jaxprs import Body
from ..compat.outputs import Outputs
from ..lowering.words import plural
from . import registry
from .base import Contract, Measured, Pass, PassNotApplicable
from .disable import DISABLED, Disabled, split
from .engine.addresses import Addresses
from .engine.claims import NOT_CHECKED, Claims, tied
from .engine.lines import Lines
from .engine.met import check_met
from .engine.meter import Meter
from .engine.rewrite import Optimized, rewrite
from .engine.signature import cache_key
from .engine.suggesting import Suggesting
from .frozen import Frozen, Request, argument_paths, assumed, declared, request
from .report import Report

MAX_CACHED = 256
"""Signatures that one optimized function remembers; the oldest goes first."""

Choose = Mapping[str, str] | Literal["heuristic", "measured"] | Measured | None
F = TypeVar("F", bound=Callable[..., Any])


class MeasureWarning(UserWarning):
    """Sites were to be decided by estimated cycles, and were by rule of thumb."""


class FactWarning(UserWarning):
    """Facts that a rewrite leaned on were to be checked, and can't be."""


@overload
def optimize(
    fn: None = None,
    *,
    passes: Iterable[str | Pass] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    check_facts: bool = False,
) -> Callable[[F], F]: ...


@overload
def optimize(
    fn: F,
    *,
    passes: Iterable[str | Pass] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    check_facts: bool = False,
) -> F: ...


def optimize(
    fn: F | None = None,
    *,
    passes: Iterable[str | Pass] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    check_facts: bool = False,
) -> F | Callable[[F], F]:
    """A function that computes what ``fn`` computes, by better ops where a pass applies.

    Composes with `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan` and `jax.shard_map` in either
    order. ``fn`` is traced once per call under an outer trace, and once per signature in eager
    calls; like under `jax.jit`, its Python side effects happen then. An argument leaf that is no
    array (a string, a Python number, an activation function in an Equinox module) is closed over,
    as a static argument would be; returned as it is, it is passed on.

    ``optimize(jax.jit(f, **options))`` is ``jax.jit(optimize(f), **options)``: donation, shardings
    and static arguments stay. So it is with ``flax.nnx.jit``. What ``fn`` assigns to flax NNX
    objects among its arguments, the caller's objects have afterwards.

    Args:
      fn: the function, usually the whole train step: what is inside a `jax.custom_vjp` is only
        seen after `jax.grad` has run. Without it, a decorator with these options.
      passes: names of the passes to run, or `Pass` objects; each must find a site. Among them
        ``"default"`` stands for all that ``contract`` admits, of which those with nothing to do
        stay quiet. None is ``["default"]``.
      contract: the loosest contract to allow, ``"bitwise"``, ``"value"`` or ``"rounding"``; only
        looked at for ``"default"``.
      disable: names of passes not to run, and addresses of single sites to leave alone, as
        `explain` shows them: ``"argsort_packed_key@jvp()/scan/jit(argsort):route#2"``.
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
      check_facts: have the function check each fact that its rewrites leaned on. The checks are
        `jax.experimental.checkify`'s: without ``checkify(optimize(fn, check_facts=True))`` they do
        nothing. What can't be checked is in the notes of `explain`'s report.

    Raises:
      ValueError: an unknown pass, contract, way or assumption, a choice for a pass that knows one
        way only, or a regex that can't be compiled; when called, a declaration that fits no leaf of
        the output, or an address to disable at which there is no site.
      TypeError: a declaration of another kind, or passes that are no sequence of names.
      PassNotApplicable: when called, where a pass asked for by name applies nowhere.
    """
    if fn is None:
        return lambda fn: optimize(
            fn, passes=passes, contract=contract, disable=disable, choose=choose,
            frozen=frozen, assume=assume, check_facts=check_facts,
        )  # fmt: skip
    if not callable(fn):
        raise TypeError(f"optimize: found {fn!r} of type {type(fn).__name__}, wanted a function")
    chosen, named, asked = _selected(passes, contract, disable, choose)
    told = _Told.of(frozen, assume, disable, chosen)
    options: dict[str, Any] = {"passes": chosen, "told": told, "named": named, "asked": asked}
    options["check_facts"] = check_facts
    if tracing.is_jitted(fn):
        return cast(F, tracing.rejit(fn, functools.partial(_wrap, jitted=True, **options)))
    if nnx.is_jitted(fn):
        return cast(F, nnx.rejit(fn, functools.partial(_wrap, jitted=True, **options)))
    return cast(F, _wrap(fn, jitted=False, **options))


def explain(
    fn: Callable[..., Any],
    *args: Any,
    passes: Iterable[str | Pass] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    choose: Choose = None,
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    lines: bool = False,
    suggest: bool = False,
    check_facts: bool = False,
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
      suggest: note at each site applied what to write in the source instead (`Site.suggestion`).
      check_facts: as for `optimize`; the notes say which facts aren't checked.
      **kwargs: keyword arguments of ``fn``.
    """
    chosen, _, asked = _selected(passes, contract, disable, choose)
    told = _Told.of(frozen, assume, disable, chosen)
    closed, request = _requested(fn, args, kwargs, told)
    addresses = Addresses(told.disabled)
    notebooks: list[Lines | Suggesting] = [Lines()] if lines else []
    notebooks += [Suggesting()] if suggest else []
    for noted in notebooks:
        chosen = noted.noting(chosen)
    done = _rewritten(closed, chosen, asked, _name(fn), request, addresses, check_facts)
    report = done.report
    for noted in notebooks:
        report = noted.annotated(report)
    return report


def rewritten(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    alter: Callable[[Sequence[Pass]], Sequence[Pass]],
    *,
    passes: Iterable[str | Pass] | None = None,
    contract: str = "bitwise",
    disable: Iterable[str] = (),
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> Report:
    """As `explain`, by passes that ``alter`` may change, as to record what they do."""
    chosen, _, _ = _selected(passes, contract, disable, None)
    told = _Told.of(frozen, assume, disable, chosen)
    closed, request = _requested(fn, args, kwargs, told)
    addresses = Addresses(told.disabled)
    return _rewritten(closed, alter(chosen), None, _name(fn), request, addresses).report


def _requested(fn: Callable[..., Any], args: Any, kwargs: Any, told: _Told) -> tuple[Body, Request]:
    """A function's trace, and what is asked of the passes for it."""
    if nnx.holds_objects(args, kwargs):
        fn, told = nnx.on_state(fn), told.on_state()
        (args, _), kwargs = nnx.split(args, kwargs), {}
    if tracing.is_jitted(fn):
        closed, out_tree, is_traced = tracing.trace_jitted(fn, args, kwargs)
    else:
        traced = _trace(fn, args, kwargs)
        closed, is_traced = traced.closed, tracing.is_dynamic
        out_tree = traced.outputs.arrays
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
        often they run (`Site.calls`). The passes named run whatever their contract, beside those
        that run by default; these may rewrite any number.
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
    report = explain(fn, *args, passes=[registry.DEFAULT, *names], **kwargs)
    counts = report.counts()
    if not report.applied and getattr(fn, "__relower_optimized__", False):
        report = replace(report, notes=(*report.notes, "the function given is already optimized"))
    wrong = [f"{n}: applied {counts.get(n, 0)}, wanted {expected[n]}" for n in names
             if counts.get(n, 0) != expected[n]]  # fmt: skip
    if wrong:
        raise AssertionError("; ".join(wrong) + f"\n{report}")
    return report


def _selected(
    passes: Iterable[str | Pass] | None, contract: str, disable: Iterable[str], choose: Choose
) -> tuple[tuple[Pass, ...], frozenset[str], Measured | None]:
    """The passes to run, the names of those asked for, and how to measure where that is wanted."""
    asked = Measured() if choose == "measured" else choose
    by_rule = asked == "heuristic" or isinstance(asked, Measured)
    ways = None if by_rule else cast(Any, asked)  # anything but ways by pass is refused there
    chosen = registry.select(passes, _contract(contract), split(disable)[0], ways)
    return chosen.passes, chosen.named, asked if isinstance(asked, Measured) else None


def _rewritten(
    closed: Body,
    passes: Sequence[Pass],
    asked: Measured | None,
    name: str,
    request: Request,
    addresses: Addresses | None,
    check_facts: bool = False,
) -> Optimized:
    meter = None if asked is None else Meter(asked)
    run = passes if meter is None else meter.measuring(passes)
    claims = Claims() if check_facts else None
    run = run if claims is None else claims.claiming(run)
    done = rewrite(closed, run, name=name, request=request, addresses=addresses)
    if claims is not None:
        notes = (*done.report.notes, *claims.notes)
        done = replace(done, closed=tied(done.closed), report=replace(done.report, notes=notes))
    if addresses is not None and addresses.disabled.addresses:
        check_met(addresses.disabled, done.report, closed, passes, request)
    return done if meter is None else replace(done, report=meter.annotated(done.report))


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
    disabled: Disabled

    @classmethod
    def of(cls, frozen: Any, assume: Any, disable: Iterable[str], passes: Sequence[Pass]) -> _Told:
        told = cls(declared(frozen), assumed(assume), split(disable)[1])
        if (told.frozen or told.assume) and all(p.program is None for p in passes):
            names = ", ".join(p.name for p in passes) or "none"
            raise ValueError(
                f"{'frozen' if told.frozen else 'assume'} is for the pass frozen_gradient: found "
                f"the passes {names}, wanted it among them"
            )
        return told

    def on_state(self) -> _Told:
        """The same of a function that returns its objects' state beside its result."""
        frozen = self.frozen
        if frozen is None:
            return self
        grads = frozen.grads
        return replace(self, frozen=replace(frozen, grads=lambda out: grads(out[0])))

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
    named: frozenset[str],
    jitted: bool,
    asked: Measured | None,
    check_facts: bool,
) -> Callable[..., Any]:
    """``fn`` rewritten on each new signature, evaluated under the caller's trace.

    Under ``jitted``, jit hands over its static arguments as they are: a numpy scalar is one.
    """
    cache: dict[Any, tuple[Body, Outputs]] = {}
    is_dynamic = tracing.is_dynamic_under_jit if jitted else tracing.is_dynamic

    def fresh(args: Any, kwargs: Any, avals: Sequence[Any]) -> tuple[Body, Outputs, bool]:
        traced = tracing.trace(fn, args, kwargs, avals, is_dynamic)
        out_tree = traced.outputs.arrays
        request = told.request(fn, args, kwargs, is_dynamic, traced.closed, out_tree)
        addresses = Addresses(told.disabled) if told.disabled else None
        name = _name(fn)
        done = _rewritten(traced.closed, passes, asked, name, request, addresses, check_facts)
        _warn(done.report)
        if check_facts:
            _warn_unchecked(done.report)
        if named:
            _require_all([p for p in passes if p.name in named], done.report)
        return done.closed, traced.outputs, traced.holds_tracers

    @functools.cache
    def optimized_on_state() -> Callable[..., Any]:
        return _wrap(nnx.on_state(fn), passes, told.on_state(), named, jitted, asked, check_facts)

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


def _warn(report: Report) -> None:
    """Says which sites that were to be measured were not: `optimize` returns no report."""
    guessed = [s for s in report.sites if s.measured is not None and s.measured.why is not None]
    if guessed:
        whys = Counter(s.measured.why for s in guessed if s.measured is not None)
        what = "; ".join(f"{why} ({plural(count, 'site')})" for why, count in whys.items())
        warnings.warn(
            f"{report.name}: choose='measured' took the rule of thumb where nothing could be "
            f"measured: {what}",
            MeasureWarning,
            stacklevel=4,
        )


def _warn_unchecked(report: Report) -> None:
    """Says which facts nothing checks, as the notes of a report would."""
    for note in report.notes:
        if note.startswith(NOT_CHECKED):
            warnings.warn(f"{report.name}: {note}", FactWarning, stacklevel=4)


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
