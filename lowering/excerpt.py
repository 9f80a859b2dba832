"""Of two long texts that differ little, the lines that can matter to saying where.

What stands in the common ends (`common_ends`), reads the same values and refers to the same
sections, is the same on both sides and needs no tree. Kept are, in the order of the text:

- the lines between the ends, and those that refer to a section which differs;
- in the ends, the lines that read a value which any of these compute, or another value than their
  counterpart reads;
- what defines a value that any of these read, with its own operands replaced by names that are
  equal on both sides, as they are known to be the same;
- the function's arguments and results, and whatever encloses a line that is kept.

A difference can't get lost here: a line is left out only along with an equal one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from .common_ends import NAME, Ends, Lines, common_ends
from .nesting import Nesting
from .program import Section

UNSURE = "\0?"
"""Stands for a reference to what isn't on both sides; canonical text has no such character."""
_HEADER = ("  arg ", "  result ")


def excerpts(a: Section, b: Section, opened: Callable[[int, str], str]) -> tuple[Section, Section]:
    """Both sections with only the lines that matter to comparing them.

    Args:
        a: a section of the first program.
        b: its counterpart.
        opened: for a side and a text, the text with references to other sections by what those
            hold, and `UNSURE` in those that aren't the same on both sides.
    """
    sides = (Lines.of(a.text, opened(0, a.text)), Lines.of(b.text, opened(1, b.text)))
    if not all(lines.counted() for lines in sides):
        return a, b
    nestings = (Nesting.of(sides[0].lines), Nesting.of(sides[1].lines))
    if nestings[0] is None or nestings[1] is None:
        return a, b
    ends = common_ends(*sides)
    if ends.head + ends.tail == 0:
        return a, b
    kept = _Kept(sides, ends)
    kept.find()
    read = (set(kept.lines(0)), set(kept.lines(1)))
    kept.add_definitions(read)
    kept.enclose((nestings[0], nestings[1]))
    lines = (kept.lines(0), kept.lines(1))
    return (
        _cut(a, sides[0].lines, lines[0], kept.texts(0, lines[0], read)),
        _cut(b, sides[1].lines, lines[1], kept.texts(1, lines[1], read)),
    )


def _cut(section: Section, lines: list[str], kept: list[int], texts: list[str]) -> Section:
    if len(kept) == len(lines):
        return section
    where = section.locations
    locations = tuple(where[line] if line < len(where) else -1 for line in kept)
    return replace(section, text="".join(f"{text}\n" for text in texts), locations=locations)


