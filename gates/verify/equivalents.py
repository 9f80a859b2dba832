"""Mutants that are the program they were made of, each by its name and with the reason."""

from __future__ import annotations

import re
from typing import Any

from ...compat import jaxprs

_KNOWN: tuple[tuple[str, str, Any], ...] = (
    (
        r"shift_left \(\d+\): constant \d+ \+1",
        "a key and its slot may lie a bit further apart: the word has room, and only the order "
        "is read",
        lambda eqn: all(jaxprs.is_var(a) or a.val < 31 for a in eqn.invars),
    ),
)


def known(problem: Any, name: str) -> str | None:
    """Why a surviving mutant of a site is no mutant; None where nothing says so."""
    mutation = problem.mutation
    for pattern, reason, holds in _KNOWN:
        if re.fullmatch(pattern, name) and mutation is not None and mutation.eqn is not None:
            return reason if holds(mutation.eqn) else None
    return None
