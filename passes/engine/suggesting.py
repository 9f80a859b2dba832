"""What to change in the source for each site, noted while a program is rewritten.

An expression of the source may be run by several calls, of which a pass rewrites some. So every
equation that was looked at is noted by the expression it was traced from: an edit of the expression
is offered only where all of them were rewritten, and in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat.jaxprs import Eqn
from ...compat.source import source_span
from ...matchers.graph import Scope
from ..base import Match, Pass, Replacement, Site, Status
from ..report import Report
from ..suggestion import Edit, Span, Suggestion

_Instance = tuple[int, int]
"""An equation in one context: the scope's id, and where in it."""


@dataclass
class Suggesting:
    """The suggestions for the sites of one program."""

    _root: Scope | None = None
    """The program before anything was rewritten."""
    _held: list[Scope] = field(default_factory=list)
    _looked_at: dict[tuple[Span, Any], dict[_Instance, None]] = field(default_factory=dict)
    """By expression and primitive."""
    _done: dict[_Instance, tuple[str, Suggestion]] = field(default_factory=dict)
    _sites: dict[tuple[Any, ...], tuple[Match, Suggestion]] = field(default_factory=dict)
    _of_pass: dict[str, str] = field(default_factory=dict)

    def noting(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes, as they are but that what they would suggest is noted."""
        return tuple(self._noting(p) for p in passes)

    def _noting(self, p: Pass) -> Pass:
        suggest = p.suggest
        if suggest is None or isinstance(suggest, str):
            self._of_pass[p.name] = suggest or f"write what {p.name} makes of it: {p.summary}"

        def found(scope: Scope, index: int) -> Any:
            self._look_at(scope, index)
            return p.find(scope, index)

        def replaced(match: Match) -> Replacement:
            said = suggest(match) if callable(suggest) else Suggestion(self._of_pass[p.name])
            self._note(p, match, said)
            return p.replace(match)

        return replace(p, find=found, replace=replaced)

    def _look_at(self, scope: Scope, index: int) -> None:
        root = _root(scope)
        if self._root is None or (root is not self._root and root.body is self._root.body):
            self._root = root  # analysed anew, with more calls told apart
            self._looked_at.clear()
            self._done.clear()
        if root.body is not self._root.body:
            return  # what a rewrite put in place has the expression of what it replaces
        self._held.append(scope)  # so that its id stays its own
        eqn = scope.eqns[index]
        for span in _spans(scope, eqn):
            self._looked_at.setdefault((span, eqn.primitive), {})[id(scope), index] = None

    def _note(self, p: Pass, match: Match, said: Suggestion) -> None:
        scope, eqn = match.scope, match.eqn
        spans = tuple(dict.fromkeys(_spans(scope, eqn)))
        key = (p.name, id(eqn), scope.source_line(eqn), scope.name_stack(eqn))
        self._sites[key] = match, replace(said, span=spans[0] if spans else None)
        self._done[id(scope), match.index] = p.name, replace(said, spans=spans)

    def annotated(self, report: Report) -> Report:
        """A report whose applied sites have their suggestions, and that knows of expressions."""

        def of(site: Site) -> Suggestion | None:
            if site.status is not Status.APPLIED:
                return None
            found = self._sites.get((site.pass_name, site.equation, site.source, site.scope))
            if found is not None:
                return found[1]
            sentence = self._of_pass.get(site.pass_name)
            return None if sentence is None else Suggestion(sentence)

        sites = tuple(replace(s, suggestion=of(s)) for s in report.sites)
        return replace(report, sites=sites, expressions=tuple(self._expressions()))

    def _expressions(self) -> Iterator[dict[str, Any]]:
        """Each expression of an applied site, with its edits, or why it is left as it is.

        Of the others that were looked at, that they were, without a pass.
        """
        told: set[tuple[Span, str]] = set()
        for (span, primitive), instances in self._looked_at.items():
            done = [self._done.get(i) for i in instances]
            names = dict.fromkeys(d[0] for d in done if d is not None)
            if not names:
                yield _told(None, span, (), None)
                continue
            edits = dict.fromkeys(d[1].edits for d in done if d is not None)
            why = None
            if any(d is None for d in done):
                why = f"not every {primitive.name} that it runs is rewritten"
            elif len(names) > 1 or len(edits) > 1:
                why = "its calls are rewritten in different ways"
            elif not next(iter(edits)):
                why = "the change isn't mechanical"
            name = next(iter(names))
            told.update((span, n) for n in names)
            givens = (e.given for d in done if d is not None for e in d[1].edits)
            yield _told(name, span, () if why else next(iter(edits)), why, givens)
        for name, said in self._done.values():
            for span in said.spans:
                if said.edits and (span, name) not in told:
                    told.add((span, name))
                    why = "it was rewritten after something else had been"
                    yield _told(name, span, (), why)


def _told(
    name: str | None, span: Span, edits: Sequence[Edit], why: str | None, given: Iterable[str] = ()
) -> dict[str, Any]:
    return {
        "pass": name,
        "span": span.to_json(),
        "edits": [e.to_json() for e in edits],
        "why": why,
        "given": [text for text in dict.fromkeys(given) if text],
    }


def _root(scope: Scope) -> Scope:
    path = scope.path()
    return path[0].scope if path else scope


def _spans(scope: Scope, eqn: Eqn) -> Iterator[Span]:
    """Where an equation was written; of one that knows no line, every call that it stands in."""
    found = source_span(eqn)
    if found is not None:
        yield Span(*found)
        return
    for caller in scope.callers:
        yield from _spans(caller.scope, caller.scope.eqns[caller.index])
