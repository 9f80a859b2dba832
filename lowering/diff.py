"""Compare two programs: a verdict, and where they differ.

IDENTICAL means: after the noise rules in the ledgers, the two are the same text, functions and
kernels alike, and nothing in either is of a kind that no rule knows. It rests on the texts
themselves; digests only make it quick to see that they differ.

UNKNOWN means that neither may be said:

- the stamps differ (another jax, another target …) in a field that wasn't allowed by name;
- a program doesn't hold the level asked for, or a kernel that it refers to;
- the texts are equal, but a program holds a construct that no rule of the normal form knows (two
  host callbacks look alike, for instance);
- the texts differ, but in such constructs only: the difference may be noise, and a negative
  control must not be satisfied by noise.

DIFFERENT means: the texts differ in at least one place that the normal form understands. The tree
explains where; if it finds nothing, the difference says so and stays.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from . import origin
from .align import Aligner, Budget
from .attribute_diff import shortened
from .change import Change, Collector, Difference, Verdict
from .contexts import Contexts
from .errors import InputError
from .optext import Op
from .program import LEVELS, Level, Program, Section, Unknown
from .sections import KERNEL, Sections
from .tree_diff import SectionDiff, Side

MAX_CHANGES = 10_000
"""Changes that are kept; more are counted and reported as a note."""
MAX_LINES = 2_000_000
"""Lines of text that the tree comparison reads; sections beyond are reported as a whole."""


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
    sections = (Sections(a, a.forms[level]), Sections(b, b.forms[level]))
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
    return {
        name: f"stamp: {name} is {left.get(name, 'absent')} in a and "
        f"{right.get(name, 'absent')} in b"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    }


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
    comparison = _Comparison(sections)
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
            "the texts differ in constructs only that no rule knows, so it may be noise: "
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


@dataclass
class _Comparison:
    """Pairs sections along the call graph and collects the changes of each pair."""

    sections: tuple[Sections, Sections]
    found: Collector = field(default_factory=lambda: Collector(MAX_CHANGES))
    budget: Budget = field(default_factory=Budget)
    lines: int = MAX_LINES
    skipped: list[str] = field(default_factory=list)
    _to_b: dict[str, str] = field(default_factory=dict)
    _to_a: dict[str, str] = field(default_factory=dict)
    _queue: list[tuple[str, str]] = field(default_factory=list)
    _kernels: dict[tuple[str, str], None] = field(default_factory=dict)
    _contexts: Contexts = field(default_factory=Contexts)
    _changes: list[tuple[tuple[str, str], list[Change]]] = field(default_factory=list)

    def run(self) -> None:
        """Compares everything that differs."""
        a, b = self.sections
        for name in a.by_name:
            if name in b.by_name and self._is_entry(name):
                self._pair(name, name)
        self._drain()
        self._rest()
        self._drain()
        for left, right in self._kernels:
            x, y = a.kernel(left), b.kernel(right)
            if x is not None and y is not None and x.text != y.text:
                self._compare(x, y)
        for pair, changes in self._changes:
            self.found.add(self._contexts.placed(change, pair) for change in changes)

    def notes(self) -> Iterator[str]:
        """Where the bounds were met."""
        if self.found.dropped:
            yield f"{self.found.dropped} more changes were counted and not kept"
        if self.budget.spent:
            yield "some long runs of operations were not aligned one by one (work bound)"
        for name in self.skipped:
            yield f"{name} differs and was not compared in detail (size bound)"

    def _is_entry(self, name: str) -> bool:
        a, b = self.sections
        return name == "main" or all(
            s.by_name[name].kind == "module" or s.by_name[name].text.startswith("func.func public")
            for s in (a, b)
        )

    def _pair(self, x: str, y: str) -> bool:
        """Whether two functions are, or from now on are taken to be, counterparts."""
        a, b = self.sections
        if self._to_b.get(x) == y or a.closed[x] == b.closed[y]:
            return True
        if x in self._to_b or y in self._to_a:
            return False
        self._to_b[x], self._to_a[y] = y, x
        self._queue.append((x, y))
        return True

    def _drain(self) -> None:
        a, b = self.sections
        while self._queue:
            x, y = self._queue.pop(0)
            self._compare(a.by_name[x], b.by_name[y])

    def _rest(self) -> None:
        """Functions that no pair of calls leads to: by content, by label, else on one side only."""
        a, b = self.sections
        left = [n for n in a.by_name if n not in self._to_b]
        right = [n for n in b.by_name if n not in self._to_a]
        spare = Counter(b.closed[n] for n in right)
        lonely_a = [n for n in left if not _took(spare, a.closed[n])]
        spare = Counter(a.closed[n] for n in left)
        lonely_b = [n for n in right if not _took(spare, b.closed[n])]
        by_label: dict[str, list[str]] = {}
        for name in lonely_b:
            by_label.setdefault(b.label(name), []).append(name)
        for name in lonely_a:
            same = by_label.get(a.label(name))
            if same and self._pair(name, same[0]):
                lonely_b.remove(same.pop(0))
            else:
                self._changes.append(((name, name), [_whole("removed", a.by_name[name])]))
        for name in lonely_b:
            self._changes.append(((name, name), [_whole("added", b.by_name[name])]))

    def _compare(self, x: Section, y: Section) -> None:
        a, b = self.sections
        pair = (x.name, y.name)
        self.lines -= x.text.count("\n") + y.text.count("\n")
        if self.lines < 0:
            self.skipped.append(x.label or x.name)
            self._changes.append((pair, [_whole("text", x)]))
            return
        aligner = Aligner((a.opened, b.opened), self.budget)
        alignment = aligner.align(a.tree(x), b.tree(y))
        sides = (
            Side(x, a.tree(x), a.program.locations),
            Side(y, b.tree(y), b.program.locations),
        )
        changes: list[Change] = []
        for op_a, op_b in alignment.ops:
            changes.extend(self._references(op_a, op_b, sides))
        changes.extend(SectionDiff(*sides, alignment, _names_the_same).changes())
        self._changes.append((pair, changes))

    def _references(self, op_a: Op, op_b: Op, sides: tuple[Side, Side]) -> Iterator[Change]:
        """Pairs what two aligned operations refer to; a call of something else is a change."""
        a, b = self.sections
        section = sides[0].section
        caller = (section.name, sides[1].section.name)
        where = (sides[0].where(op_a), sides[1].where(op_b))
        for x, y in zip(a.callees(op_a.rest), b.callees(op_b.rest), strict=False):
            self._contexts.add((x, y), caller, where)
            if not self._pair(x, y):
                label = section.label or section.name
                yield Change(
                    "callee", op_a.name, "callee", a.label(x), b.label(y),
                    label, section.kind, (), *where, where,
                )  # fmt: skip
        kernels_a, kernels_b = KERNEL.findall(op_a.rest), KERNEL.findall(op_b.rest)
        for p, q in zip(kernels_a, kernels_b, strict=False):
            kernels = (f"kernel:{p}", f"kernel:{q}")
            self._kernels[kernels] = None
            self._contexts.add(kernels, caller, where)


def _names_the_same(path: str, x: str, y: str) -> bool:
    """Callees and kernels are paired by `_Comparison`, which reports what differs in them."""
    return path == "callee" or ("kernel:" in x and KERNEL.sub("", x) == KERNEL.sub("", y))


def _took(spare: Counter[str], digest: str) -> bool:
    if spare[digest] > 0:
        spare[digest] -= 1
        return True
    return False


def _whole(kind: Literal["added", "removed", "text"], section: Section) -> Change:
    lines = f"{section.text.count(chr(10))} lines"
    left, right = (lines, "") if kind == "removed" else ("", lines)
    if kind == "text":
        left = right = lines
    label = section.label or section.name
    return Change(kind, section.kind, "the whole section", left, right, label, section.kind)
