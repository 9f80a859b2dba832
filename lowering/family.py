"""The processes that a command started, also those that have left its group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ROUNDS = 20
"""How often the family is looked at again while it is stopped; one round finds all but what was
being started in it."""


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    group: int
    session: int
    started: int
    """In ticks since the host started: with ``pid`` it names a process for good."""


@dataclass
class Family:
    """A process that leads a session of its own, and whatever descends from it.

    Where there is no ``/proc``, only the process group is known, and it holds no memory.
    """

    root: int
    _seen: set[tuple[int, int]] = field(default_factory=set)
    """Members seen before, so that one isn't lost when what started it has ended."""

    def members(self) -> list[int]:
        """Ids of the living members; one that waits to be collected is none."""
        living = list(_living())
        found = {p.pid: p for p in living if self._belongs(p)}
        grown = True
        while grown:
            more = {p.pid: p for p in living if p.parent in found and p.pid not in found}
            grown = bool(more)
            found |= more
        self._seen |= {(p.pid, p.started) for p in found.values()}
        return sorted(found)

    def _belongs(self, process: _Process) -> bool:
        own = self.root in (process.pid, process.group, process.session)
        return own or (process.pid, process.started) in self._seen

    def memory(self) -> int:
        """Bytes of anonymous and shared memory that the members hold."""
        return sum(_memory(pid) for pid in self.members())

    def kill(self) -> None:
        """Kills every member. They are stopped first, so that none starts another meanwhile."""
        stopped: set[int] = set()
        for _ in range(_ROUNDS):
            new = set(self.members()) - stopped
            for pid in new:
                _send(pid, signal.SIGSTOP)
            stopped |= new
            if not new:
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
            os.killpg(self.root, signal.SIGKILL)
        for pid in stopped:
            _send(pid, signal.SIGKILL)


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, what)


def _living() -> Iterator[_Process]:
    try:
        entries = [entry.name for entry in os.scandir("/proc") if entry.name.isdecimal()]
    except OSError:
        return  # no Linux
    for name in entries:
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            state, parent, group, session, started = (fields[i] for i in (0, 1, 2, 3, 19))
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        if state not in ("Z", "X"):
            yield _Process(int(name), int(parent), int(group), int(session), int(started))


def _memory(pid: int) -> int:
    """``RssAnon`` and ``RssShmem`` of a ``/proc`` status, in bytes."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return 0  # it ended meanwhile
    kinds = ("RssAnon:", "RssShmem:")
    lines = [line.split() for line in status.splitlines() if line.startswith(kinds)]
    return sum(int(fields[1]) * 1024 for fields in lines)
