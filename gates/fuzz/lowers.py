"""Whether the optimized program lowers for a TPU, by the public way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...lowering.case import Case, case
from ...lowering.lower import lower
from ...passes import registry
from ...passes.base import Contract
from ...passes.optimize import optimize
from .check import Violation, given_to
from .plan import Plan
from .program import function, transformed, values


def lowers(plan: Plan, names: Sequence[str] = ()) -> Violation | None:
    """Lower the program as it is and optimized; what fails, or differs without a site.

    Passes that run by name stay out, as they must find a site; so do those that a plan leaves out.
    """
    fn, args = function(plan), values(plan, "exact").args
    contract = "rounding" if plan.contract == "named" else plan.contract
    if names:
        admitted = {p.name for p in registry.select(None, Contract.ROUNDING, ())}
        off, contract = sorted(admitted - set(names)), "rounding"
    else:
        off = []
    whole = transformed(plan, fn, outside=False)
    better = optimize(whole, contract=contract, disable=off)
    try:
        plain = lower(_case(plan, transformed(plan, whole, outside=True), args))
    except Exception:  # jax can't lower the program as it is: nothing to compare with
        return None
    try:
        done = lower(_case(plan, transformed(plan, better, outside=True), args))
    except Exception as error:
        text = " ".join(str(error).split())
        return Violation("lowers", f"{type(error).__name__}: {text[:300]}")
    return _unchanged(plan, better, args, plain, done)


def _unchanged(
    plan: Plan, better: Any, args: Sequence[Any], plain: Any, done: Any
) -> Violation | None:
    """Where no pass applied, the very same program comes out."""
    from ...passes.optimize import explain

    contract = "rounding" if plan.contract == "named" else plan.contract
    if plan.mesh is not None or plan.transform == "grad outside":
        # Which sites there are depends on the target's mesh; and the derivative of a function that
        # was traced first is that of a jitted one, as jax itself places it.
        return None
    whole = transformed(plan, function(plan), outside=False)
    if explain(whole, *given_to(plan, args), contract=contract).applied:
        return None
    if plain.forms["exact"].digest != done.forms["exact"].digest:
        return Violation("lowers unchanged", "nothing applied, and the lowered program differs")
    return None


def _case(plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> Case:
    if plan.mesh is None:
        return case(fn, *args)
    n = plan.mesh[1]
    return case(lambda mesh: (fn, tuple(args)), mesh={"d": n, "m": 2 if n <= 4 else 1})
