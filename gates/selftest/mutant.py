"""What a mutant and a variation are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...lowering.program import LEVELS, Level
from .draft import Draft

Sites = Callable[[Draft], list[Any]]
Edit = Callable[[Draft, Any], None]


@dataclass(frozen=True)
class Mutant:
    """One change that has to be seen."""

    name: str
    needs: str
    """What a program must have for it, in words: the reason where it isn't applicable."""
    sites: Sites
    """Every place where it can be made; empty if nowhere."""
    edit: Edit
    """Makes it at one of the places."""
    seen_in: str = "program"
    """The operation, or ``kernel``, that a report must name; ``program``: anything."""
    levels: tuple[Level, ...] = LEVELS
    """The levels at which it must differ; at the others it must match."""
    lives: Callable[[Any], list[Any]] | None = None
    """The operations of a site whose results must matter to the program; None: none need to."""
    prepare: Callable[[Draft], None] | None = None
    """Done to the program as well as to the mutant, before both."""


@dataclass(frozen=True)
class Variation:
    """One change that carries no meaning: it must match at every level."""

    name: str
    needs: str
    edit: Callable[[Draft], bool]
    """Makes it; False where there is nothing to change."""


def itself(site: Any) -> list[Any]:
    """For `Mutant.lives`: the site is an operation, and has to matter."""
    return [site]


def both(site: Any) -> list[Any]:
    """For `Mutant.lives`: the site is several operations, and each has to matter."""
    return list(site)
