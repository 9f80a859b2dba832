"""Long common subsequences of two sequences, in bounded time."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_CELLS = 4_000_000
"""Cells of longest-common-subsequence tables that one comparison may fill."""

LARGE_GAP = 250_000
"""Cells of a gap above which items that repeat are paired by their order first."""


@dataclass
class Budget:
    """Work that is left; once it is spent, alignments get coarser and say so."""

    cells: int = MAX_CELLS
    spent: bool = False

    def take(self, cells: int) -> bool:
        """Whether ``cells`` may be spent, and spends them."""
        if cells > self.cells:
            self.spent = True
            return False
        self.cells -= cells
        return True


def common(
    a: Sequence[Hashable], b: Sequence[Hashable], budget: Budget | None = None
) -> list[tuple[int, int]]:
    """Index pairs of equal items, rising in both: a long common subsequence, in bounded time.

    Common ends are trimmed, items that occur once on both sides become anchors, and what is left
    between anchors is solved exactly while ``budget`` lasts.
    """
    if a == b:
        return [(index, index) for index in range(len(a))]
    budget = budget or Budget()
    found: list[tuple[int, int]] = []
    gaps = [(0, len(a), 0, len(b))]
    while gaps:
        a0, a1, b0, b1 = gaps.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            found.append((a0, b0))
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
            found.append((a1, b1))
        if a0 == a1 or b0 == b1:
            continue
        cells = (a1 - a0) * (b1 - b0)
        anchors = _anchors(a, b, a0, a1, b0, b1)
        if not anchors and cells > LARGE_GAP:
            anchors = _anchors(a, b, a0, a1, b0, b1, repeated=True)
        if anchors:
            found.extend(anchors)
            edges = [(a0 - 1, b0 - 1), *anchors, (a1, b1)]
            for (i, j), (k, m) in pairwise(edges):
                gaps.append((i + 1, k, j + 1, m))
        elif not set(a[a0:a1]).isdisjoint(b[b0:b1]) and budget.take(cells):
            found.extend(_longest(a, b, a0, a1, b0, b1))
    return sorted(found)


def _anchors(
    a: Sequence[Hashable],
    b: Sequence[Hashable],
    a0: int,
    a1: int,
    b0: int,
    b1: int,
    repeated: bool = False,
) -> list[tuple[int, int]]:
    """The longest rising run of items that occur exactly once on both sides.

    With ``repeated``, of items that occur equally often on both, the first with the first and so
    on: coarser, but linear.
    """
    in_a, in_b = _places(a, a0, a1), _places(b, b0, b1)
    pairs = sorted(
        pair
        for key, left in in_a.items()
        if len(left) == len(in_b.get(key, ())) and (repeated or len(left) == 1)
        for pair in zip(left, in_b[key], strict=True)
    )
    tails: list[int] = []
    at: list[int] = []
    back: list[int] = []
    for index, (_, j) in enumerate(pairs):
        place = bisect.bisect_left(tails, j)
        back.append(at[place - 1] if place else -1)
        if place == len(tails):
            tails.append(j)
            at.append(index)
        else:
            tails[place], at[place] = j, index
    chain: list[tuple[int, int]] = []
    index = at[-1] if at else -1
    while index >= 0:
        chain.append(pairs[index])
        index = back[index]
    return chain[::-1]


def _places(items: Sequence[Hashable], start: int, end: int) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for index in range(start, end):
        found.setdefault(items[index], []).append(index)
    return found


def _longest(
    a: Sequence[Hashable], b: Sequence[Hashable], a0: int, a1: int, b0: int, b1: int
) -> list[tuple[int, int]]:
    width = b1 - b0 + 1
    table = [[0] * width]
    for i in range(a1 - 1, a0 - 1, -1):
        below, row = table[-1], [0] * width
        for j in range(width - 2, -1, -1):
            if a[i] == b[b0 + j]:
                row[j] = below[j + 1] + 1
            else:
                row[j] = max(below[j], row[j + 1])
        table.append(row)
    table.reverse()
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < a1 - a0 and j < width - 1:
        if a[a0 + i] == b[b0 + j] and table[i][j] == table[i + 1][j + 1] + 1:
            found.append((a0 + i, b0 + j))
            i, j = i + 1, j + 1
        elif table[i + 1][j] >= table[i][j + 1]:
            i += 1
        else:
            j += 1
    return found
