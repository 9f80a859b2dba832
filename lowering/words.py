"""Numbers in sentences, and what several parts say in the same words."""

from __future__ import annotations

UNADDRESSED = (
    "several equations can have this address, so that `disable=` doesn't take it: it takes the "
    "pass as a whole, or relower.keep(…) around what is to stay"
)
"""Of a site whose address has ``?`` for a number."""


def plural(count: int, noun: str, many: str | None = None) -> str:
    """``1 site``, ``2 sites``; ``many`` where the plural isn't the noun with an s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def agreeing(count: int, one: str, many: str) -> str:
    """The form of a verb, or of a phrase, that goes with the number before it."""
    return one if count == 1 else many
