"""What a child reads while it lowers: files, folders, environment variables.

Python announces every file that it opens and every folder that it lists to audit hooks, also those
that the import system looks into. What a C library opens by itself isn't seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .sight import identity, sight

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
_METADATA = ("importlib.metadata", "importlib_metadata", "pkg_resources")
"""They list each folder of the path to find which packages are installed."""
_HOST = ("platform", "ctypes.util")
"""They ask other programs about the host, and about nothing else."""
_OWN = (__package__.partition(".")[0],)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
ALL = "*"
"""Stands for the whole environment where a program went through it."""


@dataclass
class Recorder:
    """What has been read since `start`, and what it was when it was first looked at."""

    files: dict[str, Any] = field(default_factory=dict)
    searched: dict[str, Any] = field(default_factory=dict)
    """Folders that modules were looked for in."""
    listed: dict[str, Any] = field(default_factory=dict)
    """Folders that anything else listed."""
    asked: set[str] = field(default_factory=set)
    """Of ``listed``, those that weren't listed to find out what is installed."""
    variables: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)
    """Of ``opaque``, what installed packages did for themselves and nothing else did."""
    _made: set[str] = field(default_factory=set)
    """Folders that weren't there and were made, and nothing was moved or linked into."""
    _looking: threading.local = field(default_factory=threading.local)

    def start(self) -> None:
        """Begins; there is no end, for Python keeps audit hooks."""
        for path in (*module_files(), *_libraries()):
            self._see(path)
        for path in sys.path:
            self._list(path or ".", self.searched)
        sys.addaudithook(self._heard)
        self._hear_variables()
        self._hear_open()

    def _hear_variables(self) -> None:
        kind: Any = type(os.environ)
        get, each, count = kind.__getitem__, kind.__iter__, kind.__len__
        names = self.variables

        def getitem(environ: Any, name: Any) -> Any:
            names.add(os.fsdecode(name) if isinstance(name, (str, bytes)) else ALL)
            return get(environ, name)

        def iterate(environ: Any) -> Any:
            names.add(ALL)
            return each(environ)

        def length(environ: Any) -> Any:
            names.add(ALL)
            return count(environ)

        kind.__getitem__, kind.__iter__, kind.__len__ = getitem, iterate, length

    def _hear_open(self) -> None:
        """Has `os.open` say which folder a path is relative to, which its event leaves out."""
        real = os.open

        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None and _reads(None, flags):
                folder = self._path(dir_fd)
                if folder is not None:
                    self._see(os.path.join(folder, os.fsdecode(path)))
            return real(path, flags, mode, dir_fd=dir_fd)

        module: Any = os
        module.open = opened
        module.supports_dir_fd.add(opened)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(self._looking, "now", False):
            return
        if event == "open":
            path, mode, flags = arguments
            if _reads(mode, flags) and not isinstance(path, int):
                self._see(path)
        elif event == "os.mkdir":
            full = self._path(arguments[0]) if arguments[2] == -1 else None
            if full is not None and identity(full) is None:
                self._made.add(full)
        elif event in ("os.rename", "os.link", "os.symlink"):
            full = self._path(arguments[1]) if set(arguments[2:]) <= {-1} else None
            self._made -= {p for p in self._made if full is None or Path(full).is_relative_to(p)}
        elif event == "import" and isinstance(arguments[1], str):
            self._see(arguments[1])
        elif event in ("os.listdir", "os.scandir"):
            folder = "." if arguments[0] is None else arguments[0]
            self._list(folder, self.searched if (found := _for_imports()) else self.listed)
            if not found and not _of(sys._getframe(1), _METADATA):
                self.asked.update(filter(None, [self._path(folder)]))
        elif event in _OPAQUE:
            if not _by_a_library(sys._getframe(1)):
                self.libraries.discard(event)
            elif event not in self.opaque:
                self.libraries.add(event)
            self.opaque.add(event)

    def _see(self, path: Any) -> None:
        full = self._path(path)
        if full is None or (full := _source(full)) in self.files or os.path.isdir(full):
            return
        self.files[full] = identity(full)

    def _list(self, path: Any, folders: dict[str, Any]) -> None:
        full = self._path(path)
        if full is not None and full not in folders:
            self._looking.now = True
            try:
                folders[full] = sight(full, folders is self.searched)
            finally:
                self._looking.now = False

    def _path(self, path: Any) -> str | None:
        if isinstance(path, int):
            try:
                return os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                self.opaque.add(f"the descriptor {path} of a folder")
                return None
        if isinstance(path, (str, bytes, os.PathLike)):
            return os.path.abspath(os.fsdecode(path))
        return None

    def sources(self) -> set[str]:
        """The files that were opened, sources in place of their byte code."""
        return set(self.files)

    def used(self) -> set[str]:
        """What was used that may bring anything into a program, `libraries` included."""
        # Pools start their processes by a call that isn't announced.
        return self.opaque | {name for name in sys.modules if name.startswith(_POOLS)}

    def found(self, apart: str | None = None) -> Mapping[str, Any]:
        """Everything read so far, with the sources of all modules; plain JSON.

        Args:
            apart: a folder whose files are left out.
        """
        files = dict(self.files)
        for path in (*module_files(), *_libraries()):
            if (source := _source(path)) not in files:
                files[source] = identity(source)
        for path in sys.path:
            self._list(path or ".", self.searched)

        # What was in a temporary folder came from what was read elsewhere.
        gone = {path for path in self._made if identity(path) is None}
        without = gone if apart is None else gone | {apart}

        def kept(paths: Mapping[str, Any]) -> dict[str, Any]:
            return {
                path: paths[path]
                for path in sorted(paths)
                if without.isdisjoint((path, *map(str, Path(path).parents)))
            }

        seen = {
            "files": {p: found for p, found in kept(files).items() if not os.path.isdir(p)},
            "searched": kept(self.searched),
            "listed": {**kept(self.listed), **dict.fromkeys(sorted(gone))},
        }
        return {
            **{kind: list(paths) for kind, paths in seen.items()},
            "seen": seen,
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


def _of(frame: Any, names: Iterable[str]) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _by_a_library(frame: Any) -> bool:
    """Whether an installed package does something for itself, not for the case that called it.

    That is what this package does, questions about the host, and what runs while a package's
    module is imported.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if _of(frame, _HOST) or _of(frame, _OWN):
            return True
        if any(f"{os.sep}{name}{os.sep}" in path for name in _INSTALLED):
            if frame.f_code.co_name == "<module>":
                return True
        elif not path.startswith(("<frozen ", _STANDARD)):
            return False
        frame = frame.f_back
    return False  # a thread that does nothing else


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


def _source(path: str) -> str:
    """The source that a file of byte code was made from."""
    if not path.endswith(".pyc"):
        return path
    try:
        source = importlib.util.source_from_cache(path)
    except (NotImplementedError, ValueError):
        return path
    return source if os.path.exists(source) else path
