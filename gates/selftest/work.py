"""The child's side: one part of the test, in a process that loads jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...lowering.scratch import scratch


def do(request: dict[str, Any]) -> Any:
    """Does the part that ``request["options"]`` names; plain JSON values."""
    options = request["options"]
    return _PARTS[options["part"]](request, options)


def _module(request: dict[str, Any], options: dict[str, Any]) -> Any:
    from ...lowering.load import load_case
    from ...lowering.targets import DEFAULT_TARGET
    from .judge import judged, staged

    chosen = load_case(request["spec"], args=request["args"])
    given = staged(chosen, request["target"] or DEFAULT_TARGET)
    return [row.to_json() for row in judged(given, options["sites"], options["program"])]


def _source(request: dict[str, Any], options: dict[str, Any]) -> Any:
    from .sources import HOISTED, MUTANTS, judged

    mutants = (HOISTED,) if options["part"] == "hoisted" else MUTANTS
    with scratch() as folder:
        return [
            row.to_json()
            for program in options["programs"]
            for row in judged(program, Path(folder), mutants)
        ]


def _lower(request: dict[str, Any], options: dict[str, Any]) -> Any:
    import jax

    from ...lowering.artifact import save
    from ...lowering.load import load_case
    from ...lowering.lower import lower
    from ..history import trace_unrelated

    if request["history"]:
        trace_unrelated()
    for program in options["programs"]:
        found = lower(load_case(f"{request['spec']}:{program}"))
        save(found, Path(options["folder"], f"{program}.program"))
    return {"jax": jax.__file__}


_PARTS = {"module": _module, "source": _source, "hoisted": _source, "lower": _lower}
