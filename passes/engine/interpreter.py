"""Splice accepted replacements into nested jaxprs, touching nothing else.

Every equation outside a site keeps its object, unless it reads a value that now comes from
somewhere else or carries a body in which something changed. A body shared by several equations is
rewritten once and stays shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import edit, jaxprs, tracing, vma
from ...compat.claims import claim_p
from ...compat.jaxprs import Atom, Body, Eqn, Jaxpr, Var
from ...compat.mesh_types import differs_only_in_mesh
from ...compat.source import is_kept
from ...matchers.facts import Splice
from ...matchers.graph import Scope
from ..base import Accepted, Match, Reason, Replacement, SiteDeclined
from .check import check_actions, check_equations, check_rewritten
from .order import order_of
from .retype import Retyper
from .sharing import trace_key, varying_at_least, what_is_done


@dataclass(frozen=True)
class Rewritten:
    """A body after substitution."""

    body: Body
    unread: frozenset[int]
    """Inputs that were read before and are not any more."""
    blamed: tuple[Accepted, ...] = ()
    """The sites whose replacements changed a type that readers had to follow."""


_Signature = int
"""Names a body together with all that is done in and below it; 0 where nothing is done."""


@dataclass
class Interpreter:
    """Rewrites all scopes below a root."""

    accepted: Mapping[tuple[int, int], Accepted]
    """By ``(id(scope), index of the root equation)``."""
    origins: list[tuple[Body, Scope]] = field(default_factory=list)
    """Rewritten bodies, each with a scope that it was made from."""
    splices: list[Splice] = field(default_factory=list)
    """What was put in place, and what it is a copy of."""
    replaced: list[tuple[Accepted, list[Eqn]]] = field(default_factory=list)
    """The sites that were replaced, with what stands there now."""
    renames: list[dict[Var, Atom]] = field(default_factory=list)
    """What got another name, in each body."""
    _by_scope: dict[int, dict[int, Accepted]] = field(init=False)
    _signatures: dict[int, _Signature] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], _Signature] = field(default_factory=dict)
    _done: dict[_Signature, Rewritten] = field(default_factory=dict)
    _narrowed: dict[tuple[int, frozenset[int]], Body] = field(default_factory=dict)
    _traces: dict[tuple[object, ...], Jaxpr] = field(default_factory=dict)
    """Replacements that were traced, by all that they depend on."""
    _within: tuple[int, ...] = ()
    """The shard_maps and kernels, by identity, in whose bodies a replacement is traced."""
    _keep: list[object] = field(default_factory=list)
    """Objects whose ids are keys."""

    def __post_init__(self) -> None:
        """Group the sites by scope."""
        self._by_scope = {}
        for (scope, index), site in self.accepted.items():
            self._by_scope.setdefault(scope, {})[index] = site

    def again(self, accepted: Mapping[tuple[int, int], Accepted]) -> Interpreter:
        """An interpreter for fewer sites; what was done in bodies without the others is kept."""
        return replace(self, accepted=accepted, _signatures={})

    def rewrite(self, scope: Scope) -> Rewritten:
        """The scope's body with every accepted site below it substituted.

        Scopes of one body in which the same is done share one result, whatever their facts.
        """
        signature = self._signature(scope)
        if not signature:
            return Rewritten(scope.body, frozenset())
        known = self._done.get(signature)
        if known is None:
            known = self._done[signature] = self._rewrite(scope)
        self.origins.append((known.body, scope))
        return known

    def _signature(self, scope: Scope) -> _Signature:
        known = self._signatures.get(id(scope))
        if known is not None:
            return known
        self._keep.append(scope)
        sites = self._by_scope.get(id(scope), {})
        local = tuple((i, *what_is_done(site)) for i, site in sorted(sites.items()))
        below = tuple(
            (index, key, signature)
            for index, children in scope.children.items()
            for key, child in children.items()
            if (signature := self._signature(child))
        )
        number = 0
        if local or below:
            number = self._numbers.setdefault(
                (id(scope.body), local, below), len(self._numbers) + 1
            )
        self._signatures[id(scope)] = number
        return number

    def _rewrite(self, scope: Scope) -> Rewritten:
        jaxpr = jaxprs.opened(scope.body)
        emitted: list[Eqn] = []
        places: list[int] = []
        renamed: dict[Var, Atom] = {}
        retyper = Retyper(renames=self.renames)
        self.renames.append(renamed)
        sites = self._by_scope.get(id(scope), {})
        changed = False
        first = len(self.splices)
        try:
            for index in order_of(jaxpr.eqns, sites):
                eqn = jaxpr.eqns[index]
                if index in sites:
                    new = self._substitute(sites[index], renamed, retyper)
                elif index in scope.children:
                    new = self._carry_over(scope, index, eqn, renamed, retyper)
                elif retyper.active:
                    new = retyper.equation(jaxprs.substitute(eqn, renamed), renamed)
                else:
                    same = jaxprs.substitute(eqn, renamed) if renamed else eqn
                    changed = changed or same is not eqn
                    emitted.append(same)
                    places.append(index)
                    continue
                changed = changed or len(new) != 1 or new[0] is not eqn
                emitted += new
                places += [index] * len(new)
        except SiteDeclined as declined:
            declined.blamed = declined.blamed or tuple(retyper.blamed)
            raise
        if not changed:
            return Rewritten(scope.body, frozenset())
        outvars = [renamed.get(a, a) if jaxprs.is_var(a) else a for a in jaxpr.outvars]
        was_live, before = _live(jaxpr.eqns, jaxpr.outvars)
        if scope.in_kept:
            was_live = set()
        spliced = [eqn for splice in self.splices[first:] for eqn in splice.eqns]
        gone = _without_a_successor(jaxpr.eqns, sites, spliced, renamed)
        eqns, after = _prune(was_live, places, emitted, outvars, gone)
        _check_unused_readers(gone, after)
        body = jaxprs.rebuild(scope.body, eqns=eqns, outvars=outvars)
        copies = set(map(id, spliced))
        check_rewritten(body, scope.body, retyped=retyper.active, copies=copies)
        unread = frozenset(
            i for i, v in enumerate(jaxprs.invars(body)) if v in before and v not in after
        )
        return Rewritten(body, unread, tuple(retyper.blamed))

    def _carry_over(
        self, scope: Scope, index: int, eqn: Eqn, renamed: dict[Var, Atom], retyper: Retyper
    ) -> list[Eqn]:
        """An equation outside every site: the same object unless something in it changed."""
        results = self._rewrite_children(scope, index, eqn)
        changed = {
            key: done.body
            for key, done in results.items()
            if done.body is not scope.children[index][key].body
        }
        new = jaxprs.substitute(eqn, renamed)
        if not changed:
            return retyper.equation(new, renamed)
        new = compat_bodies.with_bodies(new, changed)
        retyper.blamed.extend(s for done in results.values() for s in done.blamed)
        *casts, new = retyper.carrier(eqn, new, renamed)
        new = edit.drop_unread(new, {k: r.unread for k, r in results.items()}, self._narrow)
        return [*casts, new]

    def _rewrite_children(
        self, scope: Scope, index: int, eqn: Eqn
    ) -> dict[compat_bodies.BodyKey, Rewritten]:
        children = scope.children.get(index)
        if not children:
            return {}
        signatures = [self._signature(child) for child in children.values()]
        if not any(signatures):
            return {}
        if all(s == 0 or s in self._done for s in signatures):
            return {key: self.rewrite(child) for key, child in children.items()}
        outside = self._within
        if tracing.is_place(eqn):
            self._within = (*outside, id(eqn))
        try:
            with tracing.inside(eqn):
                return {key: self.rewrite(child) for key, child in children.items()}
        finally:
            self._within = outside

    def _substitute(self, site: Accepted, renamed: dict[Var, Atom], retyper: Retyper) -> list[Eqn]:
        """The equations that replace a site's root."""
        eqn, replacement = site.match.eqn, site.replacement
        operands = [renamed.get(a, a) if jaxprs.is_var(a) else a for a in replacement.operands]
        fn = replacement.fn
        if fn is None and all(map(_same_type, operands, replacement.results)):
            check_actions(site, ())
            renamed.update(zip(replacement.results, operands, strict=True))
            return []
        traced = self._traced(site, operands, fn or _as_they_are)
        new, values = tracing.splice(traced, operands, eqn, replacement.results)
        check_actions(site, new)
        self.splices.append(Splice(traced, operands, new, replacement.results))
        self.replaced.append((site, new))
        if len(values) != len(replacement.results):
            raise ValueError(
                f"{site.rewrite.name} returned {len(values)} values, "
                f"wanted {len(replacement.results)}"
            )
        for var, value in zip(replacement.results, values, strict=True):
            if value is var:
                continue
            if value.aval != var.aval and not differs_only_in_mesh(value.aval, var.aval):
                retyper.changed(var, value, site)
            renamed[var] = value
        return new

    def _traced(
        self, site: Accepted, operands: Sequence[Atom], fn: Callable[..., Sequence[Any]]
    ) -> Jaxpr:
        """The replacement as a jaxpr, traced once for all sites where it must be the same."""
        replacement, scope = site.replacement, site.match.scope
        eqns = [scope.eqns[i] for i in (site.match.index, *replacement.also)]
        key = trace_key(site.rewrite.name, site.match, replacement, operands, self._within)
        known = self._traces.get(key)
        if known is None:
            self._keep.extend(eqns)
            axes = [vma.varying(v.aval) for v in replacement.results]
            known = tracing.trace_replacement(varying_at_least(fn, axes), operands, site.match.eqn)
            check_equations(known.eqns)
            self._traces[key] = known
        return known

    def _narrow(self, body: Body, dropped: frozenset[int]) -> Body:
        """``body`` without some unread inputs; one object per body and set of inputs."""
        key = (id(body), dropped)
        known = self._narrowed.get(key)
        if known is None:
            self._keep.append(body)
            kept = [v for i, v in enumerate(jaxprs.invars(body)) if i not in dropped]
            known = self._narrowed[key] = jaxprs.rebuild(body, invars=kept)
            self.origins += [(known, scope) for made, scope in self.origins if made is body]
        return known


