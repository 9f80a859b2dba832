"""Carry a changed type downstream: values that turn out to vary over a mesh axis.

Inside `shard_map`, jax types a sorted iota as the same on every device even where the keys differ,
because each operand of a sort keeps its own varying axes. A replacement that computes the order
from the keys is typed truthfully, so every reader has to be typed again, to a fixed point; a
program left half way passes jax's checks, runs, and fails only when it is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...compat import bodies as compat_bodies
from ...compat import jaxprs, tracing, vma
from ...compat.bodies import Entered, Flow, Role
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...compat.mesh_types import told_apart
from ..base import Accepted, Reason, SiteDeclined
from .check import check_rewritten

_MAX_ROUNDS = 8


def _decline(found: str, wanted: str) -> SiteDeclined:
    return SiteDeclined(
        Reason(
            "vma-change",
            "the rewritten value varies over a mesh axis where the original was typed invariant",
            found,
            wanted,
        )
    )


@dataclass
class Retyper:
    """Re-derives the types of equations that read a retyped value, in one body."""

    active: bool = False
    blamed: list[Accepted] = field(default_factory=list)
    """The sites that changed a type."""
    renames: list[dict[Var, Atom]] = field(default_factory=list)
    """What was renamed in bodies further in."""
    _retyped: set[Var] = field(default_factory=set)

    def changed(self, var: Var, value: Atom, site: Accepted) -> None:
        """Record that ``value``, of another type, now stands for ``var``."""
        self.blamed.append(site)
        if not vma.differs_only_in_varying(var.aval, value.aval):
            raise SiteDeclined(
                Reason(
                    "type-change",
                    f"the replacement by {site.rewrite.name} has another type",
                    *told_apart(value.aval, var.aval),
                )
            )
        self.mark(value)

    def mark(self, value: Atom) -> None:
        """Readers of ``value`` are to be typed again."""
        self.active = True
        if jaxprs.is_var(value):
            self._retyped.add(value)

    def equation(self, eqn: Eqn, renamed: dict[Var, Atom]) -> list[Eqn]:
        """``eqn``, typed again where it reads a retyped value."""
        if not self._retyped or not any(
            jaxprs.is_var(a) and a in self._retyped for a in eqn.invars
        ):
            return [eqn]
        if eqn.primitive is vma.pvary_p:
            return self._pvary(eqn, renamed)
        carried = compat_bodies.carried(eqn)
        if carried.entered or any(n.body is not None for n in carried.not_entered):
            return self._carrier(eqn, carried.entered, renamed)
        with eqn.ctx.manager:
            try:
                outs = _out_avals(eqn, [a.aval for a in eqn.invars])
                before: list[Eqn] = []
            except Exception:  # jax raises TypeError, ValueError or its own, by primitive
                before, operands = _vary_together(eqn)
                eqn = eqn.replace(invars=operands)
                outs = _out_avals_or_decline(eqn, [a.aval for a in operands])
        return [*before, self._bind(eqn, outs, renamed)]

    def carrier(self, old: Eqn, new: Eqn, renamed: dict[Var, Atom]) -> list[Eqn]:
        """``new``, which is ``old`` with rewritten bodies, with its results typed by them."""
        if any(jaxprs.is_var(a) and a in self._retyped for a in new.invars):
            return self.equation(new, renamed)
        entered = compat_bodies.carried(new).entered
        for e in entered:
            for port, atom in zip(e.outputs, jaxprs.opened(e.body).outvars, strict=True):
                if port.outer is None:
                    continue
                gained = vma.varying(atom.aval) - vma.varying(old.outvars[port.outer].aval)
                if port.flow is Flow.SHARD:
                    _check_spec(port.spec, gained)
                elif gained:
                    return self._carrier(new, entered, renamed)
        return [new]

    def _bind(self, eqn: Eqn, outs: Sequence[Any], renamed: dict[Var, Atom]) -> Eqn:
        outvars: list[Var] = []
        for var, aval in zip(eqn.outvars, outs, strict=True):
            if aval == var.aval:
                outvars.append(var)
                continue
            if not vma.differs_only_in_varying(var.aval, aval):
                raise _decline(f"{aval.str_short()} from {eqn.primitive.name}",
                               f"{var.aval.str_short()} but for varying axes")  # fmt: skip
            if jaxprs.is_dropped(var):
                outvars.append(jaxprs.dropped(aval))
                continue
            fresh = jaxprs.new_var(aval)
            renamed[var] = fresh
            self.mark(fresh)
            outvars.append(fresh)
        return eqn.replace(outvars=outvars)

    def _pvary(self, eqn: Eqn, renamed: dict[Var, Atom]) -> list[Eqn]:
        """A pvary has only the axes left to add that its operand doesn't vary over yet."""
        (operand,), (var,) = eqn.invars, eqn.outvars
        left = frozenset(eqn.params["axes"]) - vma.varying(operand.aval)
        new, (value,) = tracing.inline(lambda x: [vma.pvary(x, left)], [operand], eqn)
        renamed[var] = value
        if value.aval != var.aval:
            self.mark(value)
        return new

    def _carrier(self, eqn: Eqn, entered: Sequence[Entered], renamed: dict[Var, Atom]) -> list[Eqn]:
        plain = {Role.CALL, Role.LOOP, Role.PREDICATE}
        flows = {p.flow for e in entered for p in (*e.inputs, *e.outputs)}
        known = bool(entered) and all(e.role in plain for e in entered)
        simple = known and flows <= {Flow.SAME, Flow.CARRY, Flow.SLICE}
        if not simple or len(entered) != 1 or compat_bodies.carried(eqn).not_entered:
            raise _decline(
                f"it reaches {eqn.primitive.name}", "only readers that can be typed again"
            )
        (e,) = entered
        wanted = [
            vma.varying(v.aval)
            if p.outer is None
            else vma.varying(v.aval) | vma.varying(eqn.invars[p.outer].aval)
            for v, p in zip(jaxprs.invars(e.body), e.inputs, strict=True)
        ]
        for _ in range(_MAX_ROUNDS):
            body, outs = retype_body(e.body, wanted, self.renames)
            grown = list(wanted)
            for port, aval in zip(e.outputs, outs, strict=True):
                if port.flow is Flow.CARRY:
                    at = _carry_input(e, port.outer)
                    grown[at] = grown[at] | vma.varying(aval)
            if grown == wanted:
                break
            wanted = grown
        else:
            raise _decline(f"no fixed point after {_MAX_ROUNDS} rounds", "a fixed point")
        if any(
            p.flow is Flow.CARRY and vma.varying(a) != wanted[_carry_input(e, p.outer)]
            for p, a in zip(e.outputs, outs, strict=True)
        ):
            raise _decline("a carried value that becomes invariant", "one that stays varying")
        before, operands = _vary_operands(eqn, e, wanted)
        typed = compat_bodies.with_bodies(eqn.replace(invars=operands), {e.key: body})
        results = [
            vma.with_varying(var.aval, _result_axes(e, outs, i, var))
            for i, var in enumerate(eqn.outvars)
        ]
        return [*before, self._bind(typed, results, renamed)]