class _Kept:
    """Which lines of the common ends are kept; those between them always are."""

    def __init__(self, sides: tuple[Lines, Lines], ends: Ends) -> None:
        self._sides = sides
        self._ends = ends
        self._sizes = (len(sides[0].lines), len(sides[1].lines))
        self._head: set[int] = set()
        self._tail: set[int] = set()
        """Counted from the end: -1 is the last."""
        self._starts = (self._sizes[0] - ends.tail, self._sizes[1] - ends.tail)
        """Where the common end begins on each side."""

    def lines(self, side: int) -> list[int]:
        """The lines of one side that are kept, in order."""
        size = self._sizes[side]
        between = range(self._ends.head, self._starts[side])
        return [*sorted(self._head), *between, *sorted(size + n for n in self._tail)]

    def _add(self, side: int, lines: Iterable[int]) -> None:
        for line in lines:
            if line < self._ends.head:
                self._head.add(line)
            elif line >= self._starts[side]:
                self._tail.add(line - self._sizes[side])

    def find(self) -> None:
        """Adds the lines that may differ, and those that read what may."""
        a, b = self._sides
        head, size = self._ends.head, self._sizes[0]
        self._add(0, range(_header(a.lines)))
        self._add(1, range(_header(b.lines)))
        opening = [*range(head), *range(self._starts[0], size)]
        doubtful = [n for n in opening if UNSURE in a.shapes[n]]
        if a.quotes:
            doubtful += [n for n in opening if _quotes_name(a.lines[n])]
        self._add(0, doubtful)
        computed: set[str] = set()
        for line in doubtful:
            names = a.of_line(line)
            computed.update(names[: a.defined(line)])
        self._head_differing(computed)
        self._tail_differing(computed)

    def _head_differing(self, computed: set[str]) -> None:
        """Readers of what doubtful lines compute, and of what is defined only further on."""
        a, b = self._sides
        head, names = self._ends.head, self._ends.head_names
        wanted = a.free(0, head)
        if wanted:
            later = (a.definitions(head, self._sizes[0]), b.definitions(head, self._sizes[1]))
            here = a.definitions(0, head)
            wanted = {
                x
                for x in wanted
                if x in later[0] or names[x] in later[1] or (x not in here and x != names[x])
            }
        self._add(0, a.readers(computed | wanted, 0, head))

    def _tail_differing(self, computed: set[str]) -> None:
        a, b = self._sides
        head, pairs = self._ends.head, self._ends.tail_names
        (start_a, start_b), (size_a, size_b) = self._starts, self._sizes
        before, own = a.definitions(0, head), a.definitions(start_a, size_a)
        between = (a.definitions(head, start_a), b.definitions(head, start_b))
        before_b = set(b.definitions(0, head))
        # A value's name in one text may mean nothing in the other, so each side has its own.
        free_b = b.free(start_b, size_b)
        free = a.free(start_a, size_a) | {x for x, y in pairs.items() if y in free_b}
        differing = {x for x in computed if x in pairs}
        for x in free:
            y = pairs[x]
            if x in between[0] or y in between[1]:
                differing.add(x)
            elif x in before or y in before_b:
                if x not in before or self._ends.head_names.get(x) != y:
                    differing.add(x)
            elif x not in own and x != y:
                differing.add(x)
        self._add(0, a.readers(differing, start_a, size_a))

    def add_definitions(self, read: tuple[set[int], set[int]]) -> None:
        """Adds what defines the values that the lines read."""
        for side, lines in enumerate(self._sides):
            names = lines.of_lines(read[side])
            ranges = ((0, self._ends.head), (self._starts[side], self._sizes[side]))
            for start, end in ranges:
                defined = lines.definitions(start, end)
                self._add(side, (defined[name] for name in names if name in defined))

    def enclose(self, nestings: tuple[Nesting, Nesting]) -> None:
        """Adds what encloses the lines, until both sides have the same."""
        before = -1
        while before != (before := len(self._head) + len(self._tail)):
            for side, nesting in enumerate(nestings):
                self._add(side, nesting.around(self.lines(side)))

    def texts(self, side: int, kept: list[int], read: tuple[set[int], set[int]]) -> list[str]:
        """The kept lines of one side; those that aren't ``read`` read nothing that counts."""
        mine, first = self._sides[side], self._sides[0]
        found: list[str] = []
        for line in kept:
            text = mine.lines[line]
            if line not in read[side]:
                twin = line if line < self._ends.head else line + self._sizes[0] - self._sizes[side]
                found.append(_without_reads(text, mine.defined(line), first.of_line(twin)))
            else:
                found.append(text)
        return found


def _without_reads(text: str, defined: int, names: list[str]) -> str:
    """``text`` with each name but the first ``defined`` ones made one of nothing."""
    count = -1

    def renamed(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return match[0] if count < defined else f"%outside.{names[count][1:]}"

    return NAME.sub(renamed, text)


def _header(lines: list[str]) -> int:
    """How many lines a function's head takes, its arguments and results among them."""
    if not lines or not lines[0].startswith("func.func "):
        return 0
    count = 1
    while count < len(lines) and lines[count].startswith(_HEADER):
        count += 1
    return count


def _quotes_name(line: str) -> bool:
    """Whether a ``%`` may stand in a string, where it begins no name."""
    if "%" not in line or '"' not in line:
        return False
    return '\\"' in line or any("%" in quoted for quoted in line.split('"')[1::2])
