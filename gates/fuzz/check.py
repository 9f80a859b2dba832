"""What must be true of every program: one plan checked, property by property."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax

from ...compat import jaxprs, tracing
from ...compat.jaxprs import Body
from ...passes import registry
from ...passes.base import Contract, Match, Pass, Reason
from ...passes.engine.check import check_closed
from ...passes.engine.rewrite import rewrite
from ...passes.report import Report
from .compare import decided_by_rounding, difference
from .evaluate.core import DoesNotEnd, Evaluation
from .evaluate.promises import BrokenPromise
from .plan import Plan
from .program import function, mesh_of, transformed, values
from .run import BY_ROUNDING

SIZES = frozenset(("small", "large", "large-k", "too-many-places", "few-parts", "unprofitable"))
"""Reasons that are about profit at a size, not about what may be done."""


@dataclass(frozen=True)
class Violation:
    """A property that doesn't hold of a plan."""

    property: str
    detail: str


@dataclass
class Outcome:
    """What became of one plan."""

    state: str = "held"
    """``held``, ``violated``, ``not a program`` (jax refuses it), ``undefined``: the program as
    written breaks a promise of its own, so that nothing can be said of it; or ``decided by
    rounding``: the two differ, and so does the program as written from itself."""
    detail: str = ""
    violation: Violation | None = None
    report: Report | None = None


class _Broken(Exception):
    """A property doesn't hold."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(detail)
        self.violation = Violation(name, detail)


def passes_of(plan: Plan, names: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The passes that a plan runs, of those named or of all."""
    if plan.contract == "named":
        chosen = registry.all_passes()
    else:
        chosen = registry.select(None, Contract(plan.contract), ()).passes
    if names:
        chosen = tuple(p for p in registry.all_passes() if p.name in names)
    elif plan.some is not None:
        r = Random(plan.some)
        chosen = tuple(p for p in chosen if r.random() < 0.5)
    return tuple(map(_at_any_size, chosen)) if plan.eager else chosen


def _at_any_size(p: Pass) -> Pass:
    """A pass that doesn't mind sizes at which it wouldn't pay."""

    def profitable(match: Match) -> Reason | None:
        reason = p.profitable(match)
        return None if reason is None or reason.code in SIZES else reason

    return replace(p, profitable=profitable)


def check(plan: Plan, names: Sequence[str] = ()) -> Outcome:
    """Every property of one plan.

    Args:
      plan: the program.
      names: the passes to run; by default those that the plan says.
    """
    outcome = Outcome()
    with mesh_of(plan):
        try:
            _check(plan, passes_of(plan, names), outcome)
        except _Broken as broken:
            outcome.state, outcome.violation = "violated", broken.violation
    return outcome


def _check(plan: Plan, passes: Sequence[Pass], outcome: Outcome) -> None:
    fn = transformed(plan, function(plan), outside=False)
    args = values(plan, "exact").args
    given = given_to(plan, args)
    try:
        old = tracing.trace(fn, given, {}, [tracing.type_of(a) for a in given]).closed
    except Exception as error:
        outcome.state, outcome.detail = "not a program", _line(error)
        return
    new = _rewritten(old, passes, outcome)
    if new is old:
        return
    try:
        before = _around(plan, old, args)
    except Exception as error:
        outcome.state, outcome.detail = "not a program", _line(error)
        return
    try:
        after = _around(plan, new, args)
    except Exception as error:
        raise _Broken("transforms", _line(error)) from error
    _agree(plan, before, after, passes, outcome)


