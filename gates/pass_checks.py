"""What every pass must show on its own examples, for the tests of whoever writes one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..lowering.case import Case, case
from ..lowering.change import Verdict
from ..lowering.diff import diff
from ..lowering.load import describe
from ..lowering.lower import lower
from ..lowering.program import Program
from ..passes.base import Example, Pass
from ..passes.guarded import PassFault, failed
from ..passes.optimize import explain, optimize
from ..passes.plugins import fault_of
from ..passes.registry import DEFAULT, all_passes, by_name
from .reason_codes import noting, written_faults
from .verify.api import verify
from .verify.verdict import Verdict as Evidence


def check_pass(rewrite: Pass | str) -> None:
    """Asserts of a pass what relower asserts of its own, on the examples that it comes with.

    - it is whole: a name, a contract, texts, requirements with codes of their own, which their
      reasons have too, examples;
    - none of its functions fails or returns what it may not (`relower.passes.guarded`);
    - ``before`` has a site, and lowers with it rewritten to what ``after`` lowers to (level
      ``inlined``), which is another program than ``before``;
    - ``after`` has none;
    - `relower.verify` finds its contract kept at every site, forward and backward;
    - beside the passes that run by default it comes to an end: a second `relower.optimize` finds
      nothing more to do.

    Args:
      rewrite: a `Pass`, or the name of one.

    Raises:
      AssertionError: names every check that failed, and on which example.
    """
    p = by_name(rewrite) if isinstance(rewrite, str) else rewrite
    faults = list(_whole(p))
    if not faults:
        noted = p if p in all_passes() else noting(p, faults)
        for example in p.examples():
            name = example.label or "an example"
            try:
                faults += [f"{name}: {fault}" for fault in _on(noted, example)]
            except PassFault as fault:
                faults.append(f"{name}: {fault}")
    if faults:
        raise AssertionError(f"{p.name}:\n" + "\n".join(f"  {fault}" for fault in faults))


def _whole(p: Pass) -> Iterator[str]:
    fault = fault_of(p)
    if fault is not None:
        yield f"it is {fault}"
        return
    for field in ("summary", "measure"):
        if not getattr(p, field):
            yield f"its {field} is empty; wanted a few words"
    codes = [r.code for r in p.requirements]
    for code in {c for c in codes if codes.count(c) > 1}:
        yield f"two requirements have the code {code!r}; wanted one for each"
    for requirement in p.requirements:
        if not requirement.sentence.endswith("."):
            yield f"the requirement {requirement.code!r} reads {requirement.sentence!r}; wanted a "\
                  "sentence with a full stop"  # fmt: skip
    yield from written_faults(p)
    try:
        examples: Any = tuple(p.examples())
    except Exception as error:
        yield str(failed(p.name, "examples", p.examples, error))
        return
    if not examples:
        yield "it has no examples; wanted one `Example` or more to run `before` on"
    for example in examples:
        if not isinstance(example, Example):
            yield f"an example is {example!r}; wanted a relower.passes.Example"


def _on(p: Pass, example: Example) -> Iterator[str]:
    with mesh_of(example):
        try:
            report = explain(p.before, *example.args, passes=[p])
            left = explain(p.after, *example.args, passes=[p]).applied
        except PassFault:
            raise
        except Exception as error:
            yield _untraced(p, example, error)
            return
        if not report.applied:
            why = "; ".join(str(r) for s in report.declined for r in s.reasons)
            yield f"no site is found in `before`{': ' + why if why else ''}"
            return
        if left:
            yield f"`after` still has a site: {left[0].primitive} → {left[0].shape}"
        both: list[str | Pass] = [DEFAULT, p]
        again = explain(optimize(p.before, passes=both), *example.args, passes=both).applied
        if again:
            yield f"a second optimize still rewrites: {again[0].pass_name} at {again[0].primitive}"
    yield from _identity(p, example)
    yield from _evidence(p, example)


def _untraced(p: Pass, example: Example, error: Exception) -> str:
    """What is wrong: `before`, `after`, or what the pass makes of the first."""
    for name, fn in (("before", p.before), ("after", p.after)):
        try:
            jax.make_jaxpr(fn)(*example.args)
        except Exception as found:
            return f"`{name}` can't be traced: {failed(p.name, name, fn, found)}"
    return f"`before` can't be rewritten: {describe(error)}"


def _identity(p: Pass, example: Example) -> Iterator[str]:
    def lowered(fn: Callable[..., Any]) -> Program:
        return lower(_case(fn, example), levels=("inlined",))

    before, after = lowered(p.before), lowered(p.after)
    got = lowered(optimize(p.before, passes=[p]))
    found = diff(got, after, level="inlined")
    if found.verdict is not Verdict.IDENTICAL:
        yield f"`before` rewritten is {found.verdict.name} from `after`, where it should be " \
              f"IDENTICAL:\n{_indented(str(found))}"  # fmt: skip
    if diff(before, after, level="inlined").verdict is Verdict.IDENTICAL:
        yield "`before` and `after` lower to the same program: the rewrite does nothing"


def _evidence(p: Pass, example: Example) -> Iterator[str]:
    for site in verify(_case(p.before, example), passes=[p]).sites:
        if site.checked.verdict is not Evidence.VERIFIED:
            yield f"its contract, {p.contract.value}, isn't shown to hold: " \
                  f"{site.checked.verdict.name}: {site.checked.reason}"  # fmt: skip


def _case(fn: Callable[..., Any], example: Example) -> Case:
    if not example.mesh:
        return case(fn, *example.args)
    return case(lambda mesh: (fn, example.args), mesh=dict(example.mesh))


def mesh_of(example: Example) -> contextlib.AbstractContextManager[Any]:
    """The mesh that an example is traced under; no device is needed."""
    if not example.mesh:
        return contextlib.nullcontext()
    names, sizes = tuple(example.mesh), tuple(example.mesh.values())
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)
    found: contextlib.AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(mesh)
    return found


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines()[:20])
