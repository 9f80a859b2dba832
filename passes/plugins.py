"""Passes of other packages, found by their entry points; each runs only where it is asked for.

A package offers a pass in its ``pyproject.toml``:

    [project.entry-points."relower.passes"]
    my_pass = "my_package.my_pass:PASS"

To install a package changes no program: nothing of it is imported before somebody names its pass,
or lists all passes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import metadata
from typing import Any

from .base import Contract, Match, Pass, Reason, Replacement, Requirement
from .guarded import guarded, guarded_way

GROUP = "relower.passes"
_NUMBERS = itertools.count()
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class PluginError(ValueError):
    """A pass of another package can't be used; the message says whose, and why."""


@dataclass(frozen=True)
class Plugin:
    """A pass that a package offers."""

    name: str
    origin: str
    """The package and its version, as in ``my-package 1.2``."""
    target: str
    """Where the pass is, as in ``my_package.my_pass:PASS``."""
    entry: metadata.EntryPoint
    clash: str | None = None
    """Who else has a pass of that name."""

    def load(self) -> Pass:
        """The pass.

        Raises:
          PluginError: it can't be imported, is no `Pass`, or its name is another or taken.
        """
        if self.clash is not None:
            raise PluginError(f"{self}: {self.clash} has a pass of that name")
        try:
            found = self.entry.load()
        except Exception as error:  # whatever an import may raise
            said = f"{type(error).__name__}: {error}"
            raise PluginError(f"{self}: {self.target} can't be imported: {said}") from error
        fault = fault_of(found)
        if fault is not None:
            raise PluginError(f"{self}: {self.target} is {fault}")
        if found.name != self.name:
            raise PluginError(
                f"{self}: the entry point is called {self.name!r}, its pass {found.name!r}; "
                "wanted one name"
            )
        return as_guest(found)

    def __str__(self) -> str:
        """What messages call it."""
        return f"the pass {self.name!r} of {self.origin}"


def as_guest(found: Pass) -> Pass:
    """The pass as one that never runs unasked, and whose faults are told as its own.

    Its replacements are each made anew: two of relower's replacements of one key are the same
    program, which is traced once. Whether that holds of another's keys can't be known, and one
    that leaves something out would put the first site's program in place of the second's.
    """
    if isinstance(found.replace, _Anew):
        return found
    p = guarded(found)
    return replace(
        p,
        by_name=True,
        replace=_Anew(p.replace, p.name),
        alternatives=None if p.alternatives is None else _WaysAnew(p.alternatives, p.name),
    )


@dataclass(frozen=True)
class _Anew:
    """A pass's ``replace``, each result with a key of its own."""

    replace: Callable[[Match], Replacement]
    owner: str

    def __call__(self, match: Match) -> Replacement:
        return _anew(self.owner, match, self.replace(match))


@dataclass(frozen=True)
class _WaysAnew:
    """A pass's ``alternatives``, likewise."""

    ways: Callable[[Match], Mapping[str, Replacement | Reason]]
    owner: str

    def __call__(self, match: Match) -> Mapping[str, Replacement | Reason]:
        found = self.ways(match)
        return {
            n: w if isinstance(w, Reason) else _anew(self.owner, match, w) for n, w in found.items()
        }


def _anew(owner: str, match: Match, way: Replacement) -> Replacement:
    return replace(guarded_way(owner, match, way), key=(next(_NUMBERS),))


def fault_of(found: Any) -> str | None:
    """Why an object can't be run as a pass; None where nothing is wrong with it."""
    if not isinstance(found, Pass):
        return f"{found!r} of type {type(found).__name__}; wanted a relower.passes.Pass"
    if not isinstance(found.name, str) or not _NAME.fullmatch(found.name):
        return f"a pass called {found.name!r}; wanted lower-case letters, digits and underscores"
    wrong = [
        f.name for f in fields(found)
        if f.name in ("roots", "find", "profitable", "replace", "before", "after", "examples")
        and not callable(getattr(found, f.name))
    ]  # fmt: skip
    if wrong:
        return f"a pass whose {wrong[0]} is no function: {getattr(found, wrong[0])!r}"
    contract: Any = found.contract
    if not isinstance(contract, Contract):
        return f"a pass of the contract {found.contract!r}; wanted a relower.passes.Contract"
    if not isinstance(found.requirements, tuple) or not all(
        isinstance(r, Requirement) for r in found.requirements
    ):
        return f"a pass with the requirements {found.requirements!r}; wanted a tuple of Requirement"
    return None


def offered(own: Iterable[str]) -> tuple[Plugin, ...]:
    """Every pass that an installed package offers, by name; nothing of it is imported.

    One whose name is taken, by relower or another package, can't be loaded; nor can that other.

    Args:
      own: names that are relower's.
    """
    found: list[Plugin] = []
    entries: Sequence[metadata.EntryPoint] = sorted(
        metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value)
    )
    for entry in entries:
        dist = entry.dist
        origin = "an unknown package" if dist is None else f"{dist.name} {dist.version}"
        plugin = Plugin(entry.name, origin, entry.value, entry)
        if not any(p.name == plugin.name and p.target == plugin.target for p in found):
            found.append(plugin)  # one package may be met twice on the path
    owners: dict[str, list[str]] = {name: ["relower"] for name in own}
    for plugin in found:
        owners.setdefault(plugin.name, []).append(plugin.origin)
    return tuple(
        replace(p, clash=_another(owners[p.name], p.origin)) if len(owners[p.name]) > 1 else p
        for p in found
    )


def _another(owners: Sequence[str], than: str) -> str:
    """Who else has a name: a package of the same name and version, or an unknown one, too."""
    return next((o for o in owners if o != than), than)
