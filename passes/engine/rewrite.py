"""Rewrite a closed jaxpr to a fixed point: match, judge, substitute, and report every verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...compat import jaxprs
from ...compat.jaxprs import Body
from ...compat.source import source_line
from ...matchers.dataflow import Apart, Dataflow
from ...matchers.fact import UNKNOWN, Fact
from ...matchers.facts import MOST_CONTEXTS, Analysis, Contradiction
from ...matchers.graph import Scope
from ..base import Accepted, FrozenLeaf, Match, Pass, Reason, Site, SiteDeclined, Status
from ..frozen import Request
from ..report import NotEnteredGroup, Report
from .addresses import Addresses
from .bring import Brought, bring
from .gathered import folded, merge, order
from .interpreter import Interpreter, Rewritten
from .judge import Told, refusal_key
from .verdicts import Place, Program, match_calls
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
    known = facts or (UNKNOWN,) * len(jaxprs.invars(closed))
    work = _Rewriting(closed, passes, addresses, known)
    work.judge_whole(request or Request())
    while work.rounds < MAX_ROUNDS:
        if not work.round():
            return Optimized(work.closed, work.report(name))
    work.ended = False
    work.flow.release()
    return Optimized(work.closed, work.report(name))


class _Rewriting:
    """A program while it is rewritten, and what has been found."""

    def __init__(
        self,
        closed: Body,
        passes: Sequence[Pass],
        addresses: Addresses | None,
        known: tuple[Fact, ...],
    ) -> None:
        self.closed = closed
        self.passes = passes
        self.whole = [p for p in passes if p.program is not None]
        self.local = [p for p in passes if p.program is None]
        apart = Apart(frozenset().union(*(p.roots() for p in self.local)))
        self.program = Program(known, Analysis(), apart)
        self.addresses = addresses
        self.refused: dict[tuple[Any, ...], Reason] = {}
        self.told = Told(self.refused, addresses)
        self.keep: list[Match] = []
        """Sites whose equations, by identity, are keys."""
        self.brought: Brought = {}
        self.sites: list[Site] = []
        """Verdicts on single equations."""
        self.taken_out: list[Site] = []
        """Verdicts of passes that judge the whole program."""
        self.frozen: list[FrozenLeaf] = []
        self.superseded: set[str] = set()
        self.crowded: set[int] = set()
        self.rounds, self.ended = 0, True
        self.rewritten = False
        """Whether the round before changed something."""
        self.flow = self.program.flow(closed)
        self.visited = _visited(self.flow)
        if addresses is not None and not addresses.was_read:
            addresses.read(self.flow, frozenset().union(*(p.roots() for p in passes)))

    def judge_whole(self, request: Request) -> None:
        """Let the passes that judge the whole program take out what they find."""
        for p in self.whole:
            judged = judge_whole(p, self.flow, request, self.told)
            self.taken_out += judged.sites
            self.frozen += judged.leaves
            if judged.closed is not self.closed or judged.spared:
                self._go_on_with(judged.closed)

    def round(self) -> bool:
        """Match and substitute once; whether anything is left to do."""
        self.rounds += 1
        accepted, found, done = self._substituted()
        self.sites = merge(self.sites, found)
        self.crowded |= self.flow.crowded
        left = self.closed
        if done is not None:
            left = done.body
        elif self.rewritten:
            left = self._without_unread()
        if not accepted and left is self.closed:
            self.flow.release()
            return False
        self.rewritten = bool(accepted)
        self._go_on_with(left)
        return True

    def _go_on_with(self, closed: Body) -> None:
        self.flow.release()
        self.closed = closed
        self.flow = self.program.flow(closed)

    def _substituted(self) -> tuple[Mapping[Place, Accepted], list[Site], Rewritten | None]:
        """What was accepted in a round, all its verdicts, and the program with it in place."""
        start, brought = self.closed, dict(self.brought)
        accepted, found = self._match()
        interpreter = Interpreter(accepted)
        while accepted:
            wanting = next((s for s in accepted.values() if s.replacement.wants), None)
            try:
                if wanting is None:
                    done = interpreter.rewrite(self.flow.root)
                    self._note(interpreter)
                    return accepted, found, done
                # Everything is judged anew with the value where it is wanted.
                self._go_on_with(bring(self.closed, wanting, self.brought))
                accepted, found = self._match()
                interpreter = Interpreter(accepted)
            except SiteDeclined as declined:
                self.keep += _refuse(declined, accepted, self.refused)
                anew = self.closed is not start
                if anew:  # nothing is left that was brought for a site that is declined
                    self._go_on_with(start)
                    self.brought = dict(brought)
                # A pass of less preference may take what this one had to give back.
                accepted, found = self._match()
                interpreter = Interpreter(accepted) if anew else interpreter.again(accepted)
        return accepted, found, None

    def _match(self) -> tuple[Mapping[Place, Accepted], list[Site]]:
        self.flow, accepted, found = match_calls(
            self.flow, self.program, self.local, self.told, self.superseded
        )
        return accepted, found

    def _note(self, interpreter: Interpreter) -> None:
        """Tell what was substituted to all that follow the program through its rewrites."""
        if self.addresses is not None:
            self.addresses.follow(interpreter.replaced, interpreter.renames)
        for splice in interpreter.splices:
            self.program.analysis.spliced(splice)
            self.told.put_in.update(v for eqn in splice.eqns for v in eqn.outvars)
        made = {(id(b), id(s.facts)): (b, s) for b, s in interpreter.origins}
        for body, scope in made.values():
            self.program.analysis.rewritten(body, scope.facts)
            if scope.body in self.program.apart:
                self.program.apart.add(body)

    def _without_unread(self) -> Body:
        """The program without what nothing reads since other passes were done.

        What a user asked for was found before they began: only what applies now is added.
        """
        for p in self.whole:
            judged = judge_whole(p, self.flow, Request(again=True), self.told)
            if judged.closed is not self.closed:
                done = [i for i, s in enumerate(judged.sites) if s.status is Status.APPLIED]
                self.taken_out += [judged.sites[i] for i in done]
                self.frozen += [judged.leaves[i] for i in done]
                return judged.closed
        return self.closed

    def report(self, name: str) -> Report:
        """Every verdict, and what was not looked at."""
        equations, bodies, coverage = self.visited
        return Report(
            name=name,
            passes=tuple(p.name for p in self.passes),
            sites=tuple(sorted([*folded(self.sites), *self.taken_out], key=order)),
            coverage=coverage,
            equations=equations,
            bodies=bodies,
            rounds=self.rounds,
            ended=self.ended,
            frozen=tuple(self.frozen),
            superseded=tuple(sorted(self.superseded)),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterable[str]:
        """The bounds that were hit, and what was told that can't be true."""
        if not self.ended:
            yield f"stopped after {MAX_ROUNDS} rounds with sites still applying"
        analysis = self.program.analysis
        if analysis.generalised:
            yield (
                f"{len(analysis.generalised)} bodies are called with more than {MOST_CONTEXTS} "
                "different sets of facts; in later calls nothing was taken as known of their inputs"
            )
        if self.crowded:
            yield (
                f"{len(self.crowded)} bodies are called from too many places to look at each call "
                "by itself"
            )
        yield from map(_contradiction, analysis.contradictions)


def _refuse(
    declined: SiteDeclined,
    accepted: Mapping[Place, Accepted],
    refused: dict[tuple[Any, ...], Reason],
) -> list[Match]:
    """Remember which equations can't be substituted, and why; the sites that they are of.

    The same equations in other contexts go with them: what was done to them may be shared.
    """
    offered = set(map(_key, accepted.values()))
    blamed = {key: site.match for site in declined.blamed if (key := _key(site)) in offered}
    if not blamed:
        raise declined  # the fault lies with no site of this round: to try again would not end
    refused.update(dict.fromkeys(blamed, declined.reason))
    return list(blamed.values())


def _key(site: Accepted) -> tuple[Any, ...]:
    return refusal_key(site.rewrite, site.match.scope, site.match.index, site.replacement)


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
