"""Pairs what two programs hold, along the call graph, and collects what differs in each pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .align import Aligner
from .change import Change, Collector
from .contexts import Contexts
from .excerpt import excerpts
from .optext import Op
from .program import KERNEL, Section
from .sections import Sections
from .sequences import Budget
from .tree_diff import SectionDiff, Side

MAX_CHANGES = 10_000
"""Changes that are kept; more are counted and reported as a note."""
MAX_LINES = 2_000_000
"""Lines that the tree comparison reads, of the ends that both sides have in common only what is
needed (`excerpts`); sections beyond are reported as a whole."""


@dataclass
class Comparison:
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
        x, y = excerpts(x, y, self._opened)
        self.lines -= x.text.count("\n") + y.text.count("\n")
        if self.lines < 0:
            self.skipped.append(x.label or x.name)
            self._changes.append((pair, [_whole("text", x)]))
            return
        trees = (a.tree(x), b.tree(y))
        alignment = Aligner((a.opened, b.opened), self.budget).align(*trees)
        sides = (Side(x, trees[0], a.program.locations), Side(y, trees[1], b.program.locations))
        changes: list[Change] = []
        for op_a, op_b in alignment.ops:
            if "@" in op_a.rest or "kernel:" in op_a.rest:
                changes.extend(self._references(op_a, op_b, sides))
        changes.extend(SectionDiff(*sides, alignment, _names_the_same).changes())
        self._changes.append((pair, changes))

    def _opened(self, side: int, text: str) -> str:
        return self.sections[side].opened_beside(self.sections[1 - side], text)

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
    """Callees and kernels are paired by `Comparison`, which reports what differs in them."""
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
