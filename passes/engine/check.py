"""Check rewritten jaxprs: scoping, types, effects and boundaries, in every nested body.

`jax.core.check_jaxpr` doesn't look into the bodies of scan, while, cond, custom derivatives or
Pallas kernels, so this module does, outside in, each body under the context it was traced in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import edit, jaxprs, tracing, vma
from ...compat.bodies import Entered, Flow, Port
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...compat.mesh_types import differs_only_in_mesh
from ..base import Accepted, Reason, SiteDeclined


class IllFormed(Exception):
    """A jaxpr that no rewrite may leave behind: a fault in a pass, never in the user's program."""


def check_rewritten(
    new: Body, old: Body, *, retyped: bool = False, copies: Collection[int] = ()
) -> None:
    """Check a body against the one it was made from.

    Equations that both share were checked when jax traced them. Scoping and effects are checked
    for all of them, types and boundaries for those that are new.

    Args:
      new: the rewritten body; its nested bodies have been checked before.
      old: the original.
      retyped: whether types may differ in their varying axes.
      copies: new equations, by identity, that differ in nothing but the names of their variables
        from others that `check_equations` has seen.

    Raises:
      IllFormed: with what was found and what was wanted.
    """
    _check_interface(new, old, retyped)
    _check_scoping(new)
    _check_effects(new)
    _check_same_effects(new, old)
    before = jaxprs.opened(old).eqns
    known = {id(eqn) for eqn in before}
    known.update(copies)
    fresh = [eqn for eqn in jaxprs.opened(new).eqns if id(eqn) not in known]
    made = {eqn.outvars[0]: eqn for eqn in before if eqn.outvars} if fresh else {}
    check_equations([eqn for eqn in fresh if not _typed_alike(eqn, made)])


def check_equations(eqns: Sequence[Eqn]) -> None:
    """Check types and boundaries of equations, under the context that they were traced in.

    Raises:
      IllFormed: with what was found and what was wanted.
    """
    # jax's rule for an equation with bodies checks those bodies again, at every level of nesting.
    _check_types([eqn for eqn in eqns if not compat_bodies.carried(eqn).entered])
    for eqn in eqns:
        check_boundaries(eqn)


def check_actions(site: Accepted, new: Sequence[Eqn]) -> None:
    """Decline a site of which the replacement doesn't do what its root does, as a callback does."""
    eqn = site.match.eqn
    if not eqn.effects and not any(e.effects for e in new):
        return
    before, after = jaxprs.actions([eqn]), jaxprs.actions(new)
    lost, added = before - after, after - before
    if lost or added:
        does = "leaves out what it does" if lost else "does more"
        declined = SiteDeclined(Reason(
            "effects", f"a fault of {site.rewrite.name}: its replacement of {eqn.primitive.name} "
            f"{does} besides results", ", ".join(sorted(map(jaxprs.effect_name, lost or added))),
            "the same effects",
        ))  # fmt: skip
        declined.blamed = (site,)
        raise declined


def check_stripped(new: Body, old: Body) -> None:
    """Check a body against the one that it is a part of, with other inputs and outputs perhaps.

    Args:
      new: the smaller body; its nested bodies have been checked before.
      old: the original.

    Raises:
      IllFormed: with what was found and what was wanted.
    """
    _check_scoping(new)
    _check_effects(new)
    _check_same_effects(new, old)
    known = {id(eqn) for eqn in jaxprs.opened(old).eqns}
    check_equations([eqn for eqn in jaxprs.opened(new).eqns if id(eqn) not in known])


def _typed_alike(eqn: Eqn, made: Mapping[Var, Eqn]) -> bool:
    """Whether an equation is an old one that reads other variables of the very same types."""
    old = made.get(eqn.outvars[0]) if eqn.outvars else None
    return (
        old is not None
        and eqn.primitive is old.primitive
        and eqn.params is old.params
        and eqn.ctx is old.ctx
        and not eqn.effects
        and not old.effects
        and len(eqn.invars) == len(old.invars)
        and all(a is b for a, b in zip(eqn.outvars, old.outvars))
        and all(a.aval == b.aval for a, b in zip(eqn.invars, old.invars))
    )


def check_closed(closed: Body) -> None:
    """Check a whole jaxpr, every equation of every nested body.

    Raises:
      IllFormed: with the path to the fault.
    """
    jaxpr = jaxprs.opened(closed)
    _check_scoping(closed)
    _check_constants(closed)
    _check_effects(closed)
    for eqn in jaxpr.eqns:
        entered = compat_bodies.carried(eqn).entered
        if not entered:
            continue
        check_boundaries(eqn)
        with tracing.inside(eqn):
            for e in entered:
                try:
                    check_closed(e.body)
                except IllFormed as fault:
                    raise IllFormed(f"in {eqn.primitive.name}'s {e.key[0]}: {fault}") from fault
    _check_types(jaxpr.eqns)


