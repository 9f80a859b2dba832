"""Jaxprs as values, alike on every supported jax version.

A *body* is whatever an equation's params hold: a ``ClosedJaxpr`` or an open ``Jaxpr`` up to jax
0.11, and from 0.12 on a ``Jaxpr`` that may carry the values of its own constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax._src import core
from jax._src.effects import JaxprInputEffect as _InputEffect
from jax._src.state.types import ReadEffect as _ReadEffect

Body: TypeAlias = Any
"""``ClosedJaxpr | Jaxpr``: the object found in an equation's params."""
Jaxpr: TypeAlias = Any
Eqn: TypeAlias = Any
Var: TypeAlias = Any
Literal: TypeAlias = Any
Atom: TypeAlias = Any
"""``Var | Literal``."""

_Closed: Any = getattr(core, "ClosedJaxpr", None)
_VarType: Any = core.Var
_LiteralType: Any = core.Literal
DropVar: Any = core.DropVar
LITERAL: Any = _LiteralType
"""The type of literals, for loops in which a call per atom would cost too much."""


BODY_TYPES = frozenset({core.Jaxpr} if _Closed is None else {core.Jaxpr, _Closed})


def is_body(value: object) -> bool:
    """Whether ``value`` is a jaxpr of either kind."""
    return type(value) in BODY_TYPES


def is_literal(atom: Atom) -> bool:
    """Whether an equation's operand is a literal rather than a variable."""
    return type(atom) is _LiteralType


def is_var(atom: Atom) -> bool:
    """Whether an equation's operand is a variable."""
    return isinstance(atom, _VarType)


def is_dropped(var: Var) -> bool:
    """Whether a result is bound to ``_``: nobody can read it."""
    return isinstance(var, DropVar)


def opened(body: Body) -> Jaxpr:
    """The jaxpr with ``eqns``, ``invars``, ``outvars`` and ``constvars``."""
    return body.jaxpr if _Closed is not None and isinstance(body, _Closed) else body


def invars(body: Body) -> Sequence[Var]:
    """The variables that the equation's operands are bound to; constants are not among them."""
    return opened(body).invars  # type: ignore[no-any-return]


def constvars(body: Body) -> Sequence[Var]:
    """The variables of the body's own constants."""
    return opened(body).constvars  # type: ignore[no-any-return]


def consts(body: Body) -> Sequence[Any]:
    """The values of the body's own constants; empty for an open jaxpr."""
    return getattr(body, "consts", ())


def rebuild(
    body: Body,
    *,
    eqns: Sequence[Eqn] | None = None,
    outvars: Sequence[Atom] | None = None,
    invars: Sequence[Var] | None = None,
) -> Body:
    """A body of the same kind with some parts replaced.

    Effects and constants are kept. Where the number of inputs or outputs changes, argument names
    are no longer known and are dropped from the debug info.
    """
    jaxpr = opened(body)
    parts: dict[str, Any] = {}
    if eqns is not None:
        parts["eqns"] = list(eqns)
    if outvars is not None:
        parts["outvars"] = list(outvars)
    if invars is not None:
        parts["invars"] = list(invars)
    resized = (invars is not None and len(invars) != len(jaxpr.invars)) or (
        outvars is not None and len(outvars) != len(jaxpr.outvars)
    )
    debug_info = jaxpr.debug_info
    parts["debug_info"] = debug_info.with_unknown_names() if resized else debug_info
    changed = jaxpr.replace(**parts)
    return body.replace(jaxpr=changed) if jaxpr is not body else changed


def new_var(aval: Any) -> Var:
    """A fresh variable of type ``aval``."""
    return core.Var(aval)


def dropped(aval: Any) -> Var:
    """A result of type ``aval`` that is bound to ``_``."""
    return DropVar(aval)


def substitute(eqn: Eqn, mapping: Mapping[Var, Atom]) -> Eqn:
    """``eqn`` reading ``mapping[v]`` instead of each ``v``; the same object if it reads none."""
    for atom in eqn.invars:
        if type(atom) is not _LiteralType and atom in mapping:
            break
    else:
        return eqn
    return eqn.replace(
        invars=[mapping.get(a, a) if is_var(a) else a for a in eqn.invars],
        effects=renamed_effects(eqn.effects, mapping),
    )


def renamed_effects(effects: Any, mapping: Mapping[Var, Atom]) -> Any:
    """Effects on Refs, which name the Ref's variable, by the new names of the variables."""
    if not any(isinstance(e, _InputEffect) and e.input in mapping for e in effects):
        return effects
    return frozenset(
        e.replace(mapping.get(e.input, e.input)) if isinstance(e, _InputEffect) else e
        for e in effects
    )


def effects_on(effects: Any, atoms: Sequence[Atom]) -> frozenset[Any]:
    """Effects without those on Refs other than ``atoms``."""
    known = {a for a in atoms if is_var(a)}
    return frozenset(e for e in effects if not isinstance(e, _InputEffect) or e.input in known)


def stating_own_effects(body: Body) -> Body:
    """A body that lost inputs, which no longer states effects on them."""
    jaxpr = opened(body)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    changed = jaxpr.replace(effects=effects_on(jaxpr.effects, inputs))
    return body.replace(jaxpr=changed) if jaxpr is not body else changed


def outward_effects(body: Body) -> tuple[Counter[Any], set[Any]]:
    """The effects of a body's equations that the body itself must state.

    Returns:
      Effects with how often they occur, and reads and writes of the body's own input Refs.
    """
    jaxpr = opened(body)
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    counted: Counter[Any] = Counter()
    on_refs: set[Any] = set()
    for eqn in jaxpr.eqns:
        for effect in eqn.effects:
            if isinstance(effect, _InputEffect):
                if effect.input in inputs:
                    on_refs.add(effect)
            elif not isinstance(effect, core.NamedAxisEffect):
                counted[effect] += 1
    return counted, on_refs


def true_effects(eqn: Eqn) -> set[Any]:
    """An equation's effects without the mesh axes that it names, which jax lists among them."""
    return {e for e in eqn.effects if not isinstance(e, core.NamedAxisEffect)}


def actions(eqns: Iterable[Eqn]) -> Counter[Any]:
    """What equations do besides their results, and how many do it; to read a Ref is nothing."""
    return Counter(
        effect for e in eqns for effect in true_effects(e) if not isinstance(effect, _ReadEffect)
    )


def effect_name(effect: Any) -> str:
    """An effect in a word; most print as their address."""
    text = str(effect)
    return type(effect).__name__ if " object at 0x" in text else text
