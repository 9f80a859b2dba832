"""How reports look on a terminal: shared pieces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH_WHEN_PIPED = 100


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


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, on a terminal only."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield lambda text: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=total, at="")
        yield lambda text: bar.update(task, advance=1, at=text)
