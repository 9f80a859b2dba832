"""One round's verdicts: every candidate of every body, told apart by calls where that matters."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...compat import jaxprs
from ...compat.jaxprs import Body
from ...matchers.dataflow import Apart, Dataflow
from ...matchers.fact import Fact
from ...matchers.facts import Analysis
from ...matchers.graph import Scope
from ..base import Accepted, Match, Pass, Site
from ..disable import DISABLED
from .gathered import alike
from .judge import Told, judge, sizes_known

_FEW = 32
"""Equations of a body that are looked through one by one for candidates."""

_first = operator.itemgetter(0)

Place = tuple[int, int]
"""A scope, by identity, and the index of an equation in it."""


@dataclass(frozen=True)
class Program:
    """What a program's dataflow is made with, whichever rewrite of it."""

    facts: tuple[Fact, ...]
    """What is known of each input."""
    analysis: Analysis
    apart: Apart

    def flow(self, closed: Body) -> Dataflow:
        """The dataflow of the program as it stands."""
        return Dataflow(closed, self.analysis, self.facts, self.apart)


def match_calls(
    flow: Dataflow, program: Program, passes: Sequence[Pass], told: Told, taken: set[str]
) -> tuple[Dataflow, dict[Place, Accepted], list[Site]]:
    """Judge every candidate, in each call of a body by itself where a verdict may depend on it.

    Calls with the same facts share a scope until somebody asks what an input of it is made of: that
    can differ between them, as an iota and an array of the same range do. Such bodies are kept
    apart from then on and all is judged anew, before anything is done that rests on a verdict.

    Returns:
      The dataflow that was judged, the sites accepted by place, and all verdicts. ``taken`` gathers
      passes that lost a site to one of more preference.
    """
    while True:
        lost = set(taken)
        accepted, found = _match(flow, passes, told, lost)
        unclear = flow.unclear
        if not unclear:
            taken |= lost
            return flow, accepted, alike(found)
        for body in unclear:
            program.apart.add(body)
        closed = flow.root.body
        flow.release()
        flow = program.flow(closed)


def _match(
    flow: Dataflow,
    passes: Sequence[Pass],
    told: Told,
    taken: set[str],
) -> tuple[dict[Place, Accepted], dict[tuple[Place, str], tuple[Scope, Site]]]:
    """Judge every candidate of every live equation; ``taken`` gathers passes that lost a site.

    A pass of less preference is asked about a site that it can't have until it has lost one.
    """
    by_root: dict[Any, list[Pass]] = {}
    for p in passes:
        for root in p.roots():
            by_root.setdefault(root, []).append(p)
    accepted: dict[Place, Accepted] = {}
    found: dict[tuple[Place, str], tuple[Scope, Site]] = {}
    symbolic = not sizes_known(_whole_inputs(flow.root.body))  # no other size is made of them
    for scope in flow.scopes:
        for index, root in _candidates_of(scope, by_root):
            for p in by_root[root]:
                verdict = judge(p, scope, index, told, symbolic)
                if verdict is None:
                    continue
                site, taking = verdict
                if taking is None and not _is_told(told, p, scope, index, site):
                    continue
                key = (id(scope), index)
                found[key, p.name] = scope, site
                if taking is not None:
                    accepted[key] = taking
                    rivals = by_root[root]
                    later = [r for r in rivals[rivals.index(p) + 1 :] if r.name not in taken]
                    taken.update(_candidates(later, scope, index))
                    break
    gone = _unreached(flow, accepted)
    kept = {key: site for key, site in accepted.items() if key[0] not in gone}
    busy = {site.rewrite.name for site in kept.values()}
    waiting = {key for key, site in kept.items() if busy.intersection(site.rewrite.yields_to)}
    told.stood_back.update(kept[key].rewrite.name for key in waiting)
    for key in waiting:
        del found[key, kept.pop(key).rewrite.name]
    return kept, {key: site for key, site in found.items() if key[0][0] not in gone}


def _is_told(told: Told, p: Pass, scope: Scope, index: int, site: Site) -> bool:
    """Whether a site that was declined is the user's: what rewrites put in place isn't.

    That one was turned off is told wherever it stands.
    """
    return site.reasons[0].code == DISABLED or not told.is_ours(p, scope, index)


def _candidates_of(scope: Scope, roots: Collection[Any]) -> list[tuple[int, Any]]:
    """The live equations of a scope that are of one of the primitives ``roots``, in order."""
    if len(scope.live) <= _FEW:
        eqns = scope.eqns
        return [(i, eqns[i].primitive) for i in scope.live if eqns[i].primitive in roots]
    found = [(i, root) for root in roots for i in scope.places.get(root, ())]
    found.sort(key=_first)
    return found


def _whole_inputs(body: Body) -> Iterable[Any]:
    return (*jaxprs.constvars(body), *jaxprs.invars(body))


def _unreached(flow: Dataflow, accepted: Mapping[Place, Accepted]) -> set[int]:
    """Scopes that nothing runs once the accepted sites are substituted, which may be calls."""
    gone: set[int] = set()
    for scope in reversed(list(flow.scopes)):
        calls = [(id(c.scope), c.index) for c in scope.callers]
        if calls and all(call in accepted or call[0] in gone for call in calls):
            gone.add(id(scope))
    return gone


def _candidates(passes: Sequence[Pass], scope: Scope, index: int) -> set[str]:
    """Those passes that have the structure they look for at an equation."""
    return {p.name for p in passes if isinstance(p.find(scope, index), Match)}
