"""What tells that a file or a folder is another one now, without reading it."""

from __future__ import annotations

import importlib.machinery
import os
from pathlib import Path

_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_SNAPSHOTS = ".snapshots"
Identity = list[int]
"""Device, inode, size in bytes, and the times of its content and of itself in nanoseconds."""


def identity(path: str) -> Identity | None:
    """What is at the end of ``path``; None where nothing is."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def names(path: str, imports: bool) -> list[str]:
    """The names in a folder, sorted; with ``imports``, those that modules have.

    Byte code and this package's own snapshots, which come and go with a gate, are left out.

    Raises:
        OSError: it can't be listed.
    """
    with os.scandir(path) as entries:
        kept = (e for e in entries if not _own(e) and (not imports or _importable(e)))
        return sorted(entry.name for entry in kept)


def sight(path: str, imports: bool) -> list[int | str] | None:
    """A folder's device and inode, and the names in it; None where it can't be listed."""
    found = identity(path)
    if found is None:
        return None
    try:
        return [*found[:2], *names(path, imports)]
    except OSError:
        return list(found)


def _importable(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(_SUFFIXES) or (entry.is_dir() and not entry.name.startswith("."))


def _own(entry: os.DirEntry[str]) -> bool:
    if entry.name == "__pycache__" or entry.name == f"relower{_SNAPSHOTS}":
        return True
    return entry.name.endswith(_SNAPSHOTS) and Path(entry.path).with_suffix(".toml").is_file()
