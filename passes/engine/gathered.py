"""Put the verdicts of several calls, contexts and rounds together: each site counts once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...matchers.graph import Scope
from ..base import Site, Status


def alike(found: Mapping[Any, tuple[Scope, Site]]) -> list[Site]:
    """The verdicts, those on one equation that are alike in several calls with one set of facts.

    Whether calls had to be told apart is no property of the program that a count should tell.
    """
    together: dict[tuple[Any, ...], Site] = {}
    for scope, site in found.values():
        codes = tuple(r.code for r in site.reasons)
        context = id(scope.facts), scope.demanded
        key = (*context, site.equation, site.pass_name, site.status, codes)
        known = together.get(key)
        together[key] = site if known is None else _joined(known, site)
    return list(together.values())


def merge(earlier: Sequence[Site], found: Iterable[Site]) -> list[Site]:
    """The sites so far: the last verdict on each, and those that applied.

    A site that stays declined is found again in every round, one that applied is not, and one
    that another rewrite has removed stays as it was declined.
    """
    found = list(found)
    judged = {s.place for s in found}
    return [s for s in earlier if s.status is Status.APPLIED or s.place not in judged] + found


def folded(sites: Iterable[Site]) -> list[Site]:
    """One site for an equation that is judged alike in several contexts at one line.

    A body is analysed once for each set of facts about its inputs; how many sets there are is no
    property of the program that a count should tell.
    """
    found: dict[tuple[Any, ...], Site] = {}
    for site in sites:
        codes = tuple(r.code for r in site.reasons)
        key = (site.pass_name, site.status, site.equation, site.source, codes)
        known = found.get(key)
        found[key] = site if known is None else _joined(known, site)
    return list(found.values())


def order(site: Site) -> tuple[Any, ...]:
    """Where a site stands in a report: those that applied first, then by source line."""
    return (site.status is not Status.APPLIED, site.source or "", site.scope, site.pass_name)


def _joined(known: Site, other: Site) -> Site:
    """One site that stands for the equations of both."""
    addresses = sorted({*known.addresses, *other.addresses}, key=lambda a: (len(a), a))
    return replace(known, calls=known.calls + other.calls, addresses=tuple(addresses))