def check_boundaries(eqn: Eqn) -> None:
    """Check that operands and results have the types of the inputs and outputs of its bodies."""
    _check_arity(eqn)
    for e in compat_bodies.carried(eqn).entered:
        inner = jaxprs.invars(e.body)
        outer = jaxprs.opened(e.body).outvars
        where = f"{eqn.primitive.name}'s {e.key[0]}"
        if len(inner) != len(e.inputs) or len(outer) != len(e.outputs):
            raise IllFormed(
                f"{where} takes {len(inner)} and returns {len(outer)} values; "
                f"wanted {len(e.inputs)} and {len(e.outputs)}"
            )
        for position, (var, port) in enumerate(zip(inner, e.inputs, strict=True)):
            _check_port(eqn, port, var, eqn.invars, f"input {position} of {where}")
        for position, (atom, port) in enumerate(zip(outer, e.outputs, strict=True)):
            _check_port(eqn, port, atom, eqn.outvars, f"output {position} of {where}")
        _check_carry(e, where)


def _check_arity(eqn: Eqn) -> None:
    """Each operand and result belongs to a body's input or output, and each of these to one."""
    wanted = compat_bodies.arity(eqn)
    if wanted is None:
        return
    operands, results, inputs = wanted
    if (len(eqn.invars), len(eqn.outvars)) != (operands, results):
        raise IllFormed(
            f"{eqn.primitive.name} has {len(eqn.invars)} operands and {len(eqn.outvars)} results; "
            f"wanted {operands} and {results}"
        )
    for e in compat_bodies.carried(eqn).entered:
        found = len(jaxprs.invars(e.body))
        if found != inputs[e.key]:
            raise IllFormed(
                f"{eqn.primitive.name}'s {e.key[0]} takes {found} values; wanted {inputs[e.key]}"
            )


def _check_port(eqn: Eqn, port: Port, atom: Atom, outside: Sequence[Atom], what: str) -> None:
    if port.outer is None or port.flow is Flow.UNKNOWN:
        return
    if port.outer >= len(outside):
        raise IllFormed(f"{what} belongs to position {port.outer}, of {len(outside)} only")
    outer = outside[port.outer]
    if jaxprs.is_dropped(outer):
        return
    found, wanted = _shape(atom.aval), _shape(outer.aval)
    if port.flow is Flow.SLICE:
        length = eqn.params["length"]
        if wanted is None or not wanted[0] or wanted[0][0] != length:
            raise IllFormed(f"{what}: outside is {outer.aval.str_short()}, of a scan of {length}")
        wanted = (wanted[0][1:], wanted[1])
    if port.flow is Flow.SHARD:
        found, wanted = _check_shard(eqn, port, atom, outer, what, outside is eqn.invars)
        if differs_only_in_mesh(found, wanted):
            return
    if found != wanted:
        raise IllFormed(
            f"{what} has type {atom.aval.str_short()}, outside it is {outer.aval.str_short()}"
        )
    if port.flow in (Flow.SAME, Flow.CARRY) and vma.varying(atom.aval) != vma.varying(outer.aval):
        raise IllFormed(
            f"{what} varies over {set(vma.varying(atom.aval)) or 'no axis'}, "
            f"outside over {set(vma.varying(outer.aval)) or 'no axis'}"
        )


def _check_shard(
    eqn: Eqn, port: Port, atom: Atom, outer: Atom, what: str, entering: bool
) -> tuple[Any, Any]:
    """The two types to compare, by jax's own rules for shards."""
    if entering:
        return atom.aval, edit.sharded_type(eqn, port.spec, outer.aval)
    named = {a for p in port.spec for a in (p if isinstance(p, tuple) else (p,))}
    loose = (vma.varying(atom.aval) & eqn.params["newly_manual_axes"]) - named
    if eqn.params["check_vma"] and loose:
        raise IllFormed(f"{what} varies over {loose} and leaves by {port.spec}, which says not")
    return edit.unsharded_type(eqn, port.spec, atom.aval), outer.aval


