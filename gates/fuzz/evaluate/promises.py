"""What a program says of its own values, and what happens where that is wrong."""

from __future__ import annotations


class BrokenPromise(Exception):
    """Values aren't what the program says: indices in bounds, sorted or unique; a range.

    Also a collective that only some devices come to. Nothing can be said of such a program.
    """
