"""The pieces of what follows an operation's operands: attributes, types and so on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .syntax import closing

_OPENERS = frozenset('([{<"')


@dataclass(frozen=True)
class Part:
    """One piece of what follows an operation's operands: its kind and its text."""

    kind: str
    """One of attributes, properties, frontend, successors, callee, type, text."""
    text: str


def parts(rest: str) -> list[Part]:
    """``rest`` split at its top level into attributes, types and so on."""
    found: list[Part] = []
    at = 0
    while at < len(rest):
        if rest[at] == " ":
            at += 1
            continue
        if rest.startswith(": ", at):
            end = _type_end(rest, at + 2)
            found.append(Part("type", rest[at + 2 : end]))
            at = end
            continue
        for opener, kind in (
            ("<{", "properties"),
            ("{", "attributes"),
            ("[", "successors"),
            ("frontend {", "frontend"),
            ("@", "callee"),
        ):
            if rest.startswith(opener, at):
                start = at + len(opener) - 1 if kind == "frontend" else at
                end = closing(rest, start) if kind != "callee" else _word_end(rest, at)
                found.append(Part(kind, rest[start:end]))
                at = end
                break
        else:
            end = rest.find(" ", at)
            end = len(rest) if end < 0 else end
            found.append(Part("text", rest[at:end]))
            at = end
    return found


def signature(text: str) -> tuple[str, str] | None:
    """The operand types and the result types of ``(…) -> …``; None for another type."""
    if not text.startswith("("):
        return None
    end = closing(text, 0)
    return (text[:end], text[end + 4 :]) if text.startswith(" -> ", end) else None


def _type_end(text: str, start: int) -> int:
    """Where a type ends: at the attributes that follow an argument's type, or with the line."""
    at = start
    while at < len(text):
        if text.startswith(" {", at):
            return at
        at = closing(text, at) if text[at] in _OPENERS else at + 1
    return len(text)


def _word_end(text: str, start: int) -> int:
    match = re.compile(r'@(?:"[^"]*"|[\w$.-]+)').match(text, start)
    return match.end() if match else start + 1