def _check_carry(entered: Entered, where: str) -> None:
    inner = jaxprs.invars(entered.body)
    inputs = [v for v, p in zip(inner, entered.inputs, strict=True) if p.flow is Flow.CARRY]
    outvars = jaxprs.opened(entered.body).outvars
    outputs = [a for a, p in zip(outvars, entered.outputs, strict=True) if p.flow is Flow.CARRY]
    for position, (var, atom) in enumerate(zip(inputs, outputs, strict=False)):
        same_axes = vma.varying(var.aval) == vma.varying(atom.aval)
        if _shape(var.aval) != _shape(atom.aval) or not same_axes:
            raise IllFormed(
                f"carried value {position} of {where} goes in as {var.aval.str_short()} "
                f"and comes out as {atom.aval.str_short()}"
            )


def _shape(aval: Any) -> tuple[Any, Any] | None:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return None if shape is None else (tuple(shape), dtype)


def _check_interface(new: Body, old: Body, retyped: bool) -> None:
    before, after = jaxprs.opened(old), jaxprs.opened(new)
    for what in ("invars", "outvars"):
        olds = [a.aval for a in getattr(before, what)]
        news = [a.aval for a in getattr(after, what)]
        if len(olds) != len(news):
            raise IllFormed(f"{len(news)} {what}, wanted {len(olds)}")
        for position, (o, n) in enumerate(zip(olds, news, strict=True)):
            if o == n or differs_only_in_mesh(o, n):
                continue
            if not (retyped and vma.differs_only_in_varying(o, n)):
                raise IllFormed(
                    f"{what}[{position}] has type {n.str_short()}, wanted {o.str_short()}"
                )
    if before.effects != after.effects:
        raise IllFormed(f"effects {after.effects}, wanted {before.effects}")


def _check_effects(body: Body) -> None:
    """Whatever an equation does, the body states."""
    stated = jaxprs.opened(body).effects
    counted, on_refs = jaxprs.outward_effects(body)
    missing = (set(counted) | on_refs) - set(stated)
    if missing:
        raise IllFormed(f"an equation has the effects {missing}, the body states {set(stated)}")


def _check_same_effects(new: Body, old: Body) -> None:
    """A rewrite neither drops an effect nor adds one, nor reads or writes another Ref."""
    (counted, on_refs), (were, were_on) = map(jaxprs.outward_effects, (new, old))
    if counted != were:
        raise IllFormed(f"equations have the effects {dict(counted)}, wanted {dict(were)}")
    if not on_refs <= were_on:
        raise IllFormed(f"equations have the effects {on_refs}, wanted none but {were_on}")


def _check_constants(body: Body) -> None:
    """The values of a body's own constants have the types that it states."""
    values, variables = jaxprs.consts(body), jaxprs.constvars(body)
    if not values:
        return  # an open jaxpr, whose constants are somebody else's operands
    if len(values) != len(variables):
        raise IllFormed(f"{len(values)} constants, wanted {len(variables)}")
    for position, (value, var) in enumerate(zip(values, variables, strict=True)):
        found, wanted = _shape(value), _shape(var.aval)
        if None not in (found, wanted) and found != wanted:
            raise IllFormed(f"constant {position} has type {found}, wanted {wanted}")


def _check_scoping(body: Body) -> None:
    jaxpr = jaxprs.opened(body)
    bound: set[Var] = {*jaxpr.constvars, *jaxpr.invars}
    literal = jaxprs.LITERAL
    if len(bound) != len(jaxpr.constvars) + len(jaxpr.invars):
        raise IllFormed("one variable is bound by two inputs")
    for index, eqn in enumerate(jaxpr.eqns):
        for position, atom in enumerate(eqn.invars):
            if type(atom) is not literal and atom not in bound:
                raise IllFormed(
                    f"equation {index} ({eqn.primitive.name}) reads operand {position}, a "
                    f"{atom.aval.str_short()} that nothing before it binds"
                )
        for var in eqn.outvars:
            if var in bound and not jaxprs.is_dropped(var):
                raise IllFormed(f"equation {index} ({eqn.primitive.name}) binds a variable twice")
            bound.add(var)
    for position, atom in enumerate(jaxpr.outvars):
        if not jaxprs.is_literal(atom) and atom not in bound:
            raise IllFormed(f"output {position}, a {atom.aval.str_short()}, is bound nowhere")


def _check_types(eqns: Sequence[Eqn]) -> None:
    try:
        tracing.check_equations(eqns)
    except tracing.JaxprTypeError as fault:
        raise IllFormed(str(fault)) from None
    except Exception as fault:  # a typing rule fails by TypeError, ValueError or whatever else
        raise IllFormed(f"{type(fault).__name__}: {fault}") from fault