def given_to(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The arguments of what is optimized: one lane, where all is mapped outside of it."""
    mapped = plan.transform == "vmap outside"
    return [a[0] if mapped and i != 2 else a for i, a in enumerate(args)]


def _rewritten(old: Body, passes: Sequence[Pass], outcome: Outcome) -> Body:
    """The program rewritten, which keeps its types and effects and has nothing left to do."""
    try:
        done = rewrite(old, passes)
    except Exception as error:
        raise _Broken("rewrites", _line(error)) from error
    new, outcome.report = done.closed, done.report
    _same_interface(old, new)
    _bounded(done.report)
    if not done.report.applied:
        if new is not old:
            raise _Broken("no site, no change", "nothing was applied, and another jaxpr came out")
        return old
    try:
        check_closed(new)
    except Exception as error:
        raise _Broken("well-formed", _line(error)) from error
    again = rewrite(new, passes)
    if again.report.applied:
        site = again.report.applied[0]
        what = f"{site.pass_name} at {site.primitive} → {site.shape} in {site.scope or 'the top'}"
        raise _Broken("a second time changes nothing", f"it applies {what}")
    return new


def _bounded(report: Report) -> None:
    notes = [n for n in report.notes if not n.startswith("assume_range states")]
    if notes:
        raise _Broken("ends", "; ".join(notes))


def _same_interface(old: Body, new: Body) -> None:
    for what, atoms in (
        ("argument", jaxprs.invars),
        ("result", lambda b: jaxprs.opened(b).outvars),
    ):
        pairs = zip(atoms(old), atoms(new), strict=True)
        for i, (a, b) in enumerate(pairs):
            if a.aval != b.aval or str(a.aval) != str(b.aval):
                raise _Broken("types", f"{what} {i} is {b.aval}, wanted {a.aval}")
            if getattr(a.aval, "weak_type", None) != getattr(b.aval, "weak_type", None):
                raise _Broken("types", f"{what} {i} is weakly typed in one of the two only")
    effects = [sorted(map(str, jaxprs.opened(b).effects)) for b in (old, new)]
    if effects[0] != effects[1]:
        raise _Broken("effects", f"found {effects[1]}, wanted {effects[0]}")


def _around(plan: Plan, body: Body, args: Sequence[Any]) -> Body:
    """The program with what the plan does outside of `optimize`."""
    if not plan.transform.endswith("outside"):
        return body
    evaluated: Callable[..., Any] = lambda *args: _results(body, args)
    fn = transformed(plan, evaluated, outside=True)
    return tracing.trace(fn, args, {}, [tracing.type_of(a) for a in args]).closed


def _results(body: Body, args: Sequence[Any]) -> list[Any]:
    return tracing.evaluate(body, *args)


def contract_of(plan: Plan, passes: Sequence[Pass], report: Report) -> Contract:
    """The loosest contract of the passes that applied.

    A derivative taken of the rewritten program may add cotangents up in another order.
    """
    if plan.transform == "grad outside":
        return Contract.ROUNDING
    counts = report.counts()
    order = list(Contract)
    return max((p.contract for p in passes if p.name in counts), key=order.index)


def _agree(plan: Plan, before: Body, after: Body, passes: Sequence[Pass], outcome: Outcome) -> None:
    assert outcome.report is not None
    contract = contract_of(plan, passes, outcome.report)
    kinds = ("exact", "even") if contract is Contract.ROUNDING else ("exact", "hostile")
    for kind in kinds:
        args = values(plan, kind).args
        try:
            said = difference(before, after, args, contract)
        except Exception as error:
            _blame(before, args, error, outcome)
            continue
        if said is not None:
            rounding = contract is Contract.ROUNDING
            why = decided_by_rounding(before, args, kind == "exact") if rounding else None
            if why is not None:
                outcome.state, outcome.detail = BY_ROUNDING, f"{why}: {said}"
                continue
            applied = ", ".join(sorted(outcome.report.counts()))
            raise _Broken("contract", f"{contract.value}, {kind} values, after {applied}: {said}")


def _blame(before: Body, args: Sequence[Any], error: Exception, outcome: Outcome) -> None:
    """Whether the program as written breaks a promise or can't be evaluated, or only the other.

    A ragged product mapped twice, and a derivative of `jax.custom_vjp` evaluated inside of another
    loop, are programs that jax makes and doesn't run.
    """
    of_promises = isinstance(error, (BrokenPromise, DoesNotEnd))
    try:
        Evaluation().run(before, args)
    except (BrokenPromise, DoesNotEnd) as own:
        outcome.state, outcome.detail = "undefined", str(own)[:120]
    except Exception as own:
        if of_promises:
            raise
        outcome.state, outcome.detail = "not a program", _line(own)
    else:
        name, said = ("promises", str(error)) if of_promises else ("evaluates", _line(error))
        raise _Broken(name, said) from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def clear() -> None:
    """Empty jax's caches, which a fuzzer fills with programs that are never seen again."""
    jax.clear_caches()
