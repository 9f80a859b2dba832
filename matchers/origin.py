"""Where a value comes from, followed through the loops and shard_maps that hand it on.

What a forward scan computes in iteration ``i`` reaches iteration ``i`` of the backward scan as a
slice of a stack; what one shard_map computes on a device reaches that device in the next one as
its part of a whole. Both are the same value.
"""

from __future__ import annotations

from ..compat import bodies as compat_bodies
from ..compat import jaxprs
from ..compat.bodies import Flow, Port
from ..compat.jaxprs import Atom, Eqn
from .graph import Scope, Value
from .wrapped_index import plain_value


def origin(scope: Scope, atom: Atom) -> Value:
    """The value of indices where they are made, in whichever body, loop or shard_map.

    As `wrapped_index.plain_value`, and from there on through the boundaries that hand on one
    iteration's or one device's part unchanged. Two values that one body reads and that have equal
    origins are equal; of values that two bodies read, that is not said.
    """
    while True:
        value = plain_value(scope, atom)
        inner = _across(value)
        if inner is None:
            return value
        scope, atom = inner.scope, inner.atom


def _across(value: Value) -> Value | None:
    """The value in the loop or shard_map before, where it enters its body as a part."""
    if jaxprs.is_literal(value.atom) or value.scope.definition(value.atom) is not None:
        return None
    found = value.scope.entry(value.atom)
    if found is None:
        return None
    reader, into = found
    if into.outer is None or into.flow not in (Flow.SLICE, Flow.SHARD):
        return None
    eqn = reader.scope.eqns[reader.index]
    whole = _settled(reader.scope, eqn.invars[into.outer])
    made = None if jaxprs.is_literal(whole.atom) else whole.scope.definition(whole.atom)
    left = None if made is None else whole.scope.exit(*made, reader)
    if left is None:
        return None
    writer, out, inner = left
    same = _same_parts(writer.scope.eqns[writer.index], out, eqn, into)
    return inner if same and inner.atom.aval.shape == value.atom.aval.shape else None


def _settled(scope: Scope, atom: Atom) -> Value:
    """Where a whole stack is made; one that is itself a part of a stack is followed too."""
    value = scope.resolve(atom)
    while True:
        inner = _across(value)
        if inner is None:
            return value
        value = inner.scope.resolve(inner.atom)


def _same_parts(writer: Eqn, out: Port, reader: Eqn, into: Port) -> bool:
    """Whether each part that is read is the part that the same iteration or device wrote."""
    if writer.primitive is not reader.primitive or out.flow is not into.flow:
        return False
    if out.flow is Flow.SLICE:
        # Iteration i reads and writes at i, whether a scan goes forwards or in reverse.
        return bool(writer.params["length"] == reader.params["length"])
    if writer.primitive is not compat_bodies.shard_map_primitive() or out.spec != into.spec:
        return False
    if any(writer.params[name] != reader.params[name] for name in ("mesh", "newly_manual_axes")):
        return False
    # Without its check, devices may have written parts that differ where the spec says they don't.
    return bool(writer.params["check_vma"]) or _names_every_axis(writer, out)


def _names_every_axis(eqn: Eqn, port: Port) -> bool:
    named: set[object] = set()
    for part in port.spec:
        named.update(part if isinstance(part, tuple) else (part,))
    return set(eqn.params["newly_manual_axes"]) <= named
