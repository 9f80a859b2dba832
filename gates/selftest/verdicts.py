"""What a comparison must say of a mutant and of a variation; nothing here needs jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...lowering.change import Difference, Verdict
from ...lowering.diff import diff
from ...lowering.program import LEVELS, Level, Program
from .score import Row


def fault_of(base: Program, other: Program, seen_in: str, levels: Sequence[Level] = LEVELS) -> str:
    """What the comparison got wrong about a mutant; empty if nothing.

    It must be DIFFERENT at ``levels``, with a report that names ``seen_in``, and IDENTICAL at the
    other levels.
    """
    for level in LEVELS:
        found = diff(base, other, level)
        wanted = Verdict.DIFFERENT if level in levels else Verdict.IDENTICAL
        if found.verdict is not wanted:
            reasons = "; ".join(found.reasons)[:300]
            text = f"{found.verdict.name} at {level}, wanted {wanted.name}"
            return f"{text} ({reasons})" if reasons else text
        if wanted is Verdict.DIFFERENT and not names_it(found, seen_in):
            return f"DIFFERENT at {level}, but the report doesn't name {seen_in}"
    return ""


def names_it(found: Difference, what: str) -> bool:
    """Whether a report shows a difference, and says where it was made."""
    changes = [change for group in found.groups for change in group.changes]
    if what == "program":
        return bool(changes)
    if what == "kernel":
        return any(change.section_kind == "kernel" for change in changes)
    return any(what in text for change in changes for text in (change.op, change.a, change.b))


def compared(row: Row, base: Program, other: Program) -> Row:
    """``row`` as matched or not: a variation must be IDENTICAL at every level."""
    for level in LEVELS:
        found = diff(base, other, level)
        if found.verdict is not Verdict.IDENTICAL:
            return replace(row, state="not matched", reason=f"{found.verdict.name} at {level}")
    return row
