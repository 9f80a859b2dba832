"""The child's side of a cell of kind ``numerics``: run everything, judge, and say it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lowering.case import Case
from ...lowering.errors import InputError
from ...passes.optimize import explain
from ...passes.registry import by_name
from .judge import Check, Rule, first_and_worst, judge, zeros
from .runs import Program, program, replicates, run, same_bits


def compare(reference: Case, candidate: Case, options: dict[str, Any]) -> dict[str, Any]:
    """What a candidate's steps are beside the reference's.

    Args:
        reference: the case to agree with.
        candidate: the case to judge, its passes applied already.
        options: ``steps``, ``replicates``, ``factor``, ``contract``, and the names of both sides.

    Raises:
        InputError: one of them can't be run, or says nothing of its outputs.
    """
    steps, count = options["steps"], options["replicates"]
    base = program(reference, options["reference"])
    other = program(candidate, options["candidate"])
    rule = Rule(options["contract"], options["factor"])
    ref = run(base, steps)
    again = run(base, steps)
    # The reference's own arguments: what makes those of two cases may differ in what it draws.
    cand = run(other, steps, args=_arguments(base, other))
    reps = replicates(base, steps, count) if rule.contract == "rounding" else []
    checks = judge(ref, reps, cand, rule)
    zero = zeros(ref, cand)
    unclear = _unclear(base, rule, ref, again, reps, zero)
    return {
        "contract": rule.contract,
        "steps": steps,
        "replicate": _how(base) if reps else None,
        "replicates": len(reps),
        "checks": [check.to_json() for check in first_and_worst(checks)],
        "zero": zero,
        "waived": [name for name, where in base.numerics.metrics.items() if where is None
                   and name != "grad_norm"] + (["params"] if base.numerics.params is None else []),
        "unclear": unclear,
        "worst": _worst(checks),
        "equal": same_bits(ref, cand),
    }  # fmt: skip


def _arguments(base: Program, other: Program) -> tuple[Any, ...]:
    import jax

    mine, theirs = jax.tree.structure(base.args), jax.tree.structure(other.args)
    if mine != theirs:
        raise InputError("the reference and the candidate take different arguments: "
                         f"{mine} and {theirs}")  # fmt: skip
    return base.args


def _how(base: Program) -> str:
    how = base.numerics.replicate
    return how if isinstance(how, str) else getattr(how, "__name__", "the case's own")


def _unclear(
    base: Program, rule: Rule, ref: Any, again: Any, reps: Sequence[Any], zero: Sequence[str]
) -> list[str]:
    found: list[str] = []
    if not same_bits(ref, again):
        found.append("the reference isn't deterministic: two runs of it gave different bits")
    if len(zero) == len(ref[0].grads):
        found.append("every gradient is zero: nothing was compared")
    if reps and all(same_bits(ref, rep) for rep in reps):
        found.append("the replicate is bit for bit the reference: it says nothing of the spread")
    return found


def _worst(checks: Sequence[Check]) -> dict[str, Any] | None:
    """The leaf that takes up most of a limit; None where every leaf has the same bits.

    Of those that are broken, one of the earliest step: the others may follow from it.
    """
    leaves = [c for c in checks if c.of.startswith(("grads", "params")) and c.ratio > 0]
    broken = first_and_worst(c for c in leaves if c.status == "broken")
    worst = broken[0] if broken else max(leaves, key=lambda c: c.ratio, default=None)
    return None if worst is None else worst.to_json()


def contract_of(passes: Any, admitted: str) -> str:
    """The loosest contract of the passes that run; of no pass, that of a program by itself."""
    if passes is None:
        return "rounding"
    order = ["bitwise", "value", "rounding"]
    names = [p for p in ([] if passes == "default" else passes) if p != "default"]
    found = [by_name(n).contract.value for n in names]
    if passes == "default" or "default" in passes:
        found.append(admitted)
    return max(found, key=order.index, default="bitwise")


def applied(case: Case, spec: str, options: dict[str, Any]) -> int:
    """How many sites the passes rewrite in the program as it is run here."""
    from ...lowering.targets import mesh_context

    base = program(case, spec)
    context = mesh_context(base.mesh) if base.mesh is not None else None
    if context is None:
        return len(explain(base.fn, *base.args, **options, **base.kwargs).applied)
    with context:
        return len(explain(base.fn, *base.args, **options, **base.kwargs).applied)
