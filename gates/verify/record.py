"""Keep, while a program is rewritten, what each site was and what came in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat import jaxprs
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...lowering.cost.measurement import ONE_WAY
from ...matchers.dataflow import Dataflow
from ...passes.base import Accepted, Match, Pass, Replacement, Site, Whole
from ...passes.engine.fragments import Cut, Region, Uncut, cut
from ...passes.frozen import Request
from .ancestry import Ancestry, ancestry
from .shared import Shared


@dataclass(frozen=True)
class Piece:
    """A site, cut out: two functions of the same kind, and what is known of their inputs."""

    region: Region
    ancestry: Ancestry
    digest: str
    """Equal for sites at which the same is known, stands and is put."""

    @property
    def before(self) -> Cut:
        """What stood there."""
        return self.region.before

    @property
    def after(self) -> Cut:
        """What came in its place."""
        return self.region.after[ONE_WAY]


@dataclass(frozen=True)
class Kept:
    """One rewrite, as it was made."""

    rewrite: Pass
    match: Match
    way: Replacement
    piece: Piece | None
    why: str | None
    """Why there is no piece."""
    mutants: Mapping[str, Piece] = field(default_factory=dict)
    shared: str | None = None
    """How what is put there differs from what it needs: it shares that with another site."""


@dataclass
class Recorder:
    """What the passes put in place, in the order in which they did."""

    mutants: bool = False
    """Cut out the passes' own mutants too."""
    kept: dict[tuple[Any, ...], list[Kept]] = field(default_factory=dict)
    whole: dict[str, tuple[Pass, Body, Request]] = field(default_factory=dict)
    """For passes that judge a whole program, what they were given."""
    program: Body | None = None
    """The program before any rewrite."""
    _objects: list[Any] = field(default_factory=list)
    _shared: Shared = field(default_factory=Shared)

    def recording(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes as they are, each noting what it does."""
        return tuple(self._noting_whole(p) if p.program else self._noting(p) for p in passes)

    def _noting_whole(self, p: Pass) -> Pass:
        judge = p.program
        assert judge is not None

        def judged(flow: Dataflow, request: Request) -> Whole | None:
            self.whole[p.name] = p, flow.root.body, request
            return judge(flow, request)

        return replace(p, program=judged)

    def of(self, site: Site) -> list[Kept]:
        """The rewrites that an applied site of the report stands for."""
        return self.kept.get((site.pass_name, site.equation, site.source), [])

    def _noting(self, p: Pass) -> Pass:
        def taken(match: Match) -> Replacement:
            way = p.replace(match)
            if way.wants is None:
                self._keep(p, match, way)
            return way

        return replace(p, replace=taken)

    def _keep(self, p: Pass, match: Match, way: Replacement) -> None:
        path = match.scope.path()
        self.program = self.program or (path[0].scope if path else match.scope).body
        piece, why, mutants = None, None, {}
        try:
            piece = cut_piece(match, way)
        except Uncut as reason:
            why = str(reason)
        if piece is not None and self.mutants:
            mutants = _mutants(p, match, way)
        shared = self._shared.fault(Accepted(match, way, p))
        made = Kept(p, match, way, piece, why, mutants, shared)
        eqn = match.eqn
        key = p.name, id(eqn), match.scope.source_line(eqn)
        self._objects.append(eqn)
        known = self.kept.setdefault(key, [])
        if not any(_alike(made, k) for k in known):
            known.append(made)


def _alike(a: Kept, b: Kept) -> bool:
    if a.shared != b.shared:
        return False
    if a.piece is None or b.piece is None:
        return a.piece is b.piece and a.why == b.why
    return a.piece.digest == b.piece.digest


def _mutants(p: Pass, match: Match, way: Replacement) -> dict[str, Piece]:
    """The pass's own mutants of a rewrite; one that doesn't apply here returns None."""
    found = {}
    for name, mutate in p.mutants.items():
        changed = mutate(match, way)
        if changed is not None:
            found[name] = cut_piece(match, changed)
    return found


def cut_piece(match: Match, way: Replacement) -> Piece:
    """A site and its rewrite, with what their inputs are made of.

    Raises:
        Uncut: it can't be run by itself.
    """
    region = cut(match, {ONE_WAY: way}, in_kernels=True)
    inputs = dict.fromkeys((*region.before.inputs, *region.after[ONE_WAY].inputs))
    found = ancestry(match.scope, inputs)
    renamed = {v: a for v, a in found.aliases.items() if a is not v}
    if renamed:
        after = {name: _renamed(c, renamed) for name, c in region.after.items()}
        region = replace(region, before=_renamed(region.before, renamed), after=after)
    return Piece(region, found, _digest(region, found))


def _renamed(part: Cut, names: Mapping[Var, Atom]) -> Cut:
    eqns = tuple(jaxprs.substitute(e, names) for e in part.eqns)
    read = [names.get(v, v) for v in part.inputs]
    inputs = dict.fromkeys(a for a in read if jaxprs.is_var(a))
    outputs = tuple(names.get(a, a) if jaxprs.is_var(a) else a for a in part.outputs)
    return Cut(eqns, tuple(inputs), outputs)


def _digest(region: Region, found: Ancestry) -> str:
    numbers: dict[Var, int] = {}

    def atom(a: Atom) -> str:
        if jaxprs.is_literal(a):
            return f"{a.val!r}:{a.aval}"
        return f"{numbers.setdefault(a, len(numbers))}:{a.aval}"

    def eqn(e: Eqn) -> str:
        params = " ".join(f"{k}={v}" for k, v in sorted(e.params.items()))
        outs, ins = (" ".join(map(atom, atoms)) for atoms in (e.outvars, e.invars))
        return f"{outs} = {e.primitive.name}[{params}] {ins}"

    lines = [str(region.manual)]
    for part in (region.before, region.after[ONE_WAY]):
        lines += [atom(v) + str(found.facts.get(v)) for v in part.inputs]
        lines += [*map(eqn, part.eqns), *map(atom, part.outputs)]
    lines += [eqn(s.eqn) for s in found.steps]
    lines += [f"{atom(v)} {f}" for v, f in found.facts.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
