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
_POOLS = "multiprocessing.popen_"
ALL = "*"
"""Stands for the whole environment where a program went through it."""


@dataclass
class Recorder:
    """What has been read since `start`."""

    files: set[str] = field(default_factory=set)
    searched: set[str] = field(default_factory=set)
    """Folders that modules were looked for in."""
    listed: set[str] = field(default_factory=set)
    """Folders that anything else listed."""
    variables: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Begins; there is no end, for Python keeps audit hooks."""
        sys.addaudithook(self._heard)
        kind: Any = type(os.environ)
        get, each = kind.__getitem__, kind.__iter__
        names = self.variables

        def getitem(environ: Any, name: Any) -> Any:
            names.add(os.fsdecode(name) if isinstance(name, (str, bytes)) else ALL)
            return get(environ, name)

        def iterate(environ: Any) -> Any:
            names.add(ALL)
            return each(environ)

        kind.__getitem__, kind.__iter__ = getitem, iterate

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if _reads(mode, flags):
                _add(self.files, path)
        elif event in ("os.listdir", "os.scandir"):
            folder = "." if arguments[0] is None else arguments[0]
            _add(self.searched if _for_imports() else self.listed, folder)
        elif event in _OPAQUE:
            self.opaque.add(event)

    def sources(self) -> set[str]:
        """The files that were opened, sources in place of their byte code."""
        return {_source(path) for path in self.files}

    def used(self) -> set[str]:
        """What the case used that may bring anything into a program."""
        # Pools start their processes by a call that isn't announced.
        return self.opaque | {name for name in sys.modules if name.startswith(_POOLS)}

    def found(self, apart: str | None = None) -> Mapping[str, list[str]]:
        """Everything read so far, with the sources of all modules; plain JSON.

        Args:
            apart: a folder whose files are left out.
        """
        files = self.sources() | set(module_files()) | set(_libraries())
        searched = self.searched | {os.path.abspath(entry or ".") for entry in sys.path}

        def kept(paths: set[str]) -> list[str]:
            return sorted(p for p in paths if apart is None or not Path(p).is_relative_to(apart))

        return {
            "files": [path for path in kept(files) if not os.path.isdir(path)],
            "searched": kept(searched),
            "listed": kept(self.listed),
            "variables": sorted(self.variables),
            "opaque": sorted(self.used()),
        }


def _for_imports() -> bool:
    """Whether the import system, or this package on its behalf, lists a folder."""
    frame: Any = sys._getframe(2)
    if frame.f_code.co_filename.startswith("<frozen importlib"):
        return True
    while frame is not None:
        where = (frame.f_globals.get("__name__"), frame.f_code.co_name)
        if where == ("relower.lowering.load", "_set_strangers_aside"):
            return True
        frame = frame.f_back
    return False


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
