"""Where a value was made, seen through the loops that stack it up and take it apart again.

What the backward of a scanned layer reads of its forward leaves one scan stacked, and enters
another scan sliced: iteration ``i`` reads what iteration ``i`` made, whichever way the two run.
Likewise what leaves one shard_map in parts and enters another in the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.assume_range import assume_range_p
from ..compat.bodies import Flow, Role
from ..compat.jaxprs import Atom
from .graph import Caller, Scope, Value
from .wrapped_index import looked_behind, plain_value, same_value

Crossed = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Origin:
    """The value that an index is, wherever it was made.

    Two atoms of one scope are equal in every execution if their origins are equal.
    """

    value: Value
    crossed: Crossed = ()
    """The loops, by scope and equation, by which the value came in: iteration by iteration."""


def origin(scope: Scope, atom: Atom) -> Origin:
    """The origin of an index; what changes none of its values is looked behind."""
    if jaxprs.is_literal(atom):
        return Origin(Value(scope, atom))
    key = "origin", atom
    found: Origin | None = scope.memo.get(key)
    if found is None:
        made = scope.definition(atom)
        # Nearly all: what is neither a call's nor written around an index has no other origin.
        alone = made is not None and made[0] not in scope.children and (
            scope.eqns[made[0]].primitive not in looked_behind()
        )  # fmt: skip
        found = Origin(Value(scope, atom)) if alone else _origin(scope, atom)
        scope.memo[key] = found
    return found


def _origin(scope: Scope, atom: Atom) -> Origin:
    crossed: list[tuple[int, int]] = []
    value = plain_value(scope, atom)
    while (step := _crossing(value)) is not None:
        value, loop = step
        crossed.append(loop)
    return Origin(value, tuple(crossed))


def _crossing(value: Value) -> tuple[Value, tuple[int, int]] | None:
    """What another body made of which an input is the like part, and the loop it entered by."""
    scope, var = value.scope, value.atom
    if jaxprs.is_literal(var) or scope.definition(var) is not None:
        return None
    caller, position = scope.caller, scope.position(var)
    if caller is None or position is None:
        return None
    port = caller.entered.inputs[position]
    if port.outer is None or port.flow not in (Flow.SLICE, Flow.SHARD):
        return None
    target = caller.scope.eqns[caller.index]
    stacked = caller.scope.producer(target.invars[port.outer])
    if stacked is None or not _alike(stacked.eqn, target):
        return None
    inside = stacked.scope.inside(stacked.index)
    if inside is None:
        return None
    source, entered = inside
    for out, atom in zip(entered.outputs, jaxprs.opened(source.body).outvars, strict=True):
        if out.outer == stacked.result and out.flow is port.flow and _same_parts(out, port, target):
            return plain_value(source, atom), (id(caller.scope), caller.index)
    return None


def _alike(source: Any, target: Any) -> bool:
    """Whether two equations cut the arrays that leave the one and enter the other alike."""
    names = ("length",) if "length" in target.params else ("mesh", "newly_manual_axes")
    return source.primitive is target.primitive and all(
        n in source.params and source.params[n] == target.params[n] for n in names
    )


def _same_parts(out: Any, into: Any, target: Any) -> bool:
    """Whether each device gets the part that it made; one array for all may hide several."""
    if out.spec != into.spec:
        return False
    if into.flow is Flow.SLICE:
        return True
    parts = tuple(into.spec)
    named = {a for p in parts if p is not None for a in (p if isinstance(p, tuple) else (p,))}
    partial = getattr(into.spec, "unreduced", None)
    return not partial and named >= set(target.params["newly_manual_axes"])


def behind(value: Value) -> Value:
    """The same value before a range was assumed of it, or devices that it varies over."""
    while not jaxprs.is_literal(value.atom):
        producer = value.scope.producer(value.atom)
        same = same_value() | {assume_range_p}
        if producer is None or producer.eqn.primitive not in same:
            break
        value = producer.scope.resolve(producer.eqn.invars[0])
    return value


def enclosing(scope: Scope) -> list[Scope]:
    """The scope and those that call it, outwards to the first that a loop or branch runs."""
    found = [scope]
    caller = scope.caller
    while caller is not None and caller.entered.role is Role.CALL and not _is_split(caller):
        found.append(caller.scope)
        caller = caller.scope.caller
    return found


def _is_split(caller: Caller) -> bool:
    return any(p.flow is Flow.SHARD for p in caller.entered.inputs)


def reach(scope: Scope, value: Value) -> Atom | None:
    """The first atom of ``scope`` that holds a value made there, outside, or in a call from there.

    An equation that uses the value comes after it. None if the value isn't in scope.
    """
    if jaxprs.is_literal(value.atom) or value.scope is scope:
        return value.atom
    shape = getattr(value.atom.aval, "shape", None)
    key = "made elsewhere", shape
    found: dict[Value, Atom] | None = scope.memo.get(key)
    if found is None:
        found = scope.memo[key] = {}
        # What any other equation makes is made here.
        made = (v for i in sorted(scope.children) for v in scope.eqns[i].outvars)
        for var in (*jaxprs.opened(scope.body).invars, *made):
            if getattr(var.aval, "shape", None) == shape:
                here = scope.resolve(var)
                if not jaxprs.is_literal(here.atom):
                    found.setdefault(here, var)
    return found.get(value)
