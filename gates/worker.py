"""The child's side of `child`: ``python -m relower.gates.worker PARENT``, a request on stdin."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..lowering.errors import InputError
from ..lowering.orphan import end_with_parent
from .pass_sets import told
from .recorder import Recorder

_RECORDER = Recorder()


def main() -> int:
    """Reads one request, does it, and writes the answer to the file that the request names."""
    end_with_parent(int(sys.argv[1]))
    request = json.load(sys.stdin)
    if request["revision"] is not None or request["record"]:
        _RECORDER.start()
    if request["revision"] is not None:
        from .origins import follow

        request["tree"] = follow(request["revision"])
    if request["sources"]:
        from .instead import load_instead

        load_instead(request["sources"])
    try:
        answer = {"value": _DO[request["do"]](request)}
    except InputError as error:
        cause = _of_passes(error)
        unmet = type(cause).__name__ == "PassNotApplicable"
        answer = {
            "error": _one_line(cause or error),
            "kind": "not-applicable" if unmet else "input",
        }
    except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        from ..lowering.load import describe

        answer = {"error": f"{request['spec']} ended: {describe(error)}", "kind": "input"}
    except BaseException as error:
        traceback.print_exc()
        name = request["spec"] or request["do"]
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{name}: {type(error).__name__}: {error} at {where.filename}:{where.lineno}"
        answer = {"error": _one_line(message), "kind": "crash"}
    path = Path(request["answer"])
    path.with_suffix(".part").write_text(json.dumps(answer))
    os.replace(path.with_suffix(".part"), path)
    return 0


def _lower(request: dict[str, Any]) -> Any:
    from ..lowering.artifact import save
    from ..lowering.lower import lower

    if request["history"]:
        from .history import trace_unrelated

        trace_unrelated(**_where(request))
    chosen = _case(request)
    if request["passes"] is not None:
        chosen = _with_passes(chosen, request)
    program = lower(
        chosen, levels=tuple(request["levels"]), **_where(request), **request["options"]
    )
    notes = _checked(request, program)
    if "tree" in request:
        from .origins import as_at

        program = as_at(request["tree"], program)
    root = request["revision"] and request["revision"]["root"]  # what is there, the commit says
    found = _RECORDER.found(root) if request["record"] else None
    save(program, request["output"])
    return {"expect": dict(chosen.expect), "notes": notes, "read": found}


def _checked(request: dict[str, Any], program: Any = None) -> list[str]:
    """Notes on what a revision doesn't have; an error where it has it and the work tree's came."""
    if "tree" not in request:
        return []
    from .origins import check

    return check(request["tree"], program, _RECORDER)


def _stage(request: dict[str, Any]) -> Any:
    from ..lowering.compile import stage_module
    from ..lowering.targets import DEFAULT_TARGET

    chosen = _case(request)
    if request["passes"] is not None:
        chosen = _with_passes(chosen, request)
    staged = stage_module(chosen, request["target"] or DEFAULT_TARGET)
    replace(staged, name=request["spec"]).save(request["output"])
    return None


def _explain(request: dict[str, Any]) -> Any:
    import jax

    from ..lowering.as_target import as_target
    from ..lowering.targets import DEFAULT_TARGET, make_mesh, mesh_context, parse_target
    from ..passes.optimize import explain
    from .untraced import traced

    chosen = _case(request)
    target = parse_target(request["target"] or DEFAULT_TARGET)
    route: Any = request["route"] or "abstract"
    mesh = make_mesh(target, chosen.mesh, "auto", route)
    devices = target.devices() if route == "abstract" else list(mesh.devices.flat)
    with as_target(devices):
        fn, args, kwargs = chosen.built(mesh)
        args, kwargs = jax.tree.map(_shape_of, (args, dict(kwargs)))
        with traced(request["spec"], chosen.mesh is not None), mesh_context(mesh):
            report = explain(
                fn,
                *args,
                **told(request),
                choose=_choice(request),
                lines=bool(request["options"].get("lines")),
                suggest=bool(request["options"].get("suggest")),
                **kwargs,
            )
    shown = report.to_json()
    if request["options"].get("suggest"):
        from ..lowering.siblings import siblings

        shown["cases"] = siblings(request["spec"])
    return {**shown, "notes": [*shown.get("notes", ()), *_checked(request)]}


def _choice(request: dict[str, Any]) -> Any:
    measure = request["options"].get("measure")
    if measure is None:
        return None
    from ..lowering.targets import DEFAULT_TARGET
    from ..passes.base import Measured

    # What a compilation puts down goes with the request's folder, also if this process is killed.
    tempfile.tempdir = str(Path(request["answer"]).parent)
    return Measured(target=request["target"] or DEFAULT_TARGET, **measure)


def _catalogue(request: dict[str, Any]) -> Any:
    from ..passes import registry
    from ..passes.plugins import PluginError, offered

    def source(fn: Callable[..., Any]) -> str:
        try:
            return inspect.getsource(fn).rstrip()
        except (OSError, TypeError):
            return ""

    found, faults = [(p, "relower") for p in registry.all_passes()], []
    for plugin in offered(p.name for p in registry.all_passes()):
        try:
            found.append((plugin.load(), plugin.origin))
        except PluginError as error:
            faults.append(str(error))
    listed = [
        {
            "name": p.name,
            "origin": origin,
            "contract": p.contract.value,
            "by_name": p.by_name,
            "summary": p.summary,
            "requirements": [{"code": r.code, "sentence": r.sentence} for r in p.requirements],
            "before": source(p.before),
            "after": source(p.after),
        }
        for p, origin in found
    ]
    return {"passes": listed, "faults": faults}


def _selftest(request: dict[str, Any]) -> Any:
    from .selftest.work import do

    return do(request)


def _verify(request: dict[str, Any]) -> Any:
    from .verify.work import do

    found = do(request)
    return {**found, "notes": [*found["notes"], *_checked(request)]}


def _foreign(request: dict[str, Any]) -> Any:
    from ..lowering.artifact import save
    from ..lowering.foreign import foreign_program, limit

    path = Path(request["spec"])
    limit(path.stat().st_size)
    save(foreign_program(path), request["output"])
    return None


def _numerics(request: dict[str, Any]) -> Any:
    """The case of the request is the reference; ``options`` holds the candidate's own request."""
    from .numerics.work import applied, compare, contract_of

    options = dict(request["options"])
    theirs = {**request, **options.pop("candidate")}
    reference, candidate = _case(request), _case(theirs)
    contract = options["contract"] or contract_of(theirs["passes"], theirs["contract"])
    plain = candidate
    if request["passes"] is not None:
        reference = _with_passes(reference, request)
    if theirs["passes"] is not None:
        candidate = _with_passes(candidate, theirs)
    names = {"reference": request["spec"], "candidate": theirs["spec"], "contract": contract}
    found = compare(reference, candidate, {**options, **names})
    if theirs["passes"] is not None:
        found["sites"] = applied(plain, theirs["spec"], told(theirs))
    return found


