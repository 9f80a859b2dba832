"""Which of the user's lines a rewrite takes equations from, to tell whose a saving is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base import Match, Pass, Replacement
from ..report import Report
from .fragments import removed


@dataclass
class Lines:
    """The lines of each site of one program, noted while it is rewritten."""

    _found: dict[tuple[Any, ...], tuple[Match, dict[str, None]]] = field(default_factory=dict)

    def noting(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes, as they are but that their sites are noted."""
        return tuple(self._noting(p) for p in passes)

    def _noting(self, p: Pass) -> Pass:
        def replaced(match: Match) -> Replacement:
            way = p.replace(match)
            scope, eqn = match.scope, match.eqn
            key = (p.name, id(eqn), scope.source_line(eqn), scope.name_stack(eqn))
            _, lines = self._found.setdefault(key, (match, {}))
            for index in sorted(removed(scope, match.index, way)):
                line = scope.source_line(scope.eqns[index])
                if line is not None:
                    lines[line] = None
            return way

        return replace(p, replace=replaced)

    def annotated(self, report: Report) -> Report:
        """A report whose sites know their lines."""

        def lines(site: Any) -> tuple[str, ...]:
            found = self._found.get((site.pass_name, site.equation, site.source, site.scope))
            return () if found is None else tuple(found[1])

        return replace(report, sites=tuple(replace(s, lines=lines(s)) for s in report.sites))
