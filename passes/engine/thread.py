"""Carry a value from the body that computes it into another body that needs it.

A forward scan's order, say, is wanted in the backward scan. The value leaves each body on the way
up as one more output (stacked over a scan's iterations) and enters each body on the way down as
one more input (sliced again in a scan of the same length). Inside matching scans, iteration ``i``
of the target reads what iteration ``i`` of the source computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...compat import bodies as compat_bodies
from ...compat import edit, jaxprs
from ...compat.bodies import BodyKey
from ...compat.edit import CannotEdit
from ...compat.jaxprs import Body, Eqn, Var
from ..base import Reason, SiteDeclined

Path = tuple[tuple[int, BodyKey], ...]
"""From the outermost body: which equation, and which of its bodies, at each level."""


@dataclass(frozen=True)
class Threaded:
    """A jaxpr in which a value of one body is also in scope in another."""

    closed: Body
    var: Var
    """The value, in the target body."""
    added_bytes: int
    """Bytes that leave and enter bodies, stacked values counted whole, by the widest boundary."""


def thread(closed: Body, source: Path, value: Var, target: Path) -> Threaded:
    """Bring ``value``, computed in the body at ``source``, into scope in the body at ``target``.

    Equations keep their positions, so that other paths into the jaxpr stay valid. A body that
    others share is given a changed copy on the way of this thread only.

    Args:
      closed: the whole jaxpr.
      source: the path of the body that binds ``value``.
      value: the variable.
      target: the path of the body that needs it; at the first level where the two differ, its
        equation must come after that of ``source``.

    Raises:
      SiteDeclined: a boundary can't be crossed, with the reason.
    """
    shared = _common(source, target)
    up, down = source[shared:], target[shared:]
    made = _binding(_at(closed, source), value)
    computed = up[0][0] if up else made
    if down and computed >= down[0][0]:
        raise _declined(f"equation {computed} computes it, {down[0][0]} needs it", "it comes first")
    result: list[tuple[Var, int]] = []

    def at_common(body: Body) -> Body:
        widest = 0
        crossings: list[_Crossing] = []
        var = value
        if up:
            body, var, widest = _lift(body, up, value, crossings)
        body, var = _lower(body, down, var, crossings[::-1])
        result.append((var, widest))
        return body

    changed = _within(closed, source[:shared], at_common)
    var, widest = result[0]
    return Threaded(changed, var, widest)


def _at(body: Body, path: Path) -> Body:
    for index, key in path:
        body = _body(jaxprs.opened(body).eqns[index], key)
    return body


def _binding(body: Body, value: Var) -> int:
    """The equation of ``body`` that binds ``value``; -1 for an input."""
    jaxpr = jaxprs.opened(body)
    if any(value is v for v in (*jaxpr.invars, *jaxpr.constvars)):
        return -1
    for index, eqn in enumerate(jaxpr.eqns):
        if any(value is v for v in eqn.outvars):
            return index
    raise _declined("a value that the source body doesn't bind", "one that it binds")


def _common(a: Path, b: Path) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _within(body: Body, path: Path, change: Callable[[Body], Body]) -> Body:
    """``body`` with the nested body at ``path`` changed; its type must stay."""
    if not path:
        return change(body)
    (index, key), rest = path[0], path[1:]
    eqn = jaxprs.opened(body).eqns[index]
    inner = _body(eqn, key)
    return _replace(
        body, index, compat_bodies.with_bodies(eqn, {key: _within(inner, rest, change)})
    )


_Crossing = tuple[str, object]
"""A boundary that changed a value's shape on the way up, to be undone on the way down."""


def _lift(body: Body, path: Path, value: Var, crossings: list[_Crossing]) -> tuple[Body, Var, int]:
    """Bring a value out of the nested body at ``path``; says which boundaries reshaped it."""
    (index, key), rest = path[0], path[1:]
    eqn = jaxprs.opened(body).eqns[index]
    widest = 0
    if rest:
        inner, value, widest = _lift(_body(eqn, key), rest, value, crossings)
        eqn = compat_bodies.with_bodies(eqn, {key: inner})
    try:
        eqn, result = edit.add_output(eqn, key, value)
    except CannotEdit as fault:
        raise _declined(
            f"out of {eqn.primitive.name}: {fault}", "a boundary it can cross"
        ) from None
    crossing = _crossing(eqn)
    if crossing is not None and (crossing[0] == "scan" or tuple(eqn.params["out_specs"][-1])):
        crossings.append(crossing)
    return _replace(body, index, eqn), result, max(widest, _bytes(result))


def _lower(body: Body, path: Path, var: Var, crossings: Sequence[_Crossing]) -> tuple[Body, Var]:
    """Bring a value into the nested body at ``path``, undoing the crossings in order."""
    if not path:
        if crossings:
            kinds = ", ".join(f"{kind} of {size}" for kind, size in crossings)
            raise _declined(f"a value that left {kinds}", "a target inside the like")
        return body, var
    (index, key), rest = path[0], path[1:]
    eqn = jaxprs.opened(body).eqns[index]
    crossing = _crossing(eqn)
    undo = crossing is not None and bool(crossings)
    if undo and crossing != crossings[0]:
        raise _declined(f"into {crossing}", f"into {crossings[0]}, as around the source")
    try:
        eqn, inner_var = edit.add_input(eqn, key, var, sliced=undo)
    except CannotEdit as fault:
        raise _declined(f"into {eqn.primitive.name}: {fault}", "a boundary it can cross") from None
    inner, found = _lower(_body(eqn, key), rest, inner_var, crossings[1:] if undo else crossings)
    return _replace(body, index, compat_bodies.with_bodies(eqn, {key: inner})), found


def _crossing(eqn: Eqn) -> _Crossing | None:
    """The boundary that an equation is, where it changes the shape of what crosses it."""
    if "length" in eqn.params:
        return "scan", eqn.params["length"]
    if eqn.primitive is compat_bodies.shard_map_primitive():
        return "shard_map", (eqn.params["mesh"], eqn.params["newly_manual_axes"])
    return None


def _body(eqn: Eqn, key: BodyKey) -> Body:
    return next(e.body for e in compat_bodies.carried(eqn).entered if e.key == key)


def _replace(body: Body, index: int, eqn: Eqn) -> Body:
    eqns = list(jaxprs.opened(body).eqns)
    eqns[index] = eqn
    return jaxprs.rebuild(body, eqns=eqns)


def _bytes(var: Var) -> int:
    return int(var.aval.size) * int(var.aval.dtype.itemsize)


def _declined(found: str, wanted: str) -> SiteDeclined:
    return SiteDeclined(
        Reason("cannot-thread", "a value needed here is computed in another body", found, wanted)
    )
