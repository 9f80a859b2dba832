"""The child's side of ``relower verify``: one request, done in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...lowering.case import Case
from ...lowering.errors import InputError
from ...lowering.load import load_case
from ...lowering.targets import DEFAULT_TARGET
from ..pass_sets import told
from ..untraced import traced
from .api import verify, verify_examples
from .check import Limits


def do(request: Mapping[str, Any]) -> dict[str, Any]:
    """Verifies what a request names; what was found, as plain JSON.

    Raises:
        InputError: the case can't be loaded or traced.
    """
    options = request["options"]
    if not request["spec"]:
        return verify_examples(
            options["only"] or None,
            mutants=options["mutants"],
            limits=_limits(options),
            progress=_telling(options.get("progress")),
        ).to_json()
    chosen = load_case(request["spec"], args=request["args"])
    if request["mesh"] is not None:
        if chosen.mesh is not None:
            raise InputError(f"{request['spec']} has a mesh of its own; leave --mesh out")
        chosen = replace(chosen, mesh=request["mesh"])
    return _verified(chosen, request, options)


def _verified(
    chosen: Case, request: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    with traced(request["spec"], chosen.mesh is not None):
        found = verify(
            chosen,
            **told(request),
            only=options["only"] or None,
            target=request["target"] or DEFAULT_TARGET,
            facts=options["facts"],
            mutants=options["mutants"],
            limits=_limits(options),
            progress=_telling(options.get("progress")),
            repro=options["repro"],
            again=options["again"],
        )
    return found.to_json()


def _limits(options: Mapping[str, Any]) -> Limits:
    return Limits(options["seconds"], options["bytes"], seeds=options["seeds"])


def _telling(path: str | None) -> Any:
    """Writes how far the work is where the parent looks for it."""
    if path is None:
        return None
    place = Path(path)

    def tell(done: int, total: int, name: str) -> None:
        place.write_text(f"{done} {total} {name}")

    return tell