def replacement_equations(match: Match, replacement: Replacement) -> tuple[list[Eqn], list[Atom]]:
    """The equations that would replace a site's root, and the atoms that hold its results.

    They are traced under the axes of the bodies around the site, as for the rewrite itself.
    """
    operands = list(replacement.operands)
    if replacement.fn is None:
        return [], operands
    with contextlib.ExitStack() as stack:
        for caller in match.scope.path():
            stack.enter_context(tracing.inside(caller.scope.eqns[caller.index]))
        axes = [vma.varying(v.aval) for v in replacement.results]
        return tracing.inline(varying_at_least(replacement.fn, axes), operands, match.eqn)


def _as_they_are(*operands: Any) -> Sequence[Any]:
    return operands


def _same_type(a: Atom, b: Atom) -> bool:
    return bool(a.aval == b.aval)


def _live(eqns: Sequence[Eqn], outvars: Sequence[Atom]) -> tuple[set[int], set[Var]]:
    """Indices of equations with an effect or a reader, all outputs taken as read; what they read.

    Like the other loops over every equation of a body, it avoids a call per atom.
    """
    literal = jaxprs.LITERAL
    read = {a for a in outvars if type(a) is not literal}
    live: set[int] = set()
    for index in range(len(eqns) - 1, -1, -1):
        eqn = eqns[index]
        if not read.isdisjoint(eqn.outvars) or _acts(eqn):
            live.add(index)
            read.update([a for a in eqn.invars if type(a) is not literal])
    return live, read


