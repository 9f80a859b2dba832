"""What a child says of its progress in a file, shown on the terminal while it works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape

from ..lowering.scratch import scratch
from .show import status, task_bar

Show = Callable[[int, int, str], None]
"""Shows what is done, of how much, and at what the child is."""

EVERY = 0.2
"""Seconds between looks at the file."""


@contextmanager
def following(place: Path, show: Show | None) -> Iterator[None]:
    """Shows on and on what a child writes: ``DONE TOTAL WORDS…``; None shows nothing."""
    if show is None:
        yield
        return
    done = threading.Event()

    def follow() -> None:
        while not done.wait(EVERY):
            said = read(place)
            if said is not None:
                show(*said)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def read(place: Path) -> tuple[int, int, str] | None:
    """What stands in the file; None where it isn't there yet, or half written."""
    try:
        words = place.read_text().split(" ", 2)
    except OSError:
        return None
    if len(words) < 2 or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    return int(words[0]), int(words[1]), words[2] if len(words) > 2 else ""


@contextmanager
def bar() -> Iterator[tuple[Path, Show | None]]:
    """A file for a child to write to, and a bar for it; on a terminal only."""
    with (
        scratch() as folder,
        task_bar(None, "tracing") as update,
    ):
        place = Path(folder, "progress")
        if update is None:
            yield place, None
            return
        yield place, lambda done, total, at: update(completed=done, total=total or None, at=at)


@contextmanager
def line(text: str, words: Callable[[int, int], str]) -> Iterator[tuple[Path, Show | None]]:
    """A file for a child to write to, and a line for it; on a terminal only.

    Args:
        text: what is being done.
        words: how far it is, of the two numbers that the child writes.
    """
    with (
        scratch() as folder,
        status(text) as shown,
    ):
        place = Path(folder, "progress")
        if shown is None:
            yield place, None
            return
        yield place, lambda a, b, _: shown.update(escape(f"{text}: {words(a, b)}"))
