"""Whether a value of another loop's body is worth keeping for it."""

from __future__ import annotations

from ...compat.jaxprs import Atom
from ...matchers.graph import Scope
from ...matchers.inverse import bytes_if_brought
from ..base import Reason

MOST_BYTES = 1 << 30
"""What a loop may keep for another: to write and read that takes half a millisecond, a sort more,
but a program may have no room for much more."""


def too_large(scope: Scope, permutation: Atom) -> Reason | None:
    """Why the inverse of a permutation isn't brought: a loop would keep it for every iteration."""
    kept = bytes_if_brought(scope, permutation)
    if kept <= MOST_BYTES:
        return None
    return Reason("residuals", "the inverse would be kept for every iteration of the loop",
                  f"{kept:,} bytes", f"at most {MOST_BYTES:,}")  # fmt: skip
