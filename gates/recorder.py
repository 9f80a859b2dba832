"""What a child reads while it lowers: files, folders, environment variables.

Python announces every file that it opens and every folder that it lists to audit hooks, also those
that the import system looks into. What a C library opens by itself isn't seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What may bring anything into a program: its result is never reused.
_OPAQUE = frozenset(
    (
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "socket.connect",
        "sqlite3.connect",
        "subprocess.Popen",
        "urllib.Request",
    )
)
_ALL = "*"
"""Stands for the whole environment where a program went through it."""


@dataclass
class Recorder:
    """What has been read since `start`."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Begins; there is no end, for Python keeps audit hooks."""
        sys.addaudithook(self._heard)
        kind: Any = type(os.environ)
        get, each = kind.__getitem__, kind.__iter__
        names = self.variables

        def getitem(environ: Any, name: Any) -> Any:
            names.add(str(name))
            return get(environ, name)

        def iterate(environ: Any) -> Any:
            names.add(_ALL)
            return each(environ)

        kind.__getitem__, kind.__iter__ = getitem, iterate

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if _reads(mode, flags):
                _add(self.files, path)
        elif event in ("os.listdir", "os.scandir"):
            _add(self.folders, "." if arguments[0] is None else arguments[0])
        elif event in _OPAQUE:
            self.opaque.add(event)

    def found(self) -> Mapping[str, list[str]]:
        """Everything read so far, with the sources of all modules; plain JSON."""
        files = {_source(path) for path in self.files} | set(module_files()) | set(_libraries())
        folders = self.folders | {os.path.abspath(entry or ".") for entry in sys.path}
        return {
            "files": sorted(path for path in files if not os.path.isdir(path)),
            "folders": sorted(folders),
            "variables": sorted(self.variables),
            "opaque": sorted(self.opaque),
        }


def module_files() -> Iterable[str]:
    """The source, or what stands for it, of every module that is loaded."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for path in (getattr(module, "__file__", None), getattr(spec, "origin", None)):
            if isinstance(path, str) and os.path.isabs(path):
                yield path


def _libraries() -> Iterable[str]:
    """Shared libraries in this process, also those that other libraries brought in."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line[line.find("/") :] if "/" in line else ""
        if ".so" in path and os.path.isfile(path):
            yield path


def _reads(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return "r" in mode or "+" in mode
    return not isinstance(flags, int) or flags & os.O_ACCMODE != os.O_WRONLY


def _add(paths: set[str], path: Any) -> None:
    if isinstance(path, (str, bytes, os.PathLike)):
        paths.add(os.path.abspath(os.fsdecode(path)))


def _source(path: str) -> str:
    """The source that a file of byte code was made from."""
    if not path.endswith(".pyc"):
        return path
    try:
        source = importlib.util.source_from_cache(path)
    except (NotImplementedError, ValueError):
        return path
    return source if os.path.exists(source) else path
