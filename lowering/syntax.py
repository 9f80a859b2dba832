"""Brackets, strings and lists in MLIR's text: how to cut it without understanding it.

Everything here reads text from left to right once and never fails: brackets that don't match are
passed over, and what isn't closed ends with the text.
"""

from __future__ import annotations

import re

_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_STRING = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)'
# An arrow and a comparison hold a ">" that closes nothing.
_TOKEN = re.compile(_STRING + r"|->|>=|[()\[\]{}<>,]", re.DOTALL)
_BRACKET = re.compile(_STRING + r"|->|>=|[()\[\]{}<>]", re.DOTALL)
_QUOTED = re.compile(_STRING, re.DOTALL)
_NESTING = re.compile(r'[()\[\]{}<>"]')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|[\\\"nt])")
_ESCAPED = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}


def closing(text: str, start: int) -> int:
    """The index after the bracket or quote that closes the one at ``start``, or the end."""
    stack: list[str] = []
    for match in _BRACKET.finditer(text, start):
        token = match[0]
        if token in _PAIRS:
            stack.append(_PAIRS[token])
        elif stack and token == stack[-1]:
            stack.pop()
        if not stack:
            return match.end()
    return len(text)


def split(text: str) -> list[str]:
    """``text`` split at commas that stand in no bracket and no string."""
    if _NESTING.search(text) is None:
        found = [item.strip() for item in text.split(",")]
    else:
        found = []
        stack: list[str] = []
        start = 0
        for match in _TOKEN.finditer(text):
            token = match[0]
            if token == ",":
                if not stack:
                    found.append(text[start : match.start()].strip())
                    start = match.end()
            elif token in _PAIRS:
                stack.append(_PAIRS[token])
            elif stack and token == stack[-1]:
                stack.pop()
        found.append(text[start:].strip())
    return found if found != [""] else []


def entries(text: str) -> dict[str, str] | list[str] | None:
    """A dictionary ``{a = 1, b}`` or list ``[1, 2]`` split one level deep; else None."""
    body = text.strip()
    if body.startswith("<{") and body.endswith("}>"):
        body = body[1:-1]
    if len(body) < 2 or (body[0], body[-1]) not in (("{", "}"), ("[", "]")):
        return None
    if closing(body, 0) != len(body):
        return None
    items = split(body[1:-1])
    if body[0] == "[":
        return items
    found: dict[str, str] = {}
    for item in items:
        after = closing(item, 0) if item.startswith('"') else 0
        equals = item.find(" = ", after)
        name = item if equals < 0 else item[:equals]
        if name in found:
            return None
        found[name] = "unit" if equals < 0 else item[equals + 3 :]
    return found


def unquoted(text: str) -> str:
    """The string that MLIR prints as the quoted ``text``, or the bare word it is."""
    if not text.startswith('"'):
        return text
    body = text[1:-1].encode()
    if b"\\" not in body:
        return body.decode(errors="surrogateescape")

    def plain(match: re.Match[bytes]) -> bytes:
        return _ESCAPED.get(match[1]) or bytes([int(match[1], 16)])

    return _ESCAPE.sub(plain, body).decode(errors="surrogateescape")


def outside_strings(text: str) -> str:
    """``text`` with every string literal left out."""
    return _QUOTED.sub("", text) if '"' in text else text
