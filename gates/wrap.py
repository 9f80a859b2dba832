"""Where a line of a report may be broken: a path, a scope or a list stays legible at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len

_INSIDE = (("/",), (",", "(", "=", ":", "|"), (".", "-", "_", ")"))
"""Characters after which a word that is longer than a line is broken, the best first."""


def lines(text: str, width: int, hang: int = 0) -> list[tuple[int, int]]:
    """Where the lines of ``text`` begin and end, none wider than ``width`` cells.

    Lines are broken between words. A word that doesn't fit a line by itself begins on the line that
    it is met on, and is broken after a ``/``, else after another mark, else where the line is full.
    Nothing is left out but the spaces at a break.

    Args:
        text: what to print.
        width: cells of a line.
        hang: cells by which lines after the first are narrower.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for line in text.split("\n"):
        end = start + len(line)
        found.extend(_broken(text, start, end, width, hang))
        start = end + 1
    return found


def _broken(text: str, start: int, end: int, width: int, hang: int) -> Iterator[tuple[int, int]]:
    room = width
    while cell_len(text[start:end]) > room:
        full = _full(text, start, end, room)
        stop = _break(text, start, full, end, width - hang)
        yield start, stop - (len(text[start:stop]) - len(text[start:stop].rstrip()))
        start = stop
        while start < end and text[start] == " ":
            start += 1
        room = width - hang
    yield start, start + len(text[start:end].rstrip())


def _full(text: str, start: int, end: int, room: int) -> int:
    """Where a line that begins at ``start`` is full; at least one character further."""
    at = min(end, start + room)
    while at > start + 1 and cell_len(text[start:at]) > room:
        at -= 1
    return at


def _break(text: str, start: int, full: int, end: int, room: int) -> int:
    """Where to break a line that is full at ``full``."""
    if text[full] == " ":
        return full
    indent = len(text[start:full]) - len(text[start:full].lstrip())
    space = text.rfind(" ", start + indent, full)
    word = space + 1 if space >= 0 else start + indent
    stop = text.find(" ", full, end)
    fits = cell_len(text[word : stop if stop >= 0 else end]) <= room
    if fits and space >= 0:
        return word
    for marks in _INSIDE:
        at = max(text.rfind(mark, word + 1, full) for mark in marks) + 1
        if at > word + 1:
            return at
    return word if space >= 0 and full - word < 4 < full - start else full