def retype_body(
    body: Body, axes: Sequence[frozenset[str]], renames: list[dict[Var, Atom]] | None = None
) -> tuple[Body, list[Any]]:
    """``body`` with inputs that vary over ``axes``, and the types of its outputs.

    What gets another name in it is added to ``renames``.
    """
    jaxpr = jaxprs.opened(body)
    retyper = Retyper(renames=[] if renames is None else renames)
    renamed: dict[Var, Atom] = {}
    retyper.renames.append(renamed)
    invars: list[Var] = []
    for var, wanted in zip(jaxprs.invars(body), axes, strict=True):
        aval = vma.with_varying(var.aval, wanted)
        if aval == var.aval:
            invars.append(var)
            continue
        fresh = jaxprs.new_var(aval)
        renamed[var] = fresh
        retyper.mark(fresh)
        invars.append(fresh)
    if not renamed:
        return body, [a.aval for a in jaxpr.outvars]
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        eqns.extend(retyper.equation(jaxprs.substitute(eqn, renamed), renamed))
    outvars = [renamed.get(a, a) if jaxprs.is_var(a) else a for a in jaxpr.outvars]
    typed = jaxprs.rebuild(body, eqns=eqns, outvars=outvars, invars=invars)
    check_rewritten(typed, body, retyped=True)
    return typed, [a.aval for a in outvars]


