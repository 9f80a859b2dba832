"""The lines that two texts have in common at both ends, up to the names of their values.

MLIR numbers values, so one operation more renames all that follow. Lines are therefore compared
with each name left out, and the names for themselves: within an end they must correspond one to
one. Nothing is parsed; a name is read by where it stands.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

NAME = re.compile(r"%[\w$.-]+")


@dataclass
class Lines:
    """The lines of one text, the names in them, and which of those are defined where they stand."""

    lines: list[str]
    shapes: list[str]
    """Each line without the names, references to other sections by what those hold."""
    names: list[str]
    """Every name, in the order of the text."""
    first: list[int]
    """For each line the index into ``names`` of its first; one more for the end."""
    quotes: bool
    """Whether a ``%`` may stand in a string, where it begins no name."""
    _defined_at: list[int] = field(default_factory=list)
    """The names that are defined where they stand, as indices into ``names``."""
    _defined_in: list[int] = field(default_factory=list)
    """The lines that do."""

    @classmethod
    def of(cls, text: str, shape: str) -> Lines:
        """``shape`` is ``text`` with the references in it replaced, and as many lines."""
        shapes = _lines(NAME.sub("%", shape))
        first = [0, *accumulate([line.count("%") for line in shapes])]
        quotes = '\\"' in text or "%" in "".join(text.split('"')[1::2])
        made = cls(_lines(text), shapes, NAME.findall(text), first, quotes)
        for line, body in enumerate(shapes):
            count = _defined(body, first[line + 1] - first[line])
            for index in range(first[line], first[line] + count):
                made._defined_at.append(index)
                made._defined_in.append(line)
        return made

    def counted(self) -> bool:
        """Whether each ``%`` of the text is the beginning of one name."""
        return len(self.lines) == len(self.shapes) and self.first[-1] == len(self.names)

    def of_line(self, line: int) -> list[str]:
        """The names in one line."""
        return self.names[self.first[line] : self.first[line + 1]]

    def of_lines(self, lines: Iterable[int]) -> set[str]:
        """The names in several lines."""
        return {name for line in lines for name in self.of_line(line)}

    def defined(self, line: int) -> int:
        """How many of the first names of a line are defined there."""
        return _defined(self.shapes[line], self.first[line + 1] - self.first[line])

    def definitions(self, start: int, end: int) -> dict[str, int]:
        """For each name that is defined in these lines, the last line that does."""
        low, high = (bisect_left(self._defined_in, line) for line in (start, end))
        names = [self.names[index] for index in self._defined_at[low:high]]
        return dict(zip(names, self._defined_in[low:high], strict=True))

    def readers(self, names: set[str], start: int, end: int) -> set[int]:
        """The lines among these that any of ``names`` stands in."""
        if not names:
            return set()
        low, high = self.first[start], self.first[end]
        found = [low + i for i, name in enumerate(self.names[low:high]) if name in names]
        return {bisect_right(self.first, index) - 1 for index in found}

    def free(self, start: int, end: int) -> set[str]:
        """The names that these lines read before they define them, or without."""
        low, high = self.first[start], self.first[end]
        names = self.names[low:high]
        earliest = dict(zip(reversed(names), range(high - 1, low - 1, -1), strict=True))
        defining = set(self._defined_at)
        return {name for name, index in earliest.items() if index not in defining}


@dataclass(frozen=True)
class Ends:
    """How many lines two texts share at the beginning and at the end."""

    head: int
    tail: int
    head_names: dict[str, str]
    """The names of the first lines of one text, and the same in the other."""
    tail_names: dict[str, str]


def common_ends(a: Lines, b: Lines) -> Ends:
    """The longest common beginning, and the longest common end of the rest."""
    most = min(len(a.shapes), len(b.shapes))
    head = 0
    while head < most and a.shapes[head] == b.shapes[head]:
        head += 1
    head_names, agreed = _agreeing(a.names[: a.first[head]], b.names[: b.first[head]])
    if agreed < a.first[head]:
        head = bisect_right(a.first, agreed) - 1
        head_names = {x: head_names[x] for x in a.names[: a.first[head]]}
    tail = 0
    while tail < most - head and a.shapes[-1 - tail] == b.shapes[-1 - tail]:
        tail += 1
    names_a = a.names[a.first[len(a.lines) - tail] :][::-1]
    names_b = b.names[b.first[len(b.lines) - tail] :][::-1]
    tail_names, agreed = _agreeing(names_a, names_b)
    if agreed < len(names_a):
        line = bisect_right(a.first, len(a.names) - 1 - agreed) - 1
        tail = len(a.lines) - 1 - line
        tail_names = {x: tail_names[x] for x in a.names[a.first[line + 1] :]}
    return Ends(head, tail, head_names, tail_names)


def _agreeing(a: Sequence[str], b: Sequence[str]) -> tuple[dict[str, str], int]:
    """Pairs of names, one to one, and how many of the first names are of these pairs."""
    pairs = dict(zip(a, b, strict=True))
    if len(set(pairs.values())) == len(pairs) and [pairs[x] for x in a] == b:
        return pairs, len(a)
    there: dict[str, str] = {}
    back: dict[str, str] = {}
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if there.setdefault(x, y) != y or back.setdefault(y, x) != x:
            return there, index
    return there, len(a)


def _defined(shape: str, names: int) -> int:
    """How many of a line's names are defined there: results, an argument, a block's arguments."""
    body = shape.lstrip(" ")
    if body.startswith(("% = ", "arg %")):
        return 1
    if body.startswith("%"):
        return body.partition(" = ")[0].count("%")
    return names if body.startswith("^") else 0


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines
