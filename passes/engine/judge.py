"""A pass's verdict on one equation: no candidate, declined with reasons, or accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...compat import jaxprs
from ...compat.bodies import with_nested
from ...compat.jaxprs import Eqn, Var
from ...compat.source import any_kept
from ...matchers.graph import Scope
from ...matchers.pattern import Mismatch
from ..base import Accepted, Pass, Reason, Replacement, Site, Status
from ..disable import DISABLED
from .addresses import Addresses

AROUND = 3
"""Equations shown before and after one."""


@dataclass(frozen=True)
class Told:
    """What is known of sites besides what stands in the program."""

    refused: Mapping[tuple[Any, ...], Reason]
    """Why equations can't be substituted, as was seen on trying, by `refusal_key`."""
    addresses: Addresses | None
    put_in: set[Var] = field(default_factory=set)
    """What is bound by equations that rewrites of this program have put there."""
    stood_back: set[str] = field(default_factory=set)
    """Passes that had a site and left it to another pass first."""

    def is_ours(self, p: Pass, scope: Scope, index: int) -> bool:
        """Whether an equation was put there by a rewrite, or stands in a body of one that was.

        Followed by its results: they keep their names where an equation is renewed. For a pass that
        stood back, what another has made of its site is the user's still.
        """
        if not self.put_in:
            return False
        if not self.put_in.isdisjoint(scope.eqns[index].outvars):
            return p.name not in self.stood_back
        return self._stands_in_ours(scope)

    def _stands_in_ours(self, scope: Scope) -> bool:
        callers = scope.callers
        return bool(callers) and all(
            not self.put_in.isdisjoint(c.scope.eqns[c.index].outvars)
            or self._stands_in_ours(c.scope)
            for c in callers
        )

    def of(self, p: Pass, scope: Scope, index: int) -> tuple[str, ...]:
        """The addresses of an equation; none where nobody asked for any."""
        return () if self.addresses is None else self.addresses.of(p, scope, index)

    def is_off(self, p: Pass, scope: Scope, index: int) -> bool:
        """Whether a site is turned off."""
        return self.addresses is not None and self.addresses.is_off(p, scope, index)


def judge(
    p: Pass, scope: Scope, index: int, told: Told, symbolic: bool
) -> tuple[Site, Accepted | None] | None:
    """A pass's verdict on one equation; None where it is no candidate.

    ``symbolic`` is whether there are arrays of symbolic size in the program at all.
    """
    if symbolic:
        unknown = _symbolic_shape(scope.eqns[index])
        if unknown is not None:
            return replace(site_of(p, scope, index, told), reasons=(unknown,)), None
    match = p.find(scope, index)
    if match is None:
        return None
    site = site_of(p, scope, index, told)
    if isinstance(match, Mismatch):
        path = " → ".join(match.path)
        reason = Reason("near-miss", f"the pattern stopped at {path}", match.found, match.wanted)
        return replace(site, reasons=(reason,)), None
    reasons = [r for r in (q.check(match) for q in p.requirements) if r is not None]
    if not reasons and told.is_off(p, scope, index):
        reasons = [disabled(site.addresses)]
    if not reasons:
        unprofitable = p.profitable(match)
        reasons = [] if unprofitable is None else [unprofitable]
    if reasons:
        return replace(site, reasons=tuple(reasons)), None
    replacement = p.replace(match)
    earlier = told.refused.get(refusal_key(p, scope, index, replacement))
    if earlier is not None:
        return replace(site, reasons=(earlier,)), None
    kept = _kept(scope, (index, *replacement.also))
    if kept is not None:
        return replace(site, reasons=(kept,)), None
    elsewhere = _out_of_scope(p, scope, replacement)
    if elsewhere is not None:
        return replace(site, reasons=(elsewhere,)), None
    return replace(site, status=Status.APPLIED), Accepted(match, replacement, p)


def _out_of_scope(p: Pass, scope: Scope, replacement: Replacement) -> Reason | None:
    """Why a replacement can't be put in place: it names a value of another body."""
    if replacement.wants is not None:
        return None  # it is judged again with the value in scope
    for atom in replacement.operands:
        if jaxprs.is_literal(atom) or scope.definition(atom) or scope.position(atom) is not None:
            continue
        if atom in jaxprs.constvars(scope.body):
            continue
        return Reason("operand-out-of-scope", f"a fault of {p.name}: it reads a value of another "
                      "body without asking for it", atom.aval.str_short(short_dtypes=True),
                      "an operand in scope (relower.passes.reach), or wants=")  # fmt: skip
    return None


def _kept(scope: Scope, indices: Iterable[int]) -> Reason | None:
    """Why equations that a site would replace, bodies and all, stay at the user's wish."""
    for index in indices:
        eqn = scope.eqns[index]
        if scope.is_kept(index) or any_kept(with_nested([eqn])):
            where = scope.name_stack(eqn) or f"a body of {eqn.primitive.name}"
            return Reason("kept", "this stands in a function given to relower.keep", where,
                          "a place outside of it")  # fmt: skip
    return None


def _symbolic_shape(eqn: Eqn) -> Reason | None:
    """Why an equation on arrays of symbolic size, as in `jax.export`, is left alone."""
    for atom in (*eqn.invars, *eqn.outvars):
        if not sizes_known((atom,)):
            return Reason("symbolic-shape", "passes reason about sizes that are known",
                          atom.aval.str_short(short_dtypes=True), "a static shape")  # fmt: skip
    return None


def sizes_known(atoms: Iterable[Any]) -> bool:
    """Whether no dimension of any of ``atoms`` is a symbol."""
    return all(type(n) is int for a in atoms for n in getattr(a.aval, "shape", ()))


def disabled(addresses: Iterable[str]) -> Reason:
    """Why a site that is turned off is left alone."""
    return Reason(DISABLED, "this site is turned off", ", ".join(addresses),
                  "an address that isn't disabled")  # fmt: skip


def site_of(p: Pass, scope: Scope, index: int, told: Told) -> Site:
    """The site at an equation, declined for no reason yet."""
    eqn = scope.eqns[index]
    return Site(
        pass_name=p.name,
        status=Status.DECLINED,
        reasons=(),
        primitive=eqn.primitive.name,
        shape=eqn.outvars[-1].aval.str_short(short_dtypes=True),
        source=scope.source_line(eqn),
        scope=scope.name_stack(eqn),
        calls=scope.runs,
        equation=id(eqn),
        addresses=told.of(p, scope, index),
        around=() if told.addresses is None else _around(scope, index),
    )


def _around(scope: Scope, index: int) -> tuple[str, ...]:
    """The equation with what makes its operands and what reads its results, in program order."""
    eqn = scope.eqns[index]
    near = {index}
    for atom in eqn.invars:
        made = scope.definition(atom) if jaxprs.is_var(atom) else None
        near.update(() if made is None else (made[0],))
    for var in eqn.outvars:
        near.update(r for r in scope.readers(var)[:AROUND] if r >= 0)
    chosen = sorted(sorted(near, key=lambda i: abs(i - index))[: 2 * AROUND + 1])
    return tuple(f"{'>' if i == index else ' '} {_brief(scope.eqns[i])}" for i in chosen)


def _brief(eqn: Eqn) -> str:
    """As in ``sort(i32[512], i32[512]) → i32[512], i32[512]``; alike in every version of jax."""

    def types(atoms: Iterable[Any]) -> str:
        return ", ".join(a.aval.str_short(short_dtypes=True) for a in atoms)

    name = eqn.params.get("name")
    label = f"{eqn.primitive.name} {name}" if isinstance(name, str) else eqn.primitive.name
    return f"{label}({types(eqn.invars)}) → {types(eqn.outvars)}"


def refusal_key(
    p: Pass, scope: Scope, index: int, replacement: Replacement
) -> tuple[str, bool, tuple[int, ...]]:
    """Identifies what would be replaced, from one round to the next: equations keep their objects.

    Of an equation that is found again with others, as when a collective fits another group, or to
    which a value is at hand that had to be brought before, what was seen then says nothing.
    """
    equations = tuple(id(scope.eqns[i]) for i in (index, *replacement.also))
    return p.name, replacement.wants is not None, equations
