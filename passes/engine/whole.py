"""Let a pass judge a whole program, and take out what it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...compat.jaxprs import Body
from ...matchers.dataflow import Dataflow
from ..base import FrozenLeaf, Match, Pass, Site, Status, Whole
from ..frozen import Request
from .check import check_rewritten
from .judge import Told, disabled, site_of
from .strip import strip


@dataclass(frozen=True)
class JudgedWhole:
    """What is left of a program, and what is to be reported."""

    closed: Body
    sites: tuple[Site, ...] = ()
    leaves: tuple[FrozenLeaf, ...] = ()
    spared: bool = False
    """Whether equations of the dataflow were marked to stay as they are."""


def judge_whole(p: Pass, flow: Dataflow, request: Request, told: Told) -> JudgedWhole:
    """Let a pass judge the whole program; what it leaves of it."""
    assert p.program is not None
    closed = flow.root.body
    found = p.program(flow, request)
    if found is None:
        return JudgedWhole(closed)
    off = [m for m in found.candidates if _applies(p, m) and told.is_off(p, m.scope, m.index)]
    sites: list[Site] = []
    leaves: list[FrozenLeaf] = []
    for match in off:
        match.scope.spared.add(match.index)
        site = site_of(p, match.scope, match.index, told)
        site = replace(site, reasons=(disabled(site.addresses),))
        sites.append(site)
        leaves.append(found.describe(match, site))
    if off:
        found = p.program(flow, request) or Whole((), None, found.dispensable, found.describe)
    places = [(m.scope, m.index) for m in off]
    for match in found.candidates:
        if (match.scope, match.index) in places:
            continue
        reasons = tuple(r for q in p.requirements if (r := q.check(match)) is not None)
        site = site_of(p, match.scope, match.index, told)
        status = Status.DECLINED if reasons else Status.APPLIED
        sites.append(replace(site, status=status, reasons=reasons))
        leaves.append(found.describe(match, sites[-1]))
    rest = closed
    if found.demand is not None:
        rest = strip(found.demand, found.dispensable)
        check_rewritten(rest, closed)
    return JudgedWhole(rest, tuple(sites), tuple(leaves), bool(off))


def _applies(p: Pass, match: Match) -> bool:
    return all(q.check(match) is None for q in p.requirements)
