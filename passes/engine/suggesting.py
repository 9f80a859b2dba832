"""What to change in the source for each site, noted while a program is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat.jaxprs import Eqn
from ...compat.source import source_span
from ...matchers.graph import Scope
from ..base import Match, Pass, Replacement, Status
from ..report import Report
from ..suggestion import Span, Suggestion


@dataclass
class Suggesting:
    """The suggestions for the sites of one program."""

    _found: dict[tuple[Any, ...], tuple[Match, Suggestion]] = field(default_factory=dict)
    _of_pass: dict[str, str] = field(default_factory=dict)

    def noting(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes, as they are but that what they would suggest is noted."""
        return tuple(self._noting(p) for p in passes)

    def _noting(self, p: Pass) -> Pass:
        suggest = p.suggest
        if suggest is None or isinstance(suggest, str):
            self._of_pass[p.name] = suggest or f"write what {p.name} makes of it: {p.summary}"

        def replaced(match: Match) -> Replacement:
            scope, eqn = match.scope, match.eqn
            key = (p.name, id(eqn), scope.source_line(eqn), scope.name_stack(eqn))
            said = suggest(match) if callable(suggest) else Suggestion(self._of_pass[p.name])
            made = replace(said, span=_span(scope, eqn))
            self._found.setdefault(key, (match, made))
            return p.replace(match)

        return replace(p, replace=replaced)

    def annotated(self, report: Report) -> Report:
        """A report whose applied sites have their suggestions."""

        def of(site: Any) -> Suggestion | None:
            if site.status is not Status.APPLIED:
                return None
            found = self._found.get((site.pass_name, site.equation, site.source, site.scope))
            if found is not None:
                return found[1]
            sentence = self._of_pass.get(site.pass_name)
            return None if sentence is None else Suggestion(sentence)

        return replace(report, sites=tuple(replace(s, suggestion=of(s)) for s in report.sites))


def _span(scope: Scope, eqn: Eqn) -> Span | None:
    """Where an equation, or else the call it stands in, was written (`Scope.source_line`)."""
    found = source_span(eqn)
    while found is None and scope.callers:
        caller = scope.callers[0]
        scope = caller.scope
        found = source_span(scope.eqns[caller.index])
    return None if found is None else Span(*found)
