"""Folders for what lasts no longer than a process; those of killed processes are taken away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"relower-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-\w+")
_SWEPT: set[str] = set()
"""Folders of temporary files that this process has looked through."""


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, to be used as `tempfile.TemporaryDirectory`.

    A process that is killed leaves its folder. So its name says whose it is, and the first folder
    that a process asks for takes away those of processes that have ended. Where there is no
    ``/proc``, nothing is taken away.
    """
    mark = _mark(os.getpid())
    if mark is None:
        return tempfile.TemporaryDirectory(prefix="relower-")
    place = tempfile.gettempdir()
    if place not in _SWEPT:
        _SWEPT.add(place)
        _sweep(Path(place))
    return tempfile.TemporaryDirectory(prefix=f"relower-{mark}-")


def _mark(pid: int) -> str | None:
    """Names a process for good: host and name space, id, and the tick in which it started."""
    started, host = _started(pid), _host()
    return None if started is None or host is None else f"{host}-{pid}-{started}"


def _host() -> str | None:
    """This start of this host and the name space of its process ids, in which they mean a thing.

    Several hosts, and containers of one, may share a folder of temporary files.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _started(pid: int) -> str | None:
    """The tick in which a living process started; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19]


def _sweep(place: Path) -> None:
    """Takes away this user's folders of processes of this host that have ended."""
    host = _host()
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or match["host"] != host:
                continue
            with contextlib.suppress(OSError):  # it went meanwhile
                own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
                folder = entry.is_dir(follow_symlinks=False)
                if own and folder and _started(int(match["pid"])) != match["started"]:
                    shutil.rmtree(entry.path, ignore_errors=True)