def _bisect(request: dict[str, Any]) -> Any:
    from .bisect_work import work

    return work(_case(request), request)


_DO: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lower": _lower,
    "explain": _explain,
    "catalogue": _catalogue,
    "stage": _stage,
    "selftest": _selftest,
    "verify": _verify,
    "foreign": _foreign,
    "numerics": _numerics,
    "bisect": _bisect,
}


def _case(request: dict[str, Any]) -> Any:
    from ..lowering.load import load_case

    chosen = load_case(request["spec"], args=request["args"])
    if request["mesh"] is not None:
        if chosen.mesh is not None:
            raise InputError(f"{request['spec']} has a mesh of its own; leave --mesh out")
        chosen = replace(chosen, mesh=request["mesh"])
    return chosen


def _with_passes(chosen: Any, request: dict[str, Any]) -> Any:
    from ..passes.optimize import optimize
    from ..passes.registry import DEFAULT, by_name

    which = told(request)
    names = which["passes"]
    if request["quiet"]:
        quietly = _quietly(names or ())
        off = (*quietly["disable"], *which["disable"])
        which |= {**quietly, "passes": None, "disable": off}

    def wrapped(fn: Any) -> Any:
        return optimize(fn, **which)

    try:
        for name in names or ():
            if name != DEFAULT:
                by_name(name)
        if chosen.build is None:
            return replace(chosen, fn=wrapped(chosen.fn))
    except ValueError as error:
        raise InputError(str(error)) from error

    def build(mesh: Any) -> Any:
        fn, args, kwargs = chosen.built(mesh)
        return wrapped(fn), args, kwargs

    build.__name__ = chosen.name
    return replace(chosen, build=build)


def _quietly(names: Sequence[str]) -> dict[str, Any]:
    """How to run passes by name without an error where they apply nowhere.

    Raises:
        InputError: one is unknown, or runs only where it is asked for by name.
    """
    from ..passes.registry import all_passes

    every = {p.name: p for p in all_passes()}
    for name in names:
        if name not in every:
            raise InputError(f"no pass called {name!r}; wanted names of passes beside quiet")
        if every[name].by_name:
            raise InputError(f"{name} runs only where it is asked for by name: leave quiet out")
    return {"contract": "rounding", "disable": sorted(set(every) - set(names))}


def _where(request: dict[str, Any]) -> dict[str, Any]:
    return {name: request[name] for name in ("target", "route") if request[name] is not None}


def _shape_of(leaf: Any) -> Any:
    import jax

    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.aval.weak_type)


def _of_passes(error: BaseException | None) -> BaseException | None:
    """What an error came from, where that says all: it is about the passes, not the program.

    A `PassNotApplicable`, which names every unmet requirement, or what is wrong with an option.
    """
    from .untraced import is_of_options

    seen: set[int] = set()  # a program can raise an error from what that was raised from
    while error is not None and id(error) not in seen:
        if type(error).__name__ == "PassNotApplicable" or is_of_options(error):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _one_line(message: object) -> str:
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    return "; ".join(lines).replace(":; ", ": ")


if __name__ == "__main__":
    sys.exit(main())
