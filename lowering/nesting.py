"""Which line of a text encloses which, by how operations' regions open and close."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from .optext import MAX_DEPTH


@dataclass
class Nesting:
    """The regions of one text of one function or kernel."""

    _marks: list[int] = field(default_factory=list)
    """Lines after which another region is the innermost, in order."""
    _inside: list[int] = field(default_factory=list)
    """For each of them, the line that opened that region; -1 for none."""
    _outer: dict[int, int] = field(default_factory=dict)
    """For each line that opens regions, the one that opened the region it stands in."""
    _parts: dict[int, list[int]] = field(default_factory=dict)
    """For each line that opens regions, those that divide and close them."""
    _owner: dict[int, int] = field(default_factory=dict)
    """For each of the latter, the line that opened the region."""

    @classmethod
    def of(cls, lines: list[str]) -> Nesting | None:
        """The nesting of a text, or None where its form isn't the usual one."""
        made = cls()
        stack = [-1]
        for number, line in enumerate(lines):
            body = line.lstrip()
            start = body[:1]
            if start in ("%", '"'):
                if not line.endswith("({"):
                    continue
                made._outer[number] = stack[-1]
                made._parts[number] = []
                stack.append(number)
            elif start == "}":
                if len(stack) == 1:
                    return None
                made._part(stack[-1], number)
                if body == "}, {":
                    continue
                if not body.startswith("})"):
                    return None
                stack.pop()
            elif start == "^":
                if len(stack) > 1:
                    made._part(stack[-1], number)
                continue
            elif number and not line.startswith(("  arg ", "  result ")):
                return None
            else:
                continue
            if len(stack) > MAX_DEPTH:
                return None
            made._marks.append(number)
            made._inside.append(stack[-1])
        return made

    def _part(self, owner: int, number: int) -> None:
        self._parts[owner].append(number)
        self._owner[number] = owner

    def around(self, lines: Iterable[int]) -> set[int]:
        """What encloses any of ``lines``, and what divides and closes the regions of all these."""
        found: set[int] = set()
        for line in lines:
            opener = line
            if line not in self._parts:
                opener = self._owner.get(line, -2)
                if opener == -2:
                    place = bisect_left(self._marks, line) - 1
                    opener = self._inside[place] if place >= 0 else -1
            while opener >= 0 and opener not in found:
                found.add(opener)
                found.update(self._parts[opener])
                opener = self._outer[opener]
        return found
