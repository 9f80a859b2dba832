"""Rewrite a closed jaxpr to a fixed point: match, judge, substitute, and report every verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...compat import jaxprs
from ...compat.jaxprs import Body
from ...compat.source import source_line
from ...matchers.fact import UNKNOWN, Fact
from ...matchers.facts import MOST_CONTEXTS, Analysis, Contradiction
from ...matchers.graph import Apart, Dataflow, Scope
from ..base import Accepted, FrozenLeaf, Match, Pass, Reason, Site, SiteDeclined, Status
from ..frozen import Request
from ..report import NotEnteredGroup, Report
from .addresses import Addresses
from .bring import Brought, bring
from .interpreter import Interpreter
from .judge import Told, judge, refusal_key, sizes_known
from .whole import judge_whole

MAX_ROUNDS = 16
"""Rounds of match and substitute before `rewrite` stops and says so."""


@dataclass(frozen=True)
class Optimized:
    """A rewritten jaxpr and what was done to it."""

    closed: Body
    report: Report


def rewrite(
    closed: Body,
    passes: Sequence[Pass],
    *,
    name: str = "",
    request: Request | None = None,
    addresses: Addresses | None = None,
    facts: tuple[Fact, ...] | None = None,
) -> Optimized:
    """Rewrite a closed jaxpr to a fixed point of the passes.

    Passes that judge the whole program come first, told what is ``request``ed. Each round matches
    on the dataflow of every body, substitutes what was accepted, and analyses only bodies that
    changed. ``facts`` are what is known of each input. With ``addresses``, sites have theirs, and
    those that are turned off are declined.
    """
    analysis = Analysis()
    refused: dict[tuple[Any, ...], Reason] = {}
    sites: list[Site] = []
    told = Told(refused, addresses)
    notes: list[str] = []
    taken: set[str] = set()
    visited: tuple[int, int, tuple[NotEnteredGroup, ...]] | None = None
    brought: Brought = {}
    crowded: set[int] = set()
    rounds, ended = 0, True
    known = facts or (UNKNOWN,) * len(jaxprs.invars(closed))
    whole = [p for p in passes if p.program is not None]
    local = [p for p in passes if p.program is None]
    apart = Apart(frozenset().union(*(p.roots() for p in local)))
    read_from = None if addresses is None else frozenset().union(*(p.roots() for p in passes))
    taken_out: list[Site] = []
    frozen: list[FrozenLeaf] = []
    moved: Body | None = None
    rewritten = False
    while rounds < MAX_ROUNDS:
        rounds += 1
        flow = _flow(closed, analysis, apart, known)
        visited = visited or _visited(flow)
        if addresses is not None and rounds == 1 and not addresses.was_read:
            addresses.read(flow, read_from or ())
        for p in whole if rounds == 1 and not moved else ():
            judged = judge_whole(p, flow, request or Request(), told)
            taken_out += judged.sites
            frozen += judged.leaves
            if judged.closed is not closed or judged.spared:
                closed = judged.closed
                flow.release()
                flow = _flow(closed, analysis, apart, known)
        flow, accepted, found = _match_calls(flow, analysis, local, told, taken, apart, known)
        interpreter = Interpreter(accepted)
        moved = None
        while accepted:
            wanting = next((s for s in accepted.values() if s.replacement.wants), None)
            try:
                if wanting is not None:
                    moved = bring(closed, wanting, brought)
                    break
                done = interpreter.rewrite(flow.root)
                break
            except SiteDeclined as declined:
                _refuse(declined, accepted, refused)
                # A pass of less preference may take what this one had to give back.
                flow, accepted, found = _match_calls(
                    flow, analysis, local, told, taken, apart, known
                )
                interpreter = interpreter.again(accepted)
        if moved is not None:
            # Everything is judged anew with the value where it is wanted: no round of its own.
            closed = moved
            rounds -= 1
            flow.release()
            continue
        sites = _merge(sites, found)
        crowded |= flow.crowded
        if accepted:
            closed = done.body
            if addresses is not None:
                addresses.follow(interpreter.replaced, interpreter.renames)
            for splice in interpreter.splices:
                analysis.spliced(splice)
            made = {(id(b), id(s.facts)): (b, s) for b, s in interpreter.origins}
            for body, scope in made.values():
                analysis.rewritten(body, scope.facts)
                if scope.body in apart:
                    apart.add(body)
        left = closed if accepted or not rewritten else _idle(whole, flow, told, taken_out, frozen)
        flow.release()
        if not accepted and left is closed:
            break
        rewritten, closed = bool(accepted), left
    else:
        ended = False
        notes.append(f"stopped after {MAX_ROUNDS} rounds with sites still applying")
    if analysis.generalised:
        notes.append(
            f"{len(analysis.generalised)} bodies are called with more than {MOST_CONTEXTS} "
            "different sets of facts; in later calls nothing was taken as known of their inputs"
        )
    if crowded:
        notes.append(
            f"{len(crowded)} bodies are called from too many places to look at each call by itself"
        )
    notes.extend(_contradiction(c) for c in analysis.contradictions)
    assert visited is not None
    equations, bodies, coverage = visited
    report = Report(
        name=name,
        passes=tuple(p.name for p in passes),
        sites=tuple(sorted([*_folded(sites), *taken_out], key=_order)),
        coverage=coverage,
        equations=equations,
        bodies=bodies,
        rounds=rounds,
        ended=ended,
        frozen=tuple(frozen),
        superseded=tuple(sorted(taken)),
        notes=tuple(notes),
    )
    return Optimized(closed, report)


_Key = tuple[int, int]


def _idle(
    whole: Sequence[Pass],
    flow: Dataflow,
    told: Told,
    sites: list[Site],
    leaves: list[FrozenLeaf],
) -> Body:
    """The program without what nothing reads since other passes were done.

    What a user asked for was found before they began: only what applies now is added.
    """
    for p in whole:
        judged = judge_whole(p, flow, Request(), told)
        if judged.closed is not flow.root.body:
            done = [i for i, s in enumerate(judged.sites) if s.status is Status.APPLIED]
            sites += [judged.sites[i] for i in done]
            leaves += [judged.leaves[i] for i in done]
            return judged.closed
    return flow.root.body


def _flow(closed: Body, analysis: Analysis, apart: Apart, known: tuple[Fact, ...]) -> Dataflow:
    return Dataflow(closed, analysis, known, apart)


def _match_calls(
    flow: Dataflow,
    analysis: Analysis,
    passes: Sequence[Pass],
    told: Told,
    taken: set[str],
    apart: Apart,
    known: tuple[Fact, ...],
) -> tuple[Dataflow, dict[_Key, Accepted], list[Site]]:
    """Judge every candidate, in each call of a body by itself where a verdict may depend on it.

    Calls with the same facts share a scope until somebody asks what an input of it is made of: that
    can differ between them, as an iota and an array of the same range do. Such bodies are added to
    ``apart`` and all is judged anew, before anything is done that rests on a verdict.
    """
    while True:
        lost = set(taken)
        accepted, found = _match(flow, passes, told, lost)
        unclear = flow.unclear
        if not unclear:
            taken |= lost
            return flow, accepted, _alike(found)
        for body in unclear:
            apart.add(body)
        closed = flow.root.body
        flow.release()
        flow = _flow(closed, analysis, apart, known)


def _alike(found: Mapping[tuple[_Key, str], tuple[Scope, Site]]) -> list[Site]:
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


def _joined(known: Site, other: Site) -> Site:
    """One site that stands for the equations of both."""
    addresses = sorted({*known.addresses, *other.addresses}, key=lambda a: (len(a), a))
    return replace(known, calls=known.calls + other.calls, addresses=tuple(addresses))


def _merge(earlier: Sequence[Site], found: Iterable[Site]) -> list[Site]:
    """The sites so far: the last verdict on each, and those that applied.

    A site that stays declined is found again in every round, one that applied is not, and one
    that another rewrite has removed stays as it was declined.
    """
    found = list(found)
    judged = {s.place for s in found}
    return [s for s in earlier if s.status is Status.APPLIED or s.place not in judged] + found


def _folded(sites: Iterable[Site]) -> list[Site]:
    """One site for an equation that is judged alike in several contexts at one line.

    A body is analysed once for each set of facts about its inputs; how many sets there are is no
    property of the program that a count should tell.
    """
    folded: dict[tuple[Any, ...], Site] = {}
    for site in sites:
        codes = tuple(r.code for r in site.reasons)
        key = (site.pass_name, site.status, site.equation, site.source, codes)
        known = folded.get(key)
        folded[key] = site if known is None else _joined(known, site)
    return list(folded.values())


def _match(
    flow: Dataflow,
    passes: Sequence[Pass],
    told: Told,
    taken: set[str],
) -> tuple[dict[_Key, Accepted], dict[tuple[_Key, str], tuple[Scope, Site]]]:
    """Judge every candidate of every live equation; ``taken`` gathers passes that lost a site.

    A pass of less preference is asked about a site that it can't have until it has lost one.
    """
    by_root: dict[Any, list[Pass]] = {}
    for p in passes:
        for root in p.roots():
            by_root.setdefault(root, []).append(p)
    accepted: dict[_Key, Accepted] = {}
    found: dict[tuple[_Key, str], tuple[Scope, Site]] = {}
    symbolic = not sizes_known(_whole_inputs(flow.root.body))  # no other size is made of them
    for scope in flow.scopes:
        for index in scope.live:
            for p in by_root.get(scope.eqns[index].primitive, ()):
                verdict = judge(p, scope, index, told, symbolic)
                if verdict is None:
                    continue
                site, taking = verdict
                key = (id(scope), index)
                found[key, p.name] = scope, site
                if taking is not None:
                    accepted[key] = taking
                    rivals = by_root[scope.eqns[index].primitive]
                    later = [r for r in rivals[rivals.index(p) + 1 :] if r.name not in taken]
                    taken.update(_candidates(later, scope, index))
                    break
    gone = _unreached(flow, accepted)
    kept = {key: site for key, site in accepted.items() if key[0] not in gone}
    busy = {site.rewrite.name for site in kept.values()}
    waiting = {key for key, site in kept.items() if busy.intersection(site.rewrite.yields_to)}
    for key in waiting:
        del found[key, kept.pop(key).rewrite.name]
    return kept, {key: site for key, site in found.items() if key[0][0] not in gone}


def _whole_inputs(body: Body) -> Iterable[Any]:
    return (*jaxprs.constvars(body), *jaxprs.invars(body))


def _unreached(flow: Dataflow, accepted: Mapping[_Key, Accepted]) -> set[int]:
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


def _refuse(
    declined: SiteDeclined,
    accepted: Mapping[_Key, Accepted],
    refused: dict[tuple[Any, ...], Reason],
) -> None:
    """Remember which equations can't be substituted, and why.

    The same equation in other contexts goes with them: what was done to it may be shared.
    """
    offered = {refusal_key(s.rewrite, s.match.scope, s.match.index) for s in accepted.values()}
    blamed = {
        refusal_key(s.rewrite, s.match.scope, s.match.index) for s in declined.blamed
    } & offered
    if not blamed:
        raise declined  # the fault lies with no site of this round: to try again would not end
    refused.update(dict.fromkeys(blamed, declined.reason))


def _contradiction(found: Contradiction) -> str:
    """An assumed range that can't be true, or stands in code that never runs."""
    lo, hi = found.eqn.params["lo"], found.eqn.params["hi"]
    known = f"[{found.known.lo}, {found.known.hi}]"
    where = source_line(found.eqn) or "unknown line"
    return f"assume_range states [{lo}, {hi}] at {where}, where {known} is proven; that was used"


def _visited(flow: Dataflow) -> tuple[int, int, tuple[NotEnteredGroup, ...]]:
    """How many live equations in how many bodies there are, and what was not entered."""
    scopes = {(id(s.facts), s.demanded): s for s in flow.scopes}.values()
    return sum(len(s.live) for s in scopes), len(scopes), _coverage(scopes)


def _coverage(scopes: Iterable[Scope]) -> tuple[NotEnteredGroup, ...]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for scope in scopes:
        for index, skipped in scope.not_entered:
            counts[scope.eqns[index].primitive.name, skipped.param, skipped.reason] += 1
    return tuple(NotEnteredGroup(*key, n) for key, n in sorted(counts.items()))


def _order(site: Site) -> tuple[Any, ...]:
    return (site.status is not Status.APPLIED, site.source or "", site.scope, site.pass_name)
