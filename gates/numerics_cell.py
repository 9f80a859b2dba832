"""Cells of kind ``numerics``: what they ask for, and what they make of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lowering.errors import InputError
from ..lowering.words import plural
from . import values
from .child import ChildFailed, Job, run
from .revision import split_revision

if TYPE_CHECKING:
    from .cells import Node

KEYS = ("steps", "replicates", "factor", "contract")
CONTRACTS = ("bitwise", "value", "rounding")
DEVICES = "--xla_force_host_platform_device_count=8"
LINES_SHOWN = 6


@dataclass(frozen=True)
class Steps:
    """How a numerics cell compares."""

    steps: int = 2
    replicates: int = 3
    factor: float = 3.0
    contract: str | None = None
    """``bitwise``, ``value`` or ``rounding``; None is the loosest of the passes that run."""
    caught_by: tuple[str, ...] = ()
    """Of a control: figures that must be broken, as in ``loss`` or ``grads/wi l2``, at the first
    step at which anything is."""


def steps_of(entry: Mapping[str, Any], where: str) -> Steps:
    """Reads the keys of a cell that say how it compares.

    Raises:
        InputError: a value of another kind.
    """
    found = Steps()
    for key in ("steps", "replicates"):
        if key in entry:
            if not values.is_count(entry[key]) or entry[key] < 1:
                raise InputError(f"{where} {key}: {entry[key]!r}; wanted a number of at least 1")
            found = replace(found, **{key: entry[key]})
    if "factor" in entry:
        factor = entry["factor"]
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 1:
            raise InputError(f"{where} factor: {factor!r}; wanted a number of at least 1")
        found = replace(found, factor=float(factor))
    if "contract" in entry:
        if entry["contract"] not in CONTRACTS:
            raise InputError(
                f"{where} contract: {entry['contract']!r}; wanted one of {', '.join(CONTRACTS)}"
            )
        found = replace(found, contract=entry["contract"])
    caught = values.names(entry.get("caught-by", []), f"{where} caught-by", strict=False)
    return replace(found, caught_by=caught)


def answer(
    reference: Node, candidate: Node, how: Steps, folder: Path, timeout: float
) -> dict[str, Any] | ChildFailed:
    """What the child found, or why it found nothing."""
    for node in (reference, candidate):
        if split_revision(node.spec)[1] is not None:
            return ChildFailed(f"{node.spec}: a numerics cell runs the files of the work tree "
                               "only; leave @REV out", "input")  # fmt: skip
    mine, theirs = (_request(node) for node in (reference, candidate))
    asked = {k: v for k, v in asdict(how).items() if k != "caught_by"}
    job = Job("numerics", **mine, options={**asked, "candidate": theirs})
    try:
        return run(job, timeout=timeout, cwd=folder, variables=variables())  # type: ignore[no-any-return]
    except ChildFailed as error:
        return error


def _request(node: Node) -> dict[str, Any]:
    mesh = None if node.mesh is None else dict(node.mesh)
    return {"spec": node.spec, "args": node.args, "mesh": mesh, **asdict(node.choice)}


def variables() -> dict[str, str]:
    """The environment of a child that runs programs: eight devices, unless one has said."""
    import os

    given = os.environ.get("XLA_FLAGS", "")
    has = "xla_force_host_platform_device_count" in given
    return {} if has else {"XLA_FLAGS": f"{given} {DEVICES}".strip()}


def verdict(
    found: Mapping[str, Any], how: Steps, control: bool
) -> tuple[list[str], list[str], list[str]]:
    """What is broken, what is undecided, and notes, a line each."""
    checks = found["checks"]
    wrong = [c for c in checks if c["status"] == "broken"]
    unclear = [f"undecided: {text}" for text in found["unclear"]]
    unclear += _shown([c for c in checks if c["status"] == "undecided"], "undecided")
    if found.get("sites") == 0:
        unclear.append("undecided: no pass applies, so the candidate is the reference")
    notes = _notes(found, checks)
    if not control:
        return _shown(wrong, "broken"), unclear, notes
    if not wrong:
        return ["must be caught, and agrees: the control shows nothing"], [], notes
    missed = [text for name in how.caught_by if (text := _missed(name, wrong)) is not None]
    return missed, [], [*_shown(wrong, "caught"), *notes]


def _missed(name: str, wrong: list[Any]) -> str | None:
    """How a control isn't caught by the figure that must catch it; None where it is.

    What breaks at a later step than another may only follow from it.
    """
    steps = [c["step"] for c in wrong if name in (c["of"], f"{c['of']} {c['figure']}")]
    if not steps:
        return f"must be caught by {name}, which holds"
    first = min(wrong, key=lambda c: int(c["step"]))
    if min(steps) > first["step"]:
        return (f"must be caught by {name}, which breaks at step {min(steps)} only, behind "
                f"{first['of']} {first['figure']} at step {first['step']}")  # fmt: skip
    return None


def _notes(found: Mapping[str, Any], checks: list[Any]) -> list[str]:
    leaves = sum(c["of"].startswith("grads") for c in checks if c["figure"] in
                 ("bits", "value", "exact", "l2", "shape", "finite"))  # fmt: skip
    how = f"{found['contract']}, {plural(found['steps'], 'step')}, "
    how += plural(leaves, "gradient leaf", "gradient leaves")
    if found["replicate"]:
        how += f", {plural(found['replicates'], 'replicate')} ({found['replicate']})"
    notes = [how]
    worst = found["worst"]
    if worst is not None:
        notes.append("worst leaf: " + _line(worst))
    if found["zero"]:
        names = ", ".join(found["zero"][:LINES_SHOWN])
        notes.append(f"zero in both, so that nothing was compared: {names}")
    if found["waived"]:
        notes.append(f"the case has no {', '.join(found['waived'])}")
    return notes


def _shown(checks: list[Any], what: str) -> list[str]:
    lines = [f"{what}: {_line(c)}" for c in checks[:LINES_SHOWN]]
    if len(checks) > LINES_SHOWN:
        lines.append(f"and {len(checks) - LINES_SHOWN} more checks; --json has all")
    return lines


def _line(check: Mapping[str, Any]) -> str:
    """As in ``grads/wi l2 1.4 at step 1, wanted at most 1.2e-06 (spread 4e-07)``."""
    head = f"{check['of']} {check['figure']}"
    if check["spread"] is None:
        return f"{head} at step {check['step']}: {check['said'] or 'the same'}"
    text = (f"{head} {_number(check['found'])} at step {check['step']}, wanted at most "
            f"{_number(check['limit'])} (spread {_number(check['spread'])})")  # fmt: skip
    return f"{text}: {check['said']}" if check["said"] else text


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"
