"""How reports look on a terminal: shared pieces."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..lowering.errors import InputError

WIDTH_WHEN_PIPED = 100
UNDECIDED = 2


class _Console(Console):
    """A console that leaves a reader who has gone to the command, whose exit code says so."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into exit code 1, which means "different"."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console() -> Console:
    """Standard output; of a fixed width where it is no terminal, so that files are stable."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_WHEN_PIPED
    return _Console(width=width, highlight=False, soft_wrap=False)


def tabled(out: Console, table: Table) -> None:
    """Prints a table without spaces at the ends of lines, which `rich` fills columns up with."""
    for parts in out.render_lines(table, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in parts))
        line.rstrip()
        out.print(line, no_wrap=True, overflow="ignore", crop=False)


def print_json(name: str, value: Mapping[str, Any]) -> None:
    """``value`` as JSON on standard output, with the schema's ``name`` (docs/json.md) on top."""
    print(json.dumps({"schema": f"relower.{name}/1", **value}, indent=2, ensure_ascii=False))


def folder_exists(option: str, path: str | None) -> None:
    """Says so before the work begins where a report couldn't be written after it.

    Raises:
        InputError: the folder of ``path`` doesn't exist.
    """
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise InputError(f"{option} {path}: its folder doesn't exist")


def written(option: str, path: str | None, report: Callable[[], str]) -> list[str]:
    """Writes a report where ``path`` asks for one, whole or not at all; what went wrong."""
    if path is None:
        return []
    text = report().encode()
    try:
        if Path(path).exists() and not Path(path).is_file():  # /dev/stdout, a pipe
            Path(path).write_bytes(text)
            return []
        beside = f"{path}.part"
        Path(beside).write_bytes(text)
        os.replace(beside, path)
    except OSError as error:
        return [f"{option} {path}: can't be written: {error.strerror or error}"]
    return []


def exit_code(code: int, trouble: list[str]) -> int:
    """Prints what went wrong with reports; the exit code, which then isn't 0.

    A report that is missing must not look like success, nor hide that something is broken.
    """
    for line in trouble:
        print(f"relower: {line}", file=sys.stderr)
    return code or (UNDECIDED if trouble else 0)


@contextmanager
def status(text: str) -> Iterator[Any]:
    """A line on standard error while something slow runs, on a terminal only."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield None
        return
    with errors.status(escape(text)) as shown:
        yield shown


@contextmanager
def task_bar(total: int | None, at: str = "") -> Iterator[Callable[..., None] | None]:
    """A bar on standard error, as what changes it; None where that is no terminal.

    What changes it takes what `rich` takes of a task: ``advance``, ``completed``, ``total``, and
    ``at``, where the work is.
    """
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=errors, transient=True) as shown:
        yield functools.partial(shown.update, shown.add_task("", total=total, at=at))


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, on a terminal only; told what is done, one after the other."""
    with task_bar(total) as update:
        if update is None:
            yield lambda text: None
        else:
            yield lambda text: update(advance=1, at=text)
