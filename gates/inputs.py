"""Digests of what a lowering reads: whether it would read the same now."""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import site
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..lowering.errors import InputError
from .recorder import ALL
from .sight import Identity, identity, names

BIG = 1 << 20
"""Files of at least so many bytes are read once, and known by their times from then on."""
ABSENT = "absent"
# Read by libraries of C++, which don't say so.
_PREFIXES = ("JAX", "XLA", "TPU", "LIBTPU", "TF_", "PALLAS", "MOSAIC", "PYTHON", "LD_", "OMP_")
_PACKAGES = ("jax", "jaxlib", "libtpu", "numpy", "relower")
_PARTS = ("", ".cli", ".compat", ".gates", ".kernels", ".lowering", ".matchers", ".passes")
_SETTLED = 2_000_000_000
"""Nanoseconds after which another write surely shows in a file's times."""


class Unstable(Exception):
    """Something that can't be told by its content: no result that read it may be reused."""


class Digests:
    """Digests of files and folders, made once of each that is left alone."""

    def __init__(self, known: Mapping[str, Sequence[object]] | None = None) -> None:
        self.known = {path: list(entry) for path, entry in (known or {}).items()}
        """Of big files: size, times and inode, and the digest."""
        self._made: dict[str, tuple[Identity, str]] = {}
        self._since = time.time_ns() - _SETTLED

    def file(self, path: str) -> str:
        """The digest of a file's content, or `ABSENT`.

        Raises:
            Unstable: it is a device, a pipe or the like.
        """
        found = identity(path)
        made = self._made.get(path)
        if made is not None and made[0] == found:
            return made[1]
        digest = self._file(path)
        if found is not None and max(found[-2:]) < self._since:
            self._made[path] = (found, digest)
        return digest

    def _file(self, path: str) -> str:
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode) or path.startswith("/proc/"):
                raise Unstable(f"it reads {path}")
            times = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
            entry = self.known.get(path)
            if found.st_size >= BIG and entry is not None and entry[:-1] == times:
                return str(entry[-1])
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        except OSError as error:
            raise Unstable(f"{path} can't be read: {error.strerror}") from error
        if found.st_size >= BIG:
            self.known[path] = [*times, digest]
        return digest

    def folder(self, path: str, imports: bool) -> str:
        """The digest of the names in a folder; with ``imports``, of those that modules have."""
        try:
            return digest(names(path, imports))
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT if not os.path.exists(path) else self.file(path)
        except OSError as error:
            raise Unstable(f"{path} can't be listed: {error.strerror}") from error


def digest(value: object) -> str:
    """The sha256 of plain JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def variables(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Digests of the variables that were asked for, and of those that libraries of C++ ask for."""
    chosen = set(names) | {name for name in environment if name.startswith(_PREFIXES)}
    found = {
        name: digest(environment[name]) if name in environment else ABSENT
        for name in sorted(chosen - {ALL})
    }
    return {**found, ALL: digest(dict(environment))} if ALL in chosen else found


def machinery() -> dict[str, object]:
    """What lowers: this package's own sources, jax, Python, the processor."""
    sources: dict[str, str] = {}
    for part in _PARTS:
        spec = importlib.util.find_spec(f"relower{part}")
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob("*.py")):
                sources[f"{part}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "sources": digest(sources),
        "python": [sys.version, sys.executable, sys.prefix, _paths()],
        "processor": [platform.machine(), _processor()],
    }


def _paths() -> str:
    """What adds folders to Python's path when it starts."""
    folders = [sys.prefix, *site.getsitepackages(), site.getusersitepackages()]
    files = [p for f in folders for p in (*Path(f).glob("*.pth"), *Path(f).glob("pyvenv.cfg"))]
    return digest([(str(path), path.read_bytes().hex()) for path in sorted(files)])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _processor() -> str:
    """What decides how the host computes constants."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return digest(sorted(kept))


def matched(patterns: Sequence[str], folder: Path) -> list[str]:
    """The files that patterns name, as seen from ``folder``.

    Raises:
        InputError: a pattern matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        names = glob.glob(pattern, root_dir=folder, recursive=True, include_hidden=True)
        paths = {str(path) for name in names if (path := folder / name).is_file()}
        if not paths:
            raise InputError(f"inputs {pattern!r}: matches no file in {folder}")
        found |= paths
    return sorted(found)
