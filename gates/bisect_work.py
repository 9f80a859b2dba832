"""The child's side of ``relower bisect``: the check that is asked for, and the search."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..lowering.case import Case
from ..lowering.errors import InputError
from ..lowering.load import load_module
from .bisect import Check, bisect
from .numerics.judge import Rule, first_and_worst, judge
from .numerics.runs import Program, arrays_of, replicates, run
from .pass_sets import told
from .untraced import traced

BUILT_IN = ("bits", "numerics")


def work(case: Case, request: dict[str, Any]) -> dict[str, Any]:
    """Bisects a case; ``options`` of the request holds ``check`` and ``most``.

    Raises:
        InputError: there is no such check, or the case can't be run for it.
    """
    from ..lowering.targets import mesh_context
    from .numerics.runs import nothing

    options = request["options"]
    base = arrays_of(case, request["spec"])
    check = _check(options["check"], base, request["spec"])
    log = options.get("log")

    def note(checks: int, left: int) -> None:
        if log is not None:
            Path(log).write_text(f"{checks} {left}")

    mesh = mesh_context(base.mesh) if base.mesh is not None else nothing()
    with traced(request["spec"], base.mesh is not None), mesh:
        found = bisect(base.fn, check, *base.args, most=options["most"], progress=note,
                       options=told(request), **base.kwargs)  # fmt: skip
    return found.to_json()


def _check(name: str, base: Program, spec: str) -> Check:
    if name == "bits":
        return _bits(base)
    if name == "numerics":
        return _numerics(base, spec)
    path, colon, function = name.rpartition(":")
    if not colon or not path:
        raise InputError(
            f"--check {name!r}: wanted FILE.py:FUNCTION, or one of {', '.join(BUILT_IN)}"
        )
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    found = getattr(load_module(Path(path)), function, None)
    if not callable(found):
        raise InputError(f"{path}: no function {function!r}")
    return _of_user(found, base)


def _of_user(function: Callable[..., Any], base: Program) -> Check:
    """Called with the optimized function; with its arguments too where it takes two.

    Raises:
        InputError: it takes neither.
    """
    try:
        known, parameters = True, list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        known, parameters = False, []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p for p in parameters if p.kind in positional]
    wanted = [p for p in taken if p.default is p.empty]
    more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if known and (len(wanted) > 2 or named or not (taken or more)):
        name = getattr(function, "__name__", "the function")
        raise InputError(
            f"--check: {name}{inspect.signature(function)} takes other arguments than it gets; "
            "wanted one, the optimized function, or two, with the tuple of its arguments"
        )
    if len(wanted) < 2:
        return lambda made: function(made)
    return lambda made: function(made, base.args)


def _bits(base: Program) -> Check:
    import jax
    import numpy as np

    from .numerics.runs import copied

    def run_once(fn: Callable[..., Any]) -> list[Any]:
        out = jax.jit(fn)(*copied(base.args), **copied(dict(base.kwargs)))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(out)]

    wanted = run_once(base.fn)

    def check(made: Callable[..., Any]) -> None:
        for index, (a, b) in enumerate(zip(wanted, run_once(made), strict=True)):
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                raise AssertionError(f"output {index}, {a.dtype}{list(a.shape)}, differs in bits")

    return check


def _numerics(base: Program, spec: str) -> Check:
    if base.numerics is None:
        raise InputError(f"{spec}: --check numerics needs numerics=relower.Numerics(...)")
    steps = 1 if base.numerics.advance is None else 2
    reference = run(base, steps)
    near = replicates(base, steps, 3)

    def check(made: Callable[..., Any]) -> None:
        found = judge(reference, near, run(base, steps, made), Rule("rounding"))
        wrong = [c for c in found if c.status == "broken"]
        if wrong:
            worst = first_and_worst(wrong)[0]
            raise AssertionError(f"{worst.of} {worst.figure} {worst.found:.2g} at step {worst.step}"
                                 f", wanted at most {worst.limit:.2g}")  # fmt: skip

    return check
