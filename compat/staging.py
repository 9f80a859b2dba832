"""Put a jaxpr's equations into the one that is being traced, without binding them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax._src import source_info_util
from jax._src.effects import JaxprInputEffect
from jax._src.interpreters import partial_eval as pe

from . import jaxprs
from .jaxprs import Atom, Body, Var


def adopted(current: Any, closed: Body, args: Sequence[Any]) -> list[Any]:
    """Make the equations of a jaxpr those of the one being traced, their variables included.

    Only what reads an input or a constant is made anew: it holds on to the tracer of it, which is
    what keeps a constant alive.
    """
    jaxpr = jaxprs.opened(closed)
    here = source_info_util.current()
    given = _given(current, closed, args, here)
    literal, tracer = jaxprs.LITERAL, pe.DynamicJaxprTracer

    def read(atoms: Sequence[Atom]) -> list[Any]:
        return [
            tracer(current, a.aval, a, here) if type(a) is literal or a not in given else given[a]
            for a in atoms
        ]

    outside = here.name_stack
    prefixed = bool(outside.stack)
    append = current.frame.tracing_eqns.append
    for eqn in jaxpr.eqns:
        where = eqn.source_info
        if prefixed:
            where = where.replace(name_stack=outside + where.name_stack)
        for atom in eqn.invars:
            if type(atom) is not literal and atom in given:
                effects = eqn.effects and _on_refs(eqn.effects, given)
                made = pe.TracingEqn(
                    read(eqn.invars), eqn.outvars, eqn.primitive, eqn.params, effects, where,
                    eqn.ctx,
                )  # fmt: skip
                current.frame.add_eqn(made)
                break
        else:
            append(eqn.replace(source_info=where) if prefixed else eqn)
    return read(jaxpr.outvars)


def _given(current: Any, closed: Body, args: Sequence[Any], here: Any) -> dict[Var, Any]:
    """The tracers of a jaxpr's constants and inputs in the one being traced."""
    jaxpr = jaxprs.opened(closed)
    variables = (*jaxpr.constvars, *jaxpr.invars)
    values = (*jaxprs.consts(closed), *args)
    return {
        var: current.to_jaxpr_tracer(value, here)
        for var, value in zip(variables, values, strict=True)
    }


def _on_refs(effects: Any, env: Mapping[Var, Any]) -> set[Any]:
    """Effects on Refs, which name the Ref's variable, by the variables of tracers."""
    return {
        e.replace(env[e.input].val) if isinstance(e, JaxprInputEffect) and e.input in env else e
        for e in effects
    }


def staged(current: Any, closed: Body, args: Sequence[Any]) -> list[Any]:
    """Append the equations of a jaxpr to the one being traced, as they are.

    Binding each primitive again would derive what its equation already says; this takes a fifth
    of the time. Like jax's own inlining of jitted calls, but each equation keeps its own line.
    """
    jaxpr = jaxprs.opened(closed)
    here = source_info_util.current()
    env = _given(current, closed, args, here)
    literal, tracer = jaxprs.LITERAL, pe.DynamicJaxprTracer

    def read(atoms: Sequence[Atom]) -> list[Any]:
        return [tracer(current, a.aval, a, here) if type(a) is literal else env[a] for a in atoms]

    outside = here.name_stack
    prefixed = bool(outside.stack)
    for eqn in jaxpr.eqns:
        effects, where = eqn.effects, eqn.source_info
        if effects:
            effects = _on_refs(effects, env)
        if prefixed:
            where = where.replace(name_stack=outside + where.name_stack)
        results = current.emit_eqn(
            read(eqn.invars),
            [v.aval for v in eqn.outvars],
            eqn.primitive,
            eqn.params,
            effects,
            where,
            eqn.ctx,
        )
        env.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars)
