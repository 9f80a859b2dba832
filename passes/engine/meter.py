"""Decide by compiling: what a site costs as it is, and as each way would leave it.

A fragment is compiled once, however many sites it stands for, and what the compiler said is kept
on disk. Nothing here weighs figures of two rungs against each other: where a site can't be cut out
or a fragment has no cycles, the pass's own rule of thumb decides, and the verdict says so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...lowering.compile import CompileFailed, StagedModule
from ...lowering.cost.cache import CostCache, user_cache
from ...lowering.cost.fragment import comparable, measure_fragment
from ...lowering.cost.measurement import ONE_WAY
from ...lowering.cost.model import Cost
from ...lowering.errors import InputError
from ...lowering.fragment import stage_fragment
from ...lowering.process import Limits
from ...lowering.targets import DEFAULT_TARGET
from ...lowering.words import agreeing, plural
from ..base import Match, Measured, Measurement, Pass, Reason, Replacement, Site
from ..report import Report
from .fragments import Cut, Region, Uncut, cut

_HOPELESS = ("missing", "target")
"""Failures of the compiler that the next fragment would meet too."""


@dataclass(frozen=True)
class _Known:
    match: Match
    found: Measurement
    ways: Mapping[str, Replacement]


@dataclass
class Meter:
    """Measures the sites of one program."""

    asked: Measured = field(default_factory=Measured)
    target: str = DEFAULT_TARGET
    compiled: int = 0
    """Fragments whose cost was asked for, equal ones counted once."""
    given_up: str | None = None
    """Why nothing can be measured here."""
    troubles: dict[str, None] = field(default_factory=dict)
    _costs: dict[str, Cost | InputError] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], _Known] = field(default_factory=dict)
    _runs: dict[tuple[str, int], tuple[Any, dict[int, tuple[str | None, int | None]]]] = field(
        default_factory=dict
    )
    _cache: CostCache | None = None

    def __post_init__(self) -> None:
        """Takes the user's cache, unless it is turned off."""
        self.target = self.asked.target
        self._cache = user_cache() if self.asked.cache else None

    def measuring(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes, each deciding by figures where it did by rule of thumb.

        A pass that takes something out and puts nothing in its place has nothing to decide.
        """
        alter = (lambda p: self._measuring(p, passes)) if self.asked.decide else self._noting
        return tuple(p if p.program else alter(p) for p in passes)

    def _noting(self, p: Pass) -> Pass:
        """The pass as it is, what it does measured."""

        def taken(match: Match) -> Replacement:
            way = p.replace(match)
            if not match.scope.is_kept(match.index):
                self._remember(p, match, self._measure(match, {ONE_WAY: way}, {}), {ONE_WAY: way})
            return way

        return replace(p, replace=taken)

    def _measuring(self, p: Pass, passes: Sequence[Pass]) -> Pass:
        def profitable(match: Match) -> Reason | None:
            if match.scope.is_kept(match.index):
                return p.profitable(match)  # it stays, whatever it costs
            found, _ = self.measured(p, match)
            if found.why is not None:
                return p.profitable(match)
            if found.chosen is None:
                return _no_gain(found)
            return self._better_elsewhere(p, found, match, passes)

        def chosen(match: Match) -> Replacement:
            if match.scope.is_kept(match.index):
                return p.replace(match)
            found, ways = self.measured(p, match)
            return p.replace(match) if found.chosen is None else ways[found.chosen]

        return replace(p, profitable=profitable, replace=chosen)

    def _better_elsewhere(
        self, p: Pass, mine: Measurement, match: Match, passes: Sequence[Pass]
    ) -> Reason | None:
        """Whether another rewrite that could take the site, or one inside of it, saves more."""
        for other, theirs in _rivals(p, match, passes):
            found, _ = self.measured(other, theirs)
            if found.chosen is not None and found.rung == mine.rung and found.saving > mine.saving:
                mine_saves = plural(round(mine.saving), "estimated cycle")
                return Reason(
                    "measured-less", f"{other.name} ({found.chosen}) saves more here",
                    f"{mine_saves} saved by {p.name} ({mine.chosen})",
                    f"{found.saving:,.0f}, as by {other.name}",
                )  # fmt: skip
        return None

    def measured(self, p: Pass, match: Match) -> tuple[Measurement, Mapping[str, Replacement]]:
        """The figures of a site, and the ways that are open there."""
        scope, eqn = match.scope, match.eqn
        key = (p.name, id(eqn), scope.source_line(eqn), scope.name_stack(eqn))
        known = self._known.get(key)
        if known is None or known.match.scope is not scope:
            ways, closed = _ways(p, match)
            known = self._remember(p, match, self._measure(match, ways, closed), ways)
        return known.found, known.ways

    def _remember(
        self, p: Pass, match: Match, found: Measurement, ways: Mapping[str, Replacement]
    ) -> _Known:
        scope, eqn = match.scope, match.eqn
        key = (p.name, id(eqn), scope.source_line(eqn), scope.name_stack(eqn))
        known = self._known[key] = _Known(match, found, ways)
        self._note_runs(p, match, found)
        return known

    def _note_runs(self, p: Pass, match: Match, found: Measurement) -> None:
        """A site stands for an equation in every scope; only those of the last round count."""
        path = match.scope.path()
        root = path[0].scope if path else match.scope
        key = (p.name, id(match.eqn))
        known = self._runs.get(key)
        if known is None or known[0] is not root:
            known = self._runs[key] = (root, {})
        known[1][id(match.scope)] = (match.scope.source_line(match.eqn), found.runs)

    def _measure(
        self, match: Match, ways: Mapping[str, Replacement], closed: Mapping[str, str]
    ) -> Measurement:
        if self.given_up is not None:
            return Measurement(why=self.given_up)
        if not ways:
            return Measurement(why="no way is open: " + "; ".join(closed.values()))
        wanting = [name for name, way in ways.items() if way.wants is not None]
        if wanting:
            return Measurement(why=f"the way {wanting[0]!r} needs a value of another body")
        try:
            region = cut(match, ways)
        except Uncut as reason:
            return Measurement(why=str(reason))
        try:
            before = self.cost(region, region.before)
        except InputError as error:
            return Measurement(why=_said(error))
        return self._weighed(region, before, closed)

    def _weighed(
        self, region: Region, before: Cost | None, closed: Mapping[str, str]
    ) -> Measurement:
        figures: dict[str, float] = {}
        missing: dict[str, str] = dict(closed)
        for name, after in region.after.items():
            try:
                cost = self.cost(region, after)
            except InputError as error:
                missing[name] = _said(error)
                continue
            why = comparable(tuple(c for c in (before, cost) if c is not None))
            if why is None:
                figures[name] = 0.0 if cost is None else cost.total().cycles
            else:
                missing[name] = why
        open_ways = [name for name in region.after if name in missing]
        if not figures:
            return Measurement(why="; ".join(dict.fromkeys(missing[n] for n in open_ways)))
        base = 0.0 if before is None else before.total().cycles
        best = min(figures, key=lambda name: figures[name])
        return Measurement(
            rung="fragment" if before is None else before.rung,
            before=base,
            after=figures,
            missing=missing,
            chosen=best if figures[best] < base else None,
            runs=region.runs,
            bytes=0 if before is None else before.total().bytes_of,
        )

    def cost(self, region: Region, part: Cut) -> Cost | None:
        """What the compiler says of a piece; None of one that does nothing.

        Raises:
            InputError: it can't be lowered or compiled by itself.
        """
        if part.idle:
            return None
        staged = stage_fragment(region.fragment(part), self.target, "the fragment")
        digest = hashlib.sha256(staged.module + repr(staged.settings).encode()).hexdigest()
        known = self._costs.get(digest)
        if known is None:
            known = self._costs[digest] = self._compiled(staged)
        if isinstance(known, InputError):
            raise known
        return known

    def _compiled(self, staged: StagedModule) -> Cost | InputError:
        self.compiled += 1
        limits = Limits(self.asked.limit, self.asked.memory_limit)
        try:
            return measure_fragment(staged, limits=limits, cache=self._cache)
        except CompileFailed as error:
            if error.kind in _HOPELESS:
                self.given_up = error.cause
            return error
        finally:
            if self._cache is not None:
                self.troubles.update(dict.fromkeys(self._cache.troubles))

    def annotated(self, report: Report) -> Report:
        """A report with the figures of each site that was measured, and what was not."""
        shared = Counter((s.pass_name, s.equation) for s in report.sites)
        sites = tuple(
            replace(s, measured=self._of(s, shared[s.pass_name, s.equation] > 1))
            for s in report.sites
        )
        return replace(report, sites=sites, notes=(*report.notes, *self._notes(sites)))

    def _of(self, site: Site, shared: bool) -> Measurement | None:
        """The figures of a site, with the runs of all scopes that it stands for.

        Sites that share an equation differ in their line.
        """
        known = self._known.get((site.pass_name, site.equation, site.source, site.scope))
        if known is None:
            return None
        _, by_scope = self._runs[site.pass_name, site.equation]
        runs = [n for line, n in by_scope.values() if not shared or line == site.source]
        total = None if None in runs else sum(n for n in runs if n is not None)
        return replace(known.found, runs=total)

    def _notes(self, sites: Sequence[Site]) -> list[str]:
        found = [s.measured for s in sites if s.measured is not None]
        notes = list(self.troubles)
        if self.given_up is not None:
            return [*notes, f"nothing was measured, rules of thumb decided: {self.given_up}"]
        without = sum(m.why is not None for m in found)
        if found:
            how = "decided by" if self.asked.decide else "measured in"
            rest = agreeing(without, "was not", "were not")
            rest = "by rule of thumb" if self.asked.decide else rest
            measured = len(found) - without
            notes.append(
                f"{plural(measured, 'site')} {agreeing(measured, 'was', 'were')} {how} estimated "
                f"cycles on {self.target}, {without} {rest}; {plural(self.compiled, 'fragment')}"
            )
        return notes


def _ways(p: Pass, match: Match) -> tuple[dict[str, Replacement], dict[str, str]]:
    """The ways that are open at a site, and why others aren't."""
    if p.alternatives is None:
        try:
            return {ONE_WAY: p.replace(match)}, {}
        except Exception as error:
            if p.profitable(match) is None:
                raise
            return {}, {ONE_WAY: f"{type(error).__name__}: {error}"}
    found = p.alternatives(match)
    closed = {name: way.code for name, way in found.items() if isinstance(way, Reason)}
    return {n: way for n, way in found.items() if isinstance(way, Replacement)}, closed


def _rivals(p: Pass, match: Match, passes: Sequence[Pass]) -> Iterator[tuple[Pass, Match]]:
    """The other sites of which this rewrite would take the equation."""
    places = [(match.scope, match.index)]
    for child in match.scope.children.get(match.index, {}).values():
        places += [(child, index) for index in child.live]
    for scope, index in places:
        for other in passes:
            if scope.eqns[index].primitive not in other.roots():
                continue
            if (scope, index, other.name) == (match.scope, match.index, p.name):
                continue
            if scope.is_kept(index):
                continue
            found = other.find(scope, index)
            if isinstance(found, Match) and all(q.check(found) is None for q in other.requirements):
                yield other, found


def _no_gain(found: Measurement) -> Reason:
    best = min(found.after, key=lambda name: found.after[name])
    return Reason(
        "measured-no-gain", "no way costs less than what stands here",
        f"{plural(round(found.after[best]), 'estimated cycle')} ({best}), rung {found.rung}",
        f"fewer than {found.before:,.0f}",
    )  # fmt: skip


def _said(error: Any) -> str:
    return error.cause if isinstance(error, CompileFailed) else str(error)
