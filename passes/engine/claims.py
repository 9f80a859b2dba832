"""Have the optimized program check the facts that its rewrites leaned on.

Each rewrite leaves a mark that reads the values in question and returns nothing: no pattern sees
it. When all is rewritten, each body's marks become one equation that its outputs go through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import claims as compat_claims
from ...compat import jaxprs
from ...compat.assume_range import assume_range_p
from ...compat.bodies import Role, shard_map_primitive
from ...compat.claims import checked_p, claim_p
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...compat.mesh_types import a_mesh_is_set, is_explicit
from ...matchers.fact_check import Leaned, words
from ...matchers.graph import Scope, Value
from ..base import Match, Pass, Replacement, Whole
from .fragments import removed

NOT_CHECKED = "not checked"
"""How the notes begin that say what isn't."""


@dataclass
class Claims:
    """What the rewrites of one program leaned on."""

    notes: dict[str, None] = field(default_factory=dict)
    """What isn't checked, and why."""

    def claiming(self, passes: Iterable[Pass]) -> tuple[Pass, ...]:
        """The passes as they are, each marking what its rewrites lean on."""
        return tuple(self._noting(p) if p.program else self._claiming(p) for p in passes)

    def _claiming(self, p: Pass) -> Pass:
        return replace(p, replace=lambda match: self._marked(p, match, p.replace(match)))

    def _noting(self, p: Pass) -> Pass:
        judge = p.program
        assert judge is not None

        def judged(flow: Any, request: Any) -> Whole | None:
            found = judge(flow, request)
            if found is not None and found.demand is not None:
                self.notes[
                    f"{NOT_CHECKED}: what {p.name} took as known of masks and of the "
                    "declaration, which no one value shows"
                ] = None
            return found

        return replace(p, program=judged)

    def _marked(self, p: Pass, match: Match, way: Replacement) -> Replacement:
        """The replacement, with a mark that reads what it leans on."""
        if way.wants is not None:
            return way
        scope = match.scope
        site = f"{p.name} at {scope.whereabouts(match.eqn)}"
        values, claims = [], []
        for var in leaned_on(match, way):
            fact = scope.fact(var)
            said = words(fact, var.aval)
            if not said:
                continue
            what = f"{var.aval.str_short(short_dtypes=True)} {said}"
            why = _unchecked(scope, match.index, var)
            if why is not None:
                self.notes[f"{NOT_CHECKED}: {site} leaned on {what}; {why}"] = None
                continue
            values.append(var)
            claims.append(Leaned(fact, what, site))
        return with_mark(way, values, tuple(claims)) if claims else way


def with_mark(way: Replacement, values: Sequence[Var], claims: tuple[Leaned, ...]) -> Replacement:
    """A replacement that also reads ``values``, of which ``claims`` are made."""
    own, fn = len(way.operands), way.fn

    def marked(*operands: Any) -> Sequence[Any]:
        claim_p.bind(*operands[own:], claims=claims)
        return operands[:own] if fn is None else fn(*operands[:own])

    operands = (*way.operands, *values)
    return replace(way, operands=operands, fn=marked, key=(way.key, claims, own))


def leaned_on(match: Match, way: Replacement) -> list[Var]:
    """The values of which a rewrite may have taken something as known.

    They are what the site and its replacement read, what the pass has captured, and every value
    that the program states a range of and that goes with the site.
    """
    scope = match.scope
    site = sorted({*removed(scope, match.index, way), match.index, *way.also})
    made = {v for i in site for v in scope.eqns[i].outvars}
    atoms: list[Atom] = [*match.eqn.invars, *way.operands, *_captured(match)]
    for i in site:
        eqn = scope.eqns[i]
        atoms += [a for a in eqn.invars if jaxprs.is_var(a) and a not in made]
        atoms += eqn.outvars if eqn.primitive is assume_range_p else []
    return [a for a in dict.fromkeys(a for a in atoms if jaxprs.is_var(a)) if _is_array(a)]


def _captured(match: Match) -> list[Var]:
    found = []
    for captured in match.captures.values():
        if isinstance(captured, Value):
            captured = captured.atom if captured.scope.body is match.scope.body else None
        if jaxprs.is_var(captured) and _is_here(match.scope, captured):
            found.append(captured)
    return found


def _is_here(scope: Scope, var: Var) -> bool:
    bound = scope.definition(var) is not None or scope.position(var) is not None
    return bound or var in jaxprs.constvars(scope.body)


def _is_array(var: Var) -> bool:
    return hasattr(var.aval, "dtype") and not hasattr(var.aval, "inner_aval")


