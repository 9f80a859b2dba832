"""The lines of operations in functions that jax lowers without any.

jax lowers some primitives, a cumulative sum for one, to a function of the module whose operations
have no file and line: only its call has. A compiler that inlines the function drops the call, and
with it the line. So the line is written to the operations before.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir as _ir

_CALLS = ("call", "func.call")


def with_call_places(module: Any) -> Any:
    """The module, or a copy in which operations without a line have that of their call.

    Where calls from several lines share a function, its operations stay without; where calls of
    one line do, in several scopes, they have the line and no scope. Where no operation gets a
    line, it is the module itself.

    Args:
        module: a StableHLO module; it stays as it is.
    """
    with module.context:
        bare = _placeless(module)
        calls = _calls(module, bare) if bare else {}
        known: dict[str, Any] = {}
        found = {name: place for name in bare if (place := _place(name, calls, known)) is not None}
        if not found:
            return module
        as_bytes = io.BytesIO()
        module.operation.write_bytecode(as_bytes)
        copy = _ir.Module.parse(as_bytes.getvalue())
        for name, function in _placeless(copy).items():
            if name in found:
                for op in _inside(function):
                    op.location = _under(found[name], op.location)
    return copy


def _placeless(module: Any) -> dict[str, Any]:
    """The functions that are called, none of whose operations has a line, by name."""
    found = {}
    for function in module.body.operations:
        attributes = function.operation.attributes
        if "sym_visibility" not in attributes or "sym_name" not in attributes:
            continue  # nothing in the module calls it
        if not any(_has_line(op.location) for op in _inside(function)):
            found[_ir.StringAttr(attributes["sym_name"]).value] = function
    return found


def _calls(module: Any, names: dict[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    """For each function, where it is called: in which function, and the call's location."""
    found: dict[str, list[tuple[str, Any]]] = {name: [] for name in names}
    for function in module.body.operations:
        attributes = function.operation.attributes
        if "sym_name" not in attributes:
            continue
        caller = _ir.StringAttr(attributes["sym_name"]).value
        for op in _inside(function):
            if op.name in _CALLS:
                callee = _ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                if callee in found:
                    found[callee].append((caller, op.location))
    return found


def _place(name: str, calls: dict[str, list[tuple[str, Any]]], done: dict[str, Any]) -> Any:
    """What the locations of all calls of a function have in common; None where that is no line."""
    if name not in done:
        done[name] = None
        places = []
        for caller, location in calls[name]:
            outer = _place(caller, calls, done) if caller in calls else None
            places.append(location if outer is None else _under(outer, location))
        done[name] = _common(places)
    return done[name]


def _common(places: list[Any]) -> Any:
    """One location for several: itself, or the innermost frames that are the same in all."""
    if not places or not all(map(_has_line, places)):
        return None
    if all(place == places[0] for place in places):
        return places[0]
    stacks = [_frames(_unnamed(place)) for place in places]
    alike = []
    for frames in zip(*stacks, strict=False):
        lines = {_line(frame) for frame in frames}
        if len(lines) != 1 or None in lines:
            break
        alike.append(frames[0])
    if not alike:
        return None
    return _unnamed(alike[0]) if len(alike) == 1 else _ir.Location.callsite(alike[0], alike[1:])


def _frames(location: Any) -> list[Any]:
    """A location's frames, innermost first."""
    if type(location).__name__ != "CallSiteLoc":
        return [location]
    return [*_frames(location.callee), *_frames(location.caller)]


def _line(frame: Any) -> tuple[str, int] | None:
    inner = _unnamed(frame)
    is_line = type(inner).__name__ == "FileLineColLoc"
    return (inner.filename, inner.start_line) if is_line else None


def _unnamed(location: Any) -> Any:
    while type(location).__name__ == "NameLoc":
        location = location.child_loc
    return location


def _inside(function: Any) -> Iterator[Any]:
    """Every operation of a function, in its regions too."""
    pending = [region for region in function.operation.regions]
    while pending:
        for block in pending.pop():
            for op in block:
                yield op.operation
                pending.extend(op.operation.regions)


def _under(place: Any, location: Any) -> Any:
    """A call's line, with the names of the call and of what is called."""
    if type(location).__name__ != "NameLoc":
        return place
    own = location.name_str.rstrip(":")
    if type(place).__name__ != "NameLoc":
        return _ir.Location.name(own, place)
    return _ir.Location.name(f"{place.name_str.rstrip(':')}/{own}", place.child_loc)


def _has_line(location: Any) -> bool:
    kind = type(location).__name__
    if kind == "NameLoc":
        return _has_line(location.child_loc)
    if kind == "CallSiteLoc":
        return _has_line(location.callee) or _has_line(location.caller)
    if kind == "FusedLoc":
        return any(map(_has_line, location.locations))
    return kind == "FileLineColLoc"
