"""The `optimize` transform: trace once, find sites, substitute to a fixed point, evaluate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

import jax

from ..compat import nnx, tracing
from ..compat.jaxprs import Body
from . import registry
from .asked import Asked, Choose
from .base import Pass
from .engine.addresses import Addresses
from .engine.lines import Lines
from .engine.suggesting import Suggesting
from .engine.wrap import FactWarning, FrozenWarning, MeasureWarning, apply, label_of, wrap
from .frozen import Request
from .report import Report

__all__ = [
    "FactWarning",
    "FrozenWarning",
    "MeasureWarning",
    "assert_applied",
    "explain",
    "optimize",
    "rewritten",
]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def optimize(
    fn: None = None,
    *,
    passes: Iterable[str | Pass] | None = None,
    contract: str | None = None,
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
    contract: str | None = None,
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
    contract: str | None = None,
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
      contract: the loosest contract that ``"default"`` admits, ``"bitwise"``, ``"value"`` or
        ``"rounding"``; None is ``"bitwise"``. A pass that is named runs whatever its contract, so
        that beside names only it would mean nothing, and is an error.
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
        that something else reads is kept, with a `FrozenWarning`, and the report says by what.
      assume: ``"finite_grads"``: a gradient that is multiplied by zero is neither inf nor NaN.
      check_facts: have the function check each fact that its rewrites leaned on. The checks are
        `jax.experimental.checkify`'s: without ``checkify(optimize(fn, check_facts=True))`` they do
        nothing. What can't be checked is in the notes of `explain`'s report.

    Raises:
      ValueError: an unknown pass, contract, way or assumption, a choice for a pass that knows one
        way only, a contract where each pass is named, a pass that is named and disabled, or a regex
        that can't be compiled; when called, a declaration that fits no leaf of the output, or an
        address to disable at which there is no site.
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
    asked = Asked.of(passes, contract, disable, choose, frozen, assume, check_facts)
    if tracing.is_jitted(fn):
        return cast(F, tracing.rejit(fn, functools.partial(wrap, asked=asked, jitted=True)))
    if nnx.is_jitted(fn):
        return cast(F, nnx.rejit(fn, functools.partial(wrap, asked=asked, jitted=True)))
    return cast(F, wrap(fn, asked, jitted=False))


def explain(
    fn: Callable[..., Any],
    *args: Any,
    passes: Iterable[str | Pass] | None = None,
    contract: str | None = None,
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
    asked = Asked.of(passes, contract, disable, choose, frozen, assume, check_facts)
    closed, request = _requested(fn, args, kwargs, asked)
    addresses = Addresses(asked.disabled)
    notebooks: list[Lines | Suggesting] = [Lines()] if lines else []
    notebooks += [Suggesting()] if suggest else []
    for noted in notebooks:
        asked = asked.by(noted.noting(asked.passes))
    done = apply(asked, closed, label_of(fn), request, addresses)
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
    contract: str | None = None,
    disable: Iterable[str] = (),
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
) -> Report:
    """As `explain`, by passes that ``alter`` may change, as to record what they do."""
    asked = Asked.of(passes, contract, disable, None, frozen, assume)
    closed, request = _requested(fn, args, kwargs, asked)
    addresses = Addresses(asked.disabled)
    return apply(asked.by(alter(asked.passes)), closed, label_of(fn), request, addresses).report


def _requested(
    fn: Callable[..., Any], args: Any, kwargs: Any, asked: Asked
) -> tuple[Body, Request]:
    """A function's trace, and what is asked of the passes for it."""
    if nnx.holds_objects(args, kwargs):
        fn, asked = nnx.on_state(fn), asked.on_state()
        (args, _), kwargs = nnx.split(args, kwargs), {}
    if tracing.is_jitted(fn):
        closed, out_tree, is_traced = tracing.trace_jitted(fn, args, kwargs)
    else:
        traced = _trace(fn, args, kwargs)
        closed, is_traced = traced.closed, tracing.is_dynamic
        out_tree = traced.outputs.arrays
    return closed, asked.request(fn, args, kwargs, is_traced, closed, out_tree)


def _trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> tracing.Traced:
    leaves = jax.tree.leaves((args, kwargs))
    avals = [tracing.type_of(leaf) for leaf in leaves if tracing.is_dynamic(leaf)]
    return tracing.trace(fn, args, kwargs, avals)


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
