"""Compare two programs: a verdict, and where they differ.

IDENTICAL means: after the noise rules in the ledgers, the two are the same text, functions and
kernels alike, and nothing in either is of a kind that no rule knows. It rests on the texts
themselves; digests only make it quick to see that they differ.

UNKNOWN means that neither may be said:

- the stamps differ (another jax, another target …) in a field that wasn't allowed by name;
- a program doesn't hold the level asked for, or a kernel that it refers to;
- the texts are equal, but a program holds a construct that no rule of the normal form knows (two
  host callbacks look alike, for instance);
- the texts differ, but only at such constructs or on a source line with one: the difference may
  be noise, and a negative control must not be satisfied by noise.

DIFFERENT means: the texts differ in at least one place that the normal form understands. The tree
explains where; if it finds nothing, the difference says so and stays.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

from ..compat.collector import full_collections_postponed
from . import origin
from .attribute_diff import shortened
from .change import Change, Difference, Verdict
from .comparison import Comparison
from .errors import InputError
from .program import LEVELS, Level, Program, Unknown, apart
from .sections import Sections


@full_collections_postponed()
def diff(a: Program, b: Program, level: Level = "exact", allow: Sequence[str] = ()) -> Difference:
    """Compares two programs at one level.

    Args:
        a: the first program, often the one before a change.
        b: the second.
        level: ``exact``, ``inlined`` or ``dataflow``.
        allow: fields of the stamp that may differ.

    Raises:
        InputError: ``level`` is none of the three, or ``allow`` names a field that no stamp has.
    """
    _checked(a, b, level, allow)
    a, b, uncalled = origin.alike_called(a, b)
    missing = [f"{x} has no form at level {level}" for x, p in _sides(a, b) if level not in p.forms]
    if missing:
        return Difference(Verdict.UNKNOWN, level, ("", ""), tuple(missing))
    digests = (a.forms[level].digest, b.forms[level].digest)
    unknowns = tuple((side, u) for side, p in _sides(a, b) for u in p.unknowns)
    fields = _mismatches(a, b)
    refused = [text for name, text in fields.items() if name not in allow]
    base = Difference(
        Verdict.UNKNOWN,
        level,
        digests,
        unknowns=unknowns,
        allowed=tuple(name for name in fields if name in allow),
    )
    if refused:
        return replace(base, reasons=tuple(refused))
    base = replace(base, notes=uncalled + origin.opaque_calls(a, b, level))
    shared: dict[str, str] = {}
    sections = (Sections(a, a.forms[level], shared), Sections(b, b.forms[level], shared))
    absent = _absent_kernels(sections)
    if absent:
        return replace(base, reasons=tuple(absent))
    if _same_text(*sections):
        if unknowns:
            return replace(base, reasons=tuple(_unknown_text(side, u) for side, u in unknowns))
        if digests[0] != digests[1]:
            return replace(base, reasons=("the texts are equal but the digests stated differ",))
        return replace(base, verdict=Verdict.IDENTICAL)
    return _explained(base, sections)


def _sides(a: Program, b: Program) -> tuple[tuple[Literal["a", "b"], Program], ...]:
    return (("a", a), ("b", b))


def _checked(a: Program, b: Program, level: str, allow: Sequence[str]) -> None:
    if level not in LEVELS:
        raise InputError(f"level {level!r}: wanted one of {', '.join(LEVELS)}")
    known = sorted({*a.stamp.fields, *b.stamp.fields})
    for name in allow:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(known)}"
            raise InputError(f"allow {name!r}: the stamps have no such field; {hint}")


def _mismatches(a: Program, b: Program) -> dict[str, str]:
    unstated = origin.unstated(a, b)
    if unstated:
        return {"origin": unstated}
    left, right = a.stamp.fields, b.stamp.fields
    found = {}
    for name in sorted({*left, *right}):
        if left.get(name) != right.get(name):
            x, y = apart(left.get(name, "absent"), right.get(name, "absent"))
            found[name] = f"stamp: {name} is {x} in a and {y} in b"
    return found


def _absent_kernels(sections: tuple[Sections, Sections]) -> list[str]:
    return [
        f"{side} refers to {name}, whose body it doesn't hold"
        for side, s in zip("ab", sections, strict=True)
        for name in sorted(s.kernel_names() - set(s.program.kernels))
    ]


def _same_text(a: Sections, b: Sections) -> bool:
    def texts(s: Sections) -> list[tuple[str, str, str]]:
        return [(x.kind, x.name, x.text) for x in s.form.sections]

    if texts(a) != texts(b):
        return False
    return all(a.program.kernels[n].text == b.program.kernels[n].text for n in a.kernel_names())


def _unknown_text(side: str, unknown: Unknown) -> str:
    return f"{unknown.construct} in {side}: {unknown.reason}"


def _explained(base: Difference, sections: tuple[Sections, Sections]) -> Difference:
    comparison = Comparison(sections)
    comparison.run()
    groups = comparison.found.groups()
    notes = base.notes + tuple(comparison.notes())
    reasons: list[str] = []
    verdict = Verdict.DIFFERENT
    if not groups:
        where = _first_line(*sections)
        reasons.append(f"the digests differ, and the tree comparison found no difference; {where}")
    if base.unknowns and all(
        _is_unknown(c, base.unknowns) for group in groups for c in group.changes
    ):
        verdict = Verdict.UNKNOWN
        reasons.append(
            "all differences stand at constructs that no rule knows, or share a source line with "
            "one, so they may be noise: "
            + "; ".join(dict.fromkeys(_unknown_text(side, u) for side, u in base.unknowns))
        )
    return replace(base, verdict=verdict, reasons=tuple(reasons), groups=groups, notes=notes)


def _is_unknown(change: Change, unknowns: Sequence[tuple[str, Unknown]]) -> bool:
    """Whether a change may stand at a construct that was recorded as unknown.

    A construct is met by its source line where it has one, whatever else stands there, else by its
    name: too often rather than too seldom.
    """
    lines = {(w.file, w.line) for w in (change.where_a, change.where_b) if w is not None}
    said = (change.op, change.detail, change.a, change.b)
    for _, unknown in unknowns:
        construct, where = unknown.construct, unknown.where
        if change.section_kind == "kernel" and construct == f"kernel {change.section}":
            return True
        if where is not None and where.line is not None and (where.file, where.line) in lines:
            return True
        if construct.startswith("custom call ") and change.op.endswith(".custom_call"):
            return True
        if any(construct in text for text in said):
            return True
    return False


def _first_line(a: Sections, b: Sections) -> str:
    for x, y in zip_longest(a.form.sections, b.form.sections):
        if x is None or y is None:
            return f"one side has {(x or y).name} besides"
        for number, (p, q) in enumerate(zip_longest(x.text.split("\n"), y.text.split("\n")), 1):
            if p != q:
                left, right = shortened(str(p).strip(), str(q).strip())
                return f"first in {x.name}, line {number}: {left!r} against {right!r}"
    return "the functions are equal line by line"