def _check_spec(spec: Any, gained: frozenset[str]) -> None:
    """A result may leave shard_map along the axes it varies over, or not at all."""
    named = {a for part in spec for a in (part if isinstance(part, tuple) else (part,))}
    if not gained <= named:
        raise _decline(f"it leaves shard_map by out_specs {spec}", f"a spec naming {set(gained)}")


def _carry_input(entered: Entered, result: int | None) -> int:
    """The input that receives what carried output ``result`` returns."""
    carried = [i for i, p in enumerate(entered.inputs) if p.flow is Flow.CARRY]
    return carried[result or 0]


def _result_axes(entered: Entered, outs: Sequence[Any], result: int, var: Var) -> frozenset[str]:
    for port, aval in zip(entered.outputs, outs, strict=True):
        if port.outer == result:
            return vma.varying(aval)
    return vma.varying(var.aval)


def _out_avals(eqn: Eqn, avals: Sequence[Any]) -> list[Any]:
    outs, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _out_avals_or_decline(eqn: Eqn, avals: Sequence[Any]) -> list[Any]:
    try:
        return _out_avals(eqn, avals)
    except Exception as fault:
        said = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise _decline(
            f"{eqn.primitive.name} refuses it: {said}", "a reader that takes it"
        ) from None


def _cast(eqn: Eqn, atom: Atom, axes: frozenset[str]) -> tuple[list[Eqn], Atom]:
    if np.issubdtype(atom.aval.dtype, np.inexact) or not _is_builtin(atom.aval.dtype):
        # A cast's transpose is a psum: it would move a reduction in the gradient.
        raise _decline(
            f"{eqn.primitive.name} also reads {atom.aval.str_short()}, which is invariant",
            "integer operands only",
        )
    new, (value,) = tracing.inline(lambda x: [vma.pvary(x, axes)], [atom], eqn)
    return new, value


def _is_builtin(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_)


def _vary_together(eqn: Eqn) -> tuple[list[Eqn], list[Atom]]:
    """Casts that make all operands of an equation vary over the same axes."""
    union = frozenset().union(*(vma.varying(a.aval) for a in eqn.invars))
    new: list[Eqn] = []
    operands: list[Atom] = []
    for atom in eqn.invars:
        missing = union - vma.varying(atom.aval)
        if missing and not jaxprs.is_literal(atom):
            made, atom = _cast(eqn, atom, missing)
            new.extend(made)
        elif missing:
            made, (atom,) = tracing.inline(lambda x, m=missing: [vma.pvary(x, m)], [atom], eqn)
            new.extend(made)
        operands.append(atom)
    return new, operands


def _vary_operands(
    eqn: Eqn, entered: Entered, wanted: Sequence[frozenset[str]]
) -> tuple[list[Eqn], list[Atom]]:
    operands = list(eqn.invars)
    new: list[Eqn] = []
    for port, axes in zip(entered.inputs, wanted, strict=True):
        if port.outer is None:
            continue
        missing = axes - vma.varying(operands[port.outer].aval)
        if missing:
            made, operands[port.outer] = _cast(eqn, operands[port.outer], missing)
            new.extend(made)
    return new, operands
