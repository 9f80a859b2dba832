"""Lowered programs that need not be lowered again, because everything they read is as it was.

An entry is found by what was asked and by what lowers (`inputs.machinery`); it holds a list of all
that the lowering read, and is used only if each of it has the same digest now. Where anything is in
doubt, nothing is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..lowering.artifact import load
from ..lowering.cache_folder import default_folder as default_folder
from ..lowering.cache_folder import write_whole
from ..lowering.errors import InputError
from ..lowering.program import Program
from .child import Job, environment
from .inputs import Digests, Unstable, digest, machinery, variables
from .revision import locate
from .sight import Identity, identity, sight

FORMAT = "relower-cache 1"
MAX_BYTES = 1 << 29
"""What the entries of a cache may take together; the longest unused go first."""
MAX_MANIFEST_BYTES = 1 << 24
_MEMO = "big-files.json"
_NOT_KEPT = ": not kept in the cache: "
_TRIED = 8
"""Entries of one request that are looked at, the newest first."""


@dataclass
class Cache:
    """The entries in one folder.

    Nothing here raises for what is in the folder or can't be written to it: `troubles` says it.
    """

    folder: Path
    fresh: bool = False
    """Whether entries are only written."""
    limit: int = MAX_BYTES
    reused: int = 0
    troubles: list[str] = field(default_factory=list)
    _digests: Digests | None = None
    _machinery: Mapping[str, object] | None = None
    _started: int = field(default_factory=lambda: _clock())
    _declared: dict[str, dict[str, Identity | None]] = field(default_factory=dict)
    """By key, the files that were named as inputs, as they were when the key was made."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def remarks(self) -> list[str]:
        """The troubles; programs that weren't kept for one reason stand in one."""
        alike: dict[str, list[str]] = {}
        for trouble in dict.fromkeys(self.troubles):
            spec, mark, reason = trouble.partition(_NOT_KEPT)
            alike.setdefault(mark + reason, []).append(spec)
        return [
            f"{specs[0] if len(specs) == 1 else f'{len(specs)} programs'}{reason}"
            for reason, specs in alike.items()
        ]

    def key(self, job: Job, folder: Path, files: Sequence[str]) -> str | None:
        """What a lowering is found by; None where it can't be told.

        Args:
            job: the lowering.
            folder: its working directory.
            files: what it reads besides what a child would notice.

        Raises:
            InputError: a revision isn't there.
        """
        if self._machinery is None:
            self._machinery = machinery()
        place = locate(job.spec, folder)
        declared = {path: identity(path) for path in files}
        asked = {k: v for k, v in asdict(job).items() if k not in ("output", "record", "revision")}
        try:
            name = digest(
                {
                    "format": FORMAT,
                    "job": asked,
                    "folder": str(Path(os.path.realpath(folder))),
                    "revision": None if place is None else [place.commit, str(place.toplevel)],
                    "files": {path: self._known().file(path) for path in files},
                    "machinery": self._machinery,
                }
            )
        except Unstable as error:
            self.troubles.append(f"{job.spec}: not looked for in the cache: {error}")
            return None
        self._declared[name[:40]] = declared
        return name[:40]

    def find(self, key: str) -> tuple[Program, dict[str, Any]] | None:
        """The program of an earlier lowering that would be the same now, and what was answered."""
        if self.fresh:
            return None
        paths = sorted(self.folder.glob(f"{key}.*.json"), key=_age, reverse=True)
        for path in paths[:_TRIED]:
            try:
                found = self._entry(path)
            except (InputError, ValueError, TypeError, KeyError, OSError, AttributeError,
                    RecursionError) as error:  # fmt: skip
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                self.troubles.append(f"a damaged entry of the cache was ignored: {path}: {reason}")
                _remove(path)
                continue
            if found is not None:
                with self._lock:
                    self.reused += 1
                return found
        return None

    def _entry(self, path: Path) -> tuple[Program, dict[str, Any]] | None:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError("too large")
        manifest = json.loads(path.read_bytes())
        body = manifest["body"]
        if manifest["check"] != digest(body) or body["format"] != FORMAT:
            raise ValueError("it doesn't have the digest that it states")
        try:
            if self._now(body["read"]) != body["found"]:
                return None
        except Unstable:
            return None
        artifact = path.with_suffix(".program")
        if hashlib.sha256(artifact.read_bytes()).hexdigest() != body["program"]:
            raise ValueError("the program isn't the one that was stored")
        program = load(artifact)
        for used in (path, artifact):
            os.utime(used)
        return program, body["answer"]

    def store(self, key: str, job: Job, artifact: Path, answer: Mapping[str, Any]) -> None:
        """Keeps a lowering, unless something that it read can't be told, or has changed since."""
        read = answer["read"]
        with self._lock:
            try:
                if read["opaque"]:
                    raise Unstable(f"the case used {', '.join(read['opaque'])}")
                # Whatever hasn't been written since has been one thing for digest and lowering.
                declared = self._declared[key]
                _unwritten(read, declared, self._started)
                found = self._now(read)
                _unchanged({**read["seen"], "declared": declared})
                self._write(key, artifact, answer, found)
            except Unstable as error:
                self.troubles.append(f"{job.spec}{_NOT_KEPT}{error}")
            except OSError as error:
                self.troubles.append(f"the cache can't be written: {error}")

    def _write(
        self, key: str, artifact: Path, answer: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        data = artifact.read_bytes()
        body = {
            "format": FORMAT,
            "read": {k: v for k, v in answer["read"].items() if k != "seen"},
            "found": found,
            "answer": {"expect": answer["expect"], "notes": answer["notes"]},
            "program": hashlib.sha256(data).hexdigest(),
        }
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / f"{key}.{digest(found)[:16]}.json"
        write_whole(path.with_suffix(".program"), data)
        write_whole(path, json.dumps({"body": body, "check": digest(body)}).encode())
        write_whole(self.folder / _MEMO, json.dumps(self._known().known).encode())
        self._shrink()

    def _now(self, read: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        digests = self._known()
        return {
            "files": {path: digests.file(path) for path in read["files"]},
            "searched": {path: digests.folder(path, True) for path in read["searched"]},
            "listed": {path: digests.folder(path, False) for path in read["listed"]},
            "variables": variables(read["variables"], environment(os.environ)),
        }

    def _known(self) -> Digests:
        if self._digests is None:
            try:
                known = json.loads((self.folder / _MEMO).read_bytes())
                if not all(isinstance(v, list) and len(v) == 5 for v in known.values()):
                    known = {}
            except (OSError, ValueError, AttributeError):
                known = {}
            self._digests = Digests(known)
        return self._digests

    def _shrink(self) -> None:
        entries = sorted(self.folder.glob("*.json"), key=_age)
        sizes = {p: _size(p) + _size(p.with_suffix(".program")) for p in entries if p.name != _MEMO}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self.limit:
                return
            _remove(path)
            total -= size


def _clock() -> int:
    """Now, in nanoseconds by the clock that stamps files."""
    with tempfile.NamedTemporaryFile(prefix="relower-") as file:
        return os.stat(file.name).st_mtime_ns


def _unchanged(seen: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `Unstable` where a path leads to something else than when it was first looked at.

    Unlike the times of writing, this shows what was deleted, renamed or linked anew.
    """
    for kind, paths in seen.items():
        folders = kind in ("searched", "listed")
        for path, found in paths.items():
            if (sight(path, kind == "searched") if folders else identity(path)) != found:
                raise Unstable(f"{path} changed while it was lowered")


def _unwritten(read: Mapping[str, list[str]], declared: Iterable[str], started: int) -> None:
    """Raises `Unstable` where a file has been written since the lowering began."""
    beside = (
        entry.path
        for folder in read["searched"]
        if os.path.isdir(folder)
        for entry in os.scandir(folder)
        if entry.name.endswith(".py")
    )
    for path in (*read["files"], *declared, *beside):
        try:
            found = os.stat(path)
        except OSError:
            continue
        if max(found.st_mtime_ns, found.st_ctime_ns) >= started:
            raise Unstable(f"{path} was written while it was lowered, or just before")


def _remove(path: Path) -> None:
    for file in (path, path.with_suffix(".program")):
        try:
            file.unlink(missing_ok=True)
        except OSError:
            shutil.rmtree(file, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