def _unchecked(scope: Scope, root: int, var: Var) -> str | None:
    """Why a value can't be checked at a site."""
    path = scope.path()
    if any(c.entered.role is Role.KERNEL for c in path):
        return "checkify doesn't reach into a kernel"
    split = [e for c in path if (e := c.scope.eqns[c.index]).primitive is shard_map_primitive()]
    if any(is_explicit(e.params["mesh"]) for e in split):
        return "jax's checkify can't enter a shard_map over Explicit axes"
    if split and a_mesh_is_set():
        return "jax's checkify can't enter a shard_map where a mesh is set around it"
    if not jaxprs.opened(scope.body).outvars:
        return "the body returns nothing that the check could go with"
    made = scope.definition(var)
    if made is not None and made[0] >= root:
        return "the value is made after the site"
    return None


def tied(closed: Body) -> Body:
    """The program with each body's marks made into a check that its outputs go through."""
    compat_claims.register_where_loaded()
    return _Tie().body(closed)


class _Tie:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Body, Body]] = {}

    def body(self, body: Body) -> Body:
        """A body and those below it; one that has no marks is the same object."""
        known = self._done.get(id(body))
        if known is None:
            known = self._done[id(body)] = body, self._body(body)
        return known[1]

    def _body(self, body: Body) -> Body:
        jaxpr = jaxprs.opened(body)
        marks = [e for e in jaxpr.eqns if e.primitive is claim_p]
        eqns = [self._carrier(e) for e in jaxpr.eqns if e.primitive is not claim_p]
        if not marks:
            same = all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
            return body if same else jaxprs.rebuild(body, eqns=eqns)
        eqns, marks, outvars = _without_statements(eqns, marks, jaxpr.outvars)
        check, renamed = _check(eqns, marks, outvars)
        outvars = [renamed.get(a, a) if jaxprs.is_var(a) else a for a in outvars]
        return jaxprs.rebuild(body, eqns=[*eqns, check], outvars=outvars)

    def _carrier(self, eqn: Eqn) -> Eqn:
        entered = compat_bodies.carried(eqn).entered
        made = {e.key: (e.body, self.body(e.body)) for e in entered}
        changed = {key: new for key, (old, new) in made.items() if new is not old}
        return compat_bodies.with_bodies(eqn, changed) if changed else eqn


def _without_statements(
    eqns: Sequence[Eqn], marks: Sequence[Eqn], outvars: Sequence[Atom]
) -> tuple[list[Eqn], list[Eqn], list[Atom]]:
    """The body without the ranges stated that a claim checks: its message names the site, too."""
    claimed: dict[Var, list[Leaned]] = {}
    for mark in marks:
        for atom, claim in zip(mark.invars, mark.params["claims"], strict=True):
            if jaxprs.is_var(atom):
                claimed.setdefault(atom, []).append(claim)
    kept: list[Eqn] = []
    renamed: dict[Var, Atom] = {}
    for eqn in eqns:
        if renamed:
            eqn = jaxprs.substitute(eqn, renamed)
        claims = claimed.get(eqn.outvars[0], ()) if eqn.primitive is assume_range_p else ()
        if any(c.fact.within(eqn.params["lo"], eqn.params["hi"]) for c in claims):
            renamed[eqn.outvars[0]] = eqn.invars[0]
        else:
            kept.append(eqn)
    marks = [jaxprs.substitute(m, renamed) for m in marks]
    return kept, marks, [renamed.get(a, a) if jaxprs.is_var(a) else a for a in outvars]


def _check(
    eqns: Sequence[Eqn], marks: Sequence[Eqn], outvars: Sequence[Atom]
) -> tuple[Eqn, dict[Var, Var]]:
    """One equation for all marks of a body, and the new names of the outputs.

    Of several facts that don't hold the first is told: that of the value made first, as of an
    index and not of a mask that was made of it.
    """
    made = {v: n for n, eqn in enumerate(eqns) for v in eqn.outvars}
    wanted: dict[tuple[Any, Leaned], Atom] = {}
    for mark in marks:
        for atom, claim in zip(mark.invars, mark.params["claims"], strict=True):
            key = id(atom) if jaxprs.is_var(atom) else repr(atom)
            wanted[key, claim] = atom
    first = sorted(
        wanted.items(), key=lambda one: made.get(one[1], -1) if jaxprs.is_var(one[1]) else -1
    )
    outs = list(dict.fromkeys(a for a in outvars if jaxprs.is_var(a) and _is_array(a)))
    new = {v: jaxprs.new_var(v.aval) for v in outs}
    claims = tuple(claim for (_, claim), _ in first)
    check = marks[0].replace(
        primitive=checked_p,
        invars=[*outs, *(atom for _, atom in first)],
        outvars=[new[v] for v in outs],
        params={"claims": claims, "skips": (0,) * len(claims)},
    )
    return check, new
