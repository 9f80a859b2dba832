"""Where two attribute texts differ: a path to the innermost value, and both values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .rest import parts, signature
from .syntax import entries

ABSENT = "(absent)"
MAX_DEPTH = 40
WIDTH = 72
"""Characters that a value is shown with."""


def rest_differences(a: str, b: str) -> Iterator[tuple[str, str, str]]:
    """Path and values for each difference of what follows two operations' operands.

    The path is ``type`` or starts with it for types, ``callee`` for the callee, and is an
    attribute's name, dotted and indexed, otherwise.
    """
    if a == b:
        return
    sides: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for side, rest in zip(sides, (a, b), strict=True):
        for part in parts(rest):
            side[part.kind] = f"{side[part.kind]} {part.text}" if part.kind in side else part.text
    for kind in dict.fromkeys((*sides[0], *sides[1])):
        left, right = sides[0].get(kind), sides[1].get(kind)
        if left == right:
            continue
        if kind == "type":
            yield from _types(left or ABSENT, right or ABSENT)
        elif kind in ("attributes", "properties", "frontend"):
            prefix = "frontend" if kind == "frontend" else ""
            yield from value_differences(left or "{}", right or "{}", prefix)
        else:
            yield kind, left or ABSENT, right or ABSENT


def _types(a: str, b: str) -> Iterator[tuple[str, str, str]]:
    left, right = signature(a), signature(b)
    if left is None or right is None:
        yield "type", a, b
        return
    for name, x, y in zip(("type of operands", "type of results"), left, right, strict=True):
        if x != y:
            yield name, x, y


def value_differences(
    a: str, b: str, path: str = "", depth: int = 0
) -> Iterator[tuple[str, str, str]]:
    """Path and values for each difference of two attribute values."""
    if a == b:
        return
    if depth < MAX_DEPTH:
        if a.startswith("json ") and b.startswith("json "):
            try:
                yield from _json(json.loads(a[5:]), json.loads(b[5:]), path, depth)
                return
            except (ValueError, RecursionError):
                pass
        left, right = entries(a), entries(b)
        if isinstance(left, dict) and isinstance(right, dict):
            for name in dict.fromkeys((*left, *right)):
                inner = f"{path}.{name}" if path else name
                x, y = left.get(name, ABSENT), right.get(name, ABSENT)
                yield from value_differences(x, y, inner, depth + 1)
            return
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            for index, (x, y) in enumerate(zip(left, right, strict=True)):
                yield from value_differences(x, y, f"{path}[{index}]", depth + 1)
            return
    yield path or "attributes", a, b


def _json(a: Any, b: Any, path: str, depth: int) -> Iterator[tuple[str, str, str]]:
    if type(a) is type(b) and a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict) and depth < MAX_DEPTH:
        for name in dict.fromkeys((*a, *b)):
            inner = f"{path}.{name}"
            if name in a and name in b:
                yield from _json(a[name], b[name], inner, depth + 1)
            else:
                yield inner, _dump(a, name), _dump(b, name)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and depth < MAX_DEPTH:
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _json(x, y, f"{path}[{index}]", depth + 1)
    else:
        yield path, json.dumps(a), json.dumps(b)


def _dump(value: dict[str, Any], name: str) -> str:
    return json.dumps(value[name]) if name in value else ABSENT


def shortened(a: str, b: str, width: int = WIDTH) -> tuple[str, str]:
    """Both texts cut to ``width`` around the first character that differs."""
    if len(a) <= width and len(b) <= width:
        return a, b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, first - width // 3) if first > width // 2 else 0
    return _window(a, start, width), _window(b, start, width)


def _window(text: str, start: int, width: int) -> str:
    head = "…" if start else ""
    tail = "…" if len(text) > start + width else ""
    return f"{head}{text[start : start + width]}{tail}"