def _acts(eqn: Eqn) -> bool:
    """Whether an equation does something besides its results; to name a mesh axis is nothing."""
    return bool(eqn.effects) and bool(jaxprs.true_effects(eqn))


def _stays(eqn: Eqn) -> bool:
    """Whether an equation is there to stay though nothing reads it."""
    return eqn.primitive is claim_p or is_kept(eqn)


def _without_a_successor(
    eqns: Sequence[Eqn],
    sites: Mapping[int, Accepted],
    spliced: Sequence[Eqn],
    renamed: Mapping[Var, Atom],
) -> dict[Var, Accepted]:
    """Results of replaced equations that no replacement gives, each with its site."""
    found = {
        v: site
        for index, site in sites.items()
        for i in (index, *site.replacement.also)
        for v in eqns[i].outvars
        if v not in renamed
    }
    if found:
        for eqn in spliced:  # no other equation binds what these bound
            for v in eqn.outvars:
                found.pop(v, None)
    return found


def _check_unused_readers(gone: Mapping[Var, Accepted], read: set[Var]) -> None:
    """Decline sites of which something still reads a value that isn't there any more.

    A pass looks at readers whose results somebody uses. Others stay where their results are
    outputs of the body, which no caller reads.
    """
    blamed = tuple({id(site): site for v, site in gone.items() if v in read}.values())
    if blamed:
        declined = SiteDeclined(Reason(
            "unused-reader", "an output of the body that nobody reads is computed from it",
            "a reader whose result is an output", "readers of which the rewrite knows",
        ))  # fmt: skip
        declined.blamed = blamed
        raise declined


def _prune(
    was_live: set[int],
    places: Sequence[int],
    emitted: Sequence[Eqn],
    outvars: Sequence[Atom],
    gone: Iterable[Var],
) -> tuple[list[Eqn], set[Var]]:
    """The emitted equations without those that the rewrite left with no reader; what they read.

    ``places`` tells which equation of the original stood where each of them does. Dead equations
    that read what is ``gone`` go as well.

    What was dead before stays where all that it reads is still there: it is not this rewrite's to
    remove, and no reason to keep what this rewrite has no more use for. What the user keeps stays.
    """
    literal = jaxprs.LITERAL
    read = {a for a in outvars if type(a) is not literal}
    gone = set(gone)
    kept: list[Eqn] = []
    unread: set[int] = set()
    for index, eqn in zip(reversed(places), reversed(emitted), strict=True):
        if not read.isdisjoint(eqn.outvars) or _acts(eqn) or _stays(eqn):
            read.update([a for a in eqn.invars if type(a) is not literal])
        elif index in was_live:
            gone.update(eqn.outvars)
            continue
        else:
            unread.add(len(kept))
        kept.append(eqn)
    if not unread:
        return kept[::-1], read
    eqns: list[Eqn] = []
    for position in range(len(kept) - 1, -1, -1):
        eqn = kept[position]
        if position in unread:
            operands = [a for a in eqn.invars if type(a) is not literal]
            if gone and not gone.isdisjoint(operands):
                gone.update(eqn.outvars)
                continue
            read.update(operands)
        eqns.append(eqn)
    return eqns, read
