"""How reports look on a terminal: shared pieces."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..lowering.program import Location

WIDTH_WHEN_PIPED = 100

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could move the cursor or recolour a terminal; artifacts may come from strangers."""


class _Console(Console):
    """A console that leaves a reader who has gone to the command, whose exit code says so."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into exit code 1, which means "different"."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output; of a fixed width where it is no terminal, so that files are stable."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_WHEN_PIPED
    return _Console(width=width, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """``value`` as JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def status(text: str) -> Iterator[None]:
    """A line on standard error while something slow runs, on a terminal only."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield
        return
    with errors.status(escape(text)):
        yield


def indented(out: Console, text: str | Text, by: int = 2) -> None:
    """Prints ``text`` wrapped at the width, every line indented alike and nothing cut."""
    body = Text(text) if isinstance(text, str) else text
    if _CONTROL.search(body.plain):
        body = Text(_CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", body.plain))
    width = max(20, out.width - by)
    for line in body.wrap(out, width, overflow="fold", no_wrap=False):
        line.rstrip()
        out.print(Text(" " * by).append_text(line), no_wrap=True, overflow="ignore", crop=False)


def relative(path: str) -> str:
    """``path`` as seen from the current folder, or from where packages are installed."""
    _, installed, inside = path.rpartition("site-packages/")
    if installed:
        return inside
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def source(where: Location | None) -> str:
    """``file.py:3`` of a location, or an empty text."""
    if where is None or where.file is None:
        return ""
    return relative(where.file) + ("" if where.line is None else f":{where.line}")


def source_text(text: str | None) -> str:
    """``file.py:3`` with the file as seen from the current folder."""
    if not text:
        return "unknown line"
    file, colon, line = text.rpartition(":")
    return f"{relative(file)}:{line}" if colon else text


def plural(count: int, noun: str) -> str:
    """``1 site``, ``2 sites``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
