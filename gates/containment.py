"""``only-in``: whether a difference stays within named kernels and name scopes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from ..lowering.change import Change, Difference
from ..lowering.errors import InputError
from ..lowering.words import agreeing, plural

_WRAPPED = re.compile(r"[\w.-]+\((.*)\)")


def outside(difference: Difference, patterns: Sequence[str]) -> tuple[Change, ...]:
    """The changes that no pattern covers.

    ``kernel:NAME`` covers changes in the body of the kernels that match. ``scope:PATH`` covers
    operations whose name scope holds the components of PATH next to each other, and kernels that
    are called from there only. Components match as shell patterns, and through the wrappers that
    JAX puts around a scope: ``router`` matches ``transpose(jvp(router))``. A change without a name
    scope is outside of every scope.
    """
    return tuple(c for c in difference.changes if not _covered(c, patterns))


def strays(difference: Difference, patterns: Sequence[str]) -> list[str]:
    """Why a difference isn't shown to stay within ``patterns``; nothing where it is."""
    if not difference.changes or difference.notes:
        return ["only-in can't be shown: the tree of differences is not complete"]
    stray = outside(difference, patterns)
    if not stray:
        return []
    first = stray[0]
    place = next((w for w in (first.where_b, first.where_a) if w is not None), None)
    scope = place.scope if place is not None and place.scope else "no name scope"
    return [
        f"{len(stray)} of {plural(len(difference.changes), 'difference')} "
        f"{agreeing(len(stray), 'is', 'are')} outside "
        f"{', '.join(patterns)}; the first is {first.op} in {first.section}, {scope}"
    ]


def checked(patterns: Sequence[str], where: str) -> tuple[str, ...]:
    """``patterns``, each of which names a kernel or a scope.

    Raises:
        InputError: one has another form, or would match any scope.
    """
    for pattern in patterns:
        kind, colon, name = pattern.partition(":")
        if kind not in ("kernel", "scope") or not colon or not name.strip("/"):
            raise InputError(f"{where}: {pattern!r}; wanted 'kernel:NAME' or 'scope:PATH'")
        if kind == "scope" and set(name) <= set("*?/"):
            raise InputError(
                f"{where}: {pattern!r} takes in any scope, so it would always hold; wanted a "
                "component with a name, as in 'scope:router'"
            )
    return tuple(patterns)


def _covered(change: Change, patterns: Sequence[str]) -> bool:
    kernels = [p.partition(":")[2] for p in patterns if p.startswith("kernel:")]
    scopes = [p.partition(":")[2] for p in patterns if p.startswith("scope:")]
    if change.section_kind == "kernel" and any(
        fnmatch.fnmatchcase(change.section, name) for name in kernels
    ):
        return True
    return bool(change.places) and all(
        place is not None
        and place.scope is not None
        and any(in_scope(place.scope, pattern) for pattern in scopes)
        for place in change.places
    )


def in_scope(scope: str, pattern: str) -> bool:
    """Whether the components of ``pattern`` stand next to each other in ``scope``."""
    wanted = [part for part in pattern.split("/") if part]
    found = components(scope)
    return any(
        all(_matches(found[start + i], part) for i, part in enumerate(wanted))
        for start in range(len(found) - len(wanted) + 1)
    )


def components(scope: str) -> list[str]:
    """``scope`` split at slashes that stand in no parentheses."""
    found = [""]
    depth = 0
    for char in scope:
        depth += (char == "(") - (char == ")")
        if char == "/" and depth <= 0:
            found.append("")
        else:
            found[-1] += char
    return [part for part in found if part]


def _matches(component: str, pattern: str) -> bool:
    while True:
        if fnmatch.fnmatchcase(component, pattern):
            return True
        inner = _WRAPPED.fullmatch(component)
        if inner is None:
            return False
        component = inner[1]
