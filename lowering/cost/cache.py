"""What the compiler said of a program, kept on disk, so that nothing is compiled twice.

An entry is found by a digest of all that the answer depends on: the module with its settings,
target, flags and the versions of the compiler. It holds what the compiler wrote, not what was
made of it, so that it stays good where the estimates of this package change.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache_folder import default_folder, write_whole
from ..compile import Compiled, CompileFailed, StagedModule
from ..process import Limits
from .estimate import Figures
from .versions import versions

FORMAT = "relower-cost 1"
MAX_BYTES = 1 << 29
"""What all entries may take together; the longest unused go first."""
MAX_ENTRY = 1 << 28
"""Bytes of one entry, unpacked, beyond which it isn't read."""
SWITCH = "RELOWER_COST_CACHE"
_OFF = ("0", "off", "no", "false")
_READ = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "TPU_LIBRARY_PATH")
"""Variables that change what the compiler does."""


@dataclass(frozen=True)
class Answer:
    """What came of compiling a program: figures, or why there is no program."""

    compiled: Compiled | None
    figures: Figures | None
    notes: tuple[str, ...] = ()
    failure: CompileFailed | None = None
    limited: Limits | None = None
    """The limits, where one of them was exceeded on the way; None where none was."""
    lasting: bool = True
    """Whether the same would come of it again; not after an accident."""


@dataclass
class CostCache:
    """The entries in one folder; nothing here raises for what is in it or can't be written."""

    folder: Path
    limit: int = MAX_BYTES
    fresh: bool = False
    """Whether entries are only written."""
    reused: int = 0
    troubles: list[str] = field(default_factory=list)

    def find(self, key: str, limits: Limits) -> Answer | None:
        """An earlier answer that would be the same now.

        One that a limit cut short is used only where no larger limit is given now.
        """
        path = self._path(key)
        if self.fresh or not path.is_file():
            return None
        try:
            answer = _unpacked(path)
            os.utime(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError,
                RecursionError) as error:  # fmt: skip
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            self.troubles.append(f"a damaged entry of the cache was ignored: {path}: {reason}")
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        if answer.limited is not None and _larger(limits, answer.limited):
            return None
        self.reused += 1
        return answer

    def store(self, key: str, answer: Answer) -> None:
        """Keeps an answer, unless it may have been an accident."""
        if not answer.lasting:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self._path(key), _packed(answer))
            self._shrink()
        except OSError as error:
            self.troubles.append(f"the cache can't be written: {error}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _shrink(self) -> None:
        found = sorted(self._entries())
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.glob("*.json.gz"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path


def user_cache() -> CostCache | None:
    """The user's cache; None where ``RELOWER_COST_CACHE=off``."""
    if os.environ.get(SWITCH, "").strip().lower() in _OFF:
        return None
    return CostCache(default_folder() / "cost")


def key_of(staged: StagedModule, bundles: bool, analysis: bool = True) -> str:
    """A digest of all that the compiler's answer depends on."""
    asked = {
        "format": FORMAT,
        "module": hashlib.sha256(staged.module).hexdigest(),
        "settings": staged.settings,
        "target": staged.target,
        "bundles": bundles,
        **({} if analysis else {"analysis": False}),
        "versions": versions(),
        "variables": {name: os.environ.get(name) for name in _READ},
        "library": _library(),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:40]


def _library() -> list[int] | None:
    """Size and time of a compiler that stands beside the installed one, whose version says it."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    try:
        stat = os.stat(path) if path else None
    except OSError:
        return None
    return None if stat is None else [stat.st_size, stat.st_mtime_ns]


def _larger(given: Limits, stored: Limits) -> bool:
    """Whether any limit now is above that of an earlier run."""

    def above(a: float | None, b: float | None) -> bool:
        return b is not None and (a is None or a > b)

    return above(given.seconds, stored.seconds) or above(given.memory, stored.memory)


def _packed(answer: Answer) -> bytes:
    compiled, figures, failure = answer.compiled, answer.figures, answer.failure
    body: dict[str, Any] = {
        "format": FORMAT,
        "compiled": compiled and {
            "hlo": compiled.hlo,
            "memory": dict(compiled.memory),
            "cost": dict(compiled.cost),
            "seconds": compiled.seconds,
        },
        "figures": figures and {
            "rung": figures.rung,
            "salvaged": dict(figures.salvaged),
            "bundles": dict(figures.bundles),
        },
        "notes": list(answer.notes),
        "failure": failure and {"message": failure.cause, "kind": failure.kind},
        "limited": answer.limited and [answer.limited.seconds, answer.limited.memory],
    }  # fmt: skip
    text = json.dumps(body)
    whole = json.dumps({"check": hashlib.sha256(text.encode()).hexdigest(), "body": text})
    return gzip.compress(whole.encode(), 6)


def _unpacked(path: Path) -> Answer:
    with gzip.open(path) as source:
        data = source.read(MAX_ENTRY + 1)
    if len(data) > MAX_ENTRY:
        raise ValueError("too large")
    whole = json.loads(data)
    if hashlib.sha256(whole["body"].encode()).hexdigest() != whole["check"]:
        raise ValueError("it doesn't have the digest that it states")
    body: Mapping[str, Any] = json.loads(whole["body"])
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}")
    compiled, figures, failure = body["compiled"], body["figures"], body["failure"]
    limited = body["limited"]
    return Answer(
        compiled=compiled and Compiled(**compiled),
        figures=figures and Figures(**figures),
        notes=tuple(body["notes"]),
        failure=failure and CompileFailed(failure["message"], failure["kind"]),
        limited=limited and Limits(*limited),
    )
