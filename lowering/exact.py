"""Level ``exact``: MLIR's own text of each function, edited only where a noise rule applies.

Most lines of a program hold nothing that a rule sets aside, and stay as they are. The others are
found by the few words that all of them contain (`TAIL_MARKS`, `ALWAYS`), read, and written anew.
Whether a line is written anew depends on what it says, never on where it stands or what its names
are, so lines that differ in noise only come out the same.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .printed import Printed
from .printer import Names, attributes_text
from .program import Section
from .read import UNKNOWN_DIALECT
from .session import Session
from .tails import ALWAYS, TAIL_MARKS, Tails

# One group each: strings are free, where a tuple a line would set off Python's collector.
_BEGINNING = re.compile(r'\n( *[%"}^])')
_NAME = re.compile(r'\n *(?:%[\w:]+ = )?"([^"\n]*)"')
_SEVERAL = re.compile(r"\n *%\w+:(\d+) = ")
_OPERATION = re.compile(r'(?P<head> *(?:%[\w:]+ = )?"(?P<name>[^"]*)"\([^()]*\))(?P<tail>.*)')
_CLOSING = re.compile(r"(?P<head>(?P<indent> *)\}\))(?P<tail>.*)")
_CHUNK = 1 << 18
"""Characters that are scanned at once, which bounds the memory that scanning takes."""
_WINDOW = 1000
"""An attribute that is too long covers at least one aligned window of this many characters."""


@dataclass
class Body:
    """What the body of one function holds."""

    pieces: list[str]
    """The canonical text, in pieces that are joined once: a text may be a large part of memory."""
    locations: list[int]
    """For each line."""
    ops: Counter[str] = field(default_factory=Counter)
    callees: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)


class ExactPrinter:
    """Canonical text of the functions of one module, with shared `Names`."""

    def __init__(
        self, session: Session, tails: Tails, names: Names, dialects: frozenset[str]
    ) -> None:
        self._session = session
        self._tails = tails
        self._names = names
        self._dialects = dialects

    def header(self, printed: Printed) -> list[str]:
        """One line for the function, and one for each argument and result."""
        header = printed.header
        resolve = self._names.resolve
        kind = "public" if header.public else "private"
        lines = [f"func.func {kind}{attributes_text(header.attrs, resolve)}\n"]
        for (name, text), attrs in zip(printed.arguments, header.arg_attrs, strict=True):
            lines.append(f"  arg {name}: {text}{attributes_text(attrs, resolve)}\n")
        results = zip(header.result_types, header.result_attrs, strict=True)
        for index, (text, attrs) in enumerate(results):
            lines.append(f"  result {index}: {text}{attributes_text(attrs, resolve)}\n")
        return lines

    def body(self, printed: Printed) -> Body:
        """The operations, one a line; what was set aside is counted."""
        text = printed.body
        body = Body([text], [])
        lines = self._lines(printed, body)
        if lines is None:
            reason = "the form that MLIR prints it in can't be read"
            self._session.unknown(f"function {printed.header.key}", reason, printed.header.loc)
            body.locations = [-1] * text.count("\n")
        else:
            body.locations = lines
        self._check_dialects(text, body)
        body.pieces = self._edits(text, body) or [text]
        return body

    def _lines(self, printed: Printed, body: Body) -> list[int] | None:
        """The location of each line, or None for text of an unexpected form."""
        text = printed.body
        places = iter(printed.locations)
        found: list[int] = []
        opened: dict[str, int] = {}
        values = start = 0
        while start < len(text):
            end = text.find("\n", start + _CHUNK) + 1 or len(text)
            chunk = "\n" + text[start : end - 1]
            lines = _BEGINNING.findall(chunk)
            if len(lines) != chunk.count("\n"):
                return None
            for line in lines:
                if line[-1] == "^":
                    found.append(-1)
                elif line[-1] == "}":
                    found.append(opened.get(line[:-1], -1))
                else:
                    opened[line[:-1]] = place = next(places, -2)
                    found.append(place)
            body.ops.update(_NAME.findall(chunk))
            values += sum(count for line, count in Counter(lines).items() if line[-1] == "%")
            values += sum(int(count) - 1 for count in _SEVERAL.findall(chunk))
            start = end
        if sum(body.ops.values()) != len(printed.locations):
            return None
        self._session.ledger.add("location", len(printed.locations))
        self._session.ledger.add("value-name", values)
        return found

    def _check_dialects(self, text: str, body: Body) -> None:
        for name in body.ops:
            if name.partition(".")[0] not in self._dialects:
                line = text.count("\n", 0, text.find(f'"{name}"('))
                self._session.unknown(name, UNKNOWN_DIALECT, body.locations[line])

    def _edits(self, text: str, body: Body) -> list[str]:
        """The pieces of the edited text, or nothing if no line changes."""
        pieces: list[str] = []
        done = at = number = 0
        for start in self._marked(text, body):
            end = text.index("\n", start)
            number += text.count("\n", at, start)
            at = start
            line = self._line(text, start, end, body, number)
            if line is not None:
                pieces.append(text[done:start])
                pieces.append(line)
                done = end
        if pieces:
            pieces.append(text[done:])
        return pieces

    def _marked(self, text: str, body: Body) -> list[int]:
        """Where the lines begin that a rule may apply to, in order."""
        words = [*TAIL_MARKS, *(f'"{name}"(' for name in ALWAYS if name in body.ops)]
        starts: set[int] = set()
        for word in words:
            found = text.find(word)
            while found >= 0:
                starts.add(text.rfind("\n", 0, found) + 1)
                found = text.find(word, text.index("\n", found))
        for window in range(0, len(text) - _WINDOW, _WINDOW):
            if text.find("\n", window, window + _WINDOW) < 0:
                starts.add(text.rfind("\n", 0, window) + 1)
        return sorted(starts)

    def _line(self, text: str, start: int, end: int, body: Body, number: int) -> str | None:
        """The line anew, or None where nothing was set aside."""
        line = text[start:end]
        match = _OPERATION.fullmatch(line)
        if match is not None:
            name = match["name"]
        else:
            match = _CLOSING.fullmatch(line)
            if match is None:
                if not line.lstrip().startswith(("^", "}")):
                    reason = "the form that MLIR prints it in can't be read"
                    self._session.unknown(line.strip()[:80], reason, body.locations[number])
                self._tails.attributes.check_types(line)
                return None
            name = _owner(text, start, match["indent"])
        tail = self._tails.of(name, match["tail"], body.locations[number])
        for rule, count in tail.rules:
            self._session.ledger.add(rule, count)
        if tail.callee is not None:
            body.callees[tail.callee] += 1
        if tail.kernel is not None:
            body.kernels[tail.kernel] += 1
        if not tail.changed:
            return None
        if tail.resolved is None:
            tail.resolved = self._names.resolve(tail.text())
        return f"{match['head']}{tail.resolved}"

    def section(self, printed: Printed, name: str, keep: bool) -> tuple[Section, Body]:
        """The section of one function, and what its body holds, whose text it takes along.

        The printed text is let go before the canonical text is put together, unless ``keep``.
        """
        header = self.header(printed)
        body = self.body(printed)
        if not keep:
            printed.body, printed.locations = "", []
        text = "".join((*header, *body.pieces))
        first = printed.header.loc
        locations = (first, *(-1 for _ in header[1:]), *body.locations)
        body.pieces, body.locations = [], []
        return Section(name, "function", text, printed.header.key, locations), body


def _owner(text: str, start: int, indent: str) -> str:
    """The name of the operation whose last region closes at ``start``."""
    before = start
    while before > 0:
        end = before - 1
        before = text.rfind("\n", 0, end) + 1
        if text[before : before + len(indent) + 1].rstrip('"%') == indent:
            match = _OPERATION.match(text, before, end)
            return "" if match is None else match["name"]
    return ""
