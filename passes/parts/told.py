"""Requirements whose reasons the matcher has found already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base import Match, Reason, Requirement


def told(
    requirements: Mapping[str, tuple[str, str]], reasons: Callable[[Match], Mapping[str, Any]]
) -> tuple[Requirement, ...]:
    """A requirement for each code.

    Args:
      requirements: by code, what isn't so where it is unmet, and what must hold.
      reasons: by code, what the matcher found and wanted, of those that a match doesn't meet.
    """

    def one(code: str, said: str, sentence: str) -> Requirement:
        def check(match: Match) -> Reason | None:
            reason = reasons(match).get(code)
            return None if reason is None else Reason(code, said, reason.found, reason.wanted)

        return Requirement(code, sentence, check)

    return tuple(one(code, *texts) for code, texts in requirements.items())
