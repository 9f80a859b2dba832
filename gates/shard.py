"""One part of a matrix: which cells it holds, whatever else the matrix holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..lowering.errors import InputError
from .cells import Cell


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``count`` parts, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells of this part, in order.

        A cell's part depends on its name and the count alone, so adding, removing or moving cells
        moves no other; each cell is in exactly one part.
        """
        return tuple(cell for cell in cells if self._part(cell) == self.number)

    def _part(self, cell: Cell) -> int:
        digest = hashlib.sha256(cell.name.encode()).digest()
        return 1 + int.from_bytes(digest[:8], "big") % self.count


def parse_shard(text: str) -> Shard:
    """``2/3`` as the second of three parts.

    Raises:
        InputError: the text has another form, or there is no such part.
    """
    number, slash, count = text.partition("/")
    if (
        not slash
        or not (number.isascii() and number.isdecimal() and count.isascii())
        or (not count.isdecimal() or not 1 <= int(number) <= int(count))
    ):
        raise InputError(f"--shard {text!r}: wanted I/N with I from 1 to N, as in '2/3'")
    return Shard(int(number), int(count))
