"""A command under limits of time and memory, all that it started ended with it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .family import Family

POLL_SECONDS = (0.05, 0.25)
"""Between two looks at a command's processes: at first, and once it has run for long."""
_UNHURRIED = 40
"""How many looks' time it has to run before the next wait is longer."""


@dataclass(frozen=True)
class Limits:
    """What one command may use."""

    seconds: float | None = 600.0
    memory: int | None = 16 * 2**30
    """Bytes of memory of its own, over all its processes, files mapped from disk left out."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    why: Literal["exit", "signal", "time", "memory"]
    """``time`` and ``memory``: it went over that limit and was ended."""
    code: int
    """The exit code, or the signal's number, negated."""
    seconds: float
    peak: int
    """The most memory seen, in bytes, of what a look at its processes found."""


def run_limited(
    command: Sequence[str], *, env: Mapping[str, str], output: Path, limits: Limits
) -> Ended:
    """Runs a command in a session of its own until it ends or goes over a limit.

    Whatever ends the wait, an exception included, no process is left that it started, directly
    or not; they are killed, not asked.

    Args:
        command: the program and its arguments.
        env: the command's whole environment.
        output: the file that takes its output and errors.
        limits: when to end it.
    """
    start = time.monotonic()
    with output.open("wb") as sink:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
    family = Family(child.pid)
    why: Literal["time", "memory"] | None = None
    peak = 0
    try:
        while child.poll() is None:
            peak = max(peak, family.memory())
            if limits.memory is not None and peak > limits.memory:
                why = "memory"
            elif limits.seconds is not None and time.monotonic() - start > limits.seconds:
                why = "time"
            if why is not None:
                break
            least, most = POLL_SECONDS
            time.sleep(min(most, max(least, (time.monotonic() - start) / _UNHURRIED)))
    finally:
        family.kill()
        child.wait()
    taken = time.monotonic() - start
    code = child.returncode
    return Ended(why or ("signal" if code < 0 else "exit"), code, taken, peak)
