"""Where snapshots are kept, and what is said of a program's: it holds, it is proposed, accepted."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..lowering.errors import InputError
from ..lowering.program import Level, Program, apart
from .snapshot import Snapshot, changes, read, snapshot_of, written

SUFFIX = ".snapshot"
PROPOSED = ".proposed"
"""Added to the name of a file that waits to be looked at."""
Mode = Literal["check", "propose", "accept"]
"""Write nothing; write proposals; write snapshots."""

_ODD = re.compile(r"[^A-Za-z0-9_.+-]")
_LONGEST = 100


def in_ci() -> bool:
    """Whether ``CI`` is set to anything but nothing, ``0`` or ``false``."""
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false")


def mode(accept: bool, option: str) -> Mode:
    """What may be written here: nothing where ``CI`` is set.

    Raises:
        InputError: ``option`` was given where ``CI`` is set.
    """
    if not in_ci():
        return "accept" if accept else "propose"
    if accept:
        raise InputError(f"{option}: CI is set, and snapshots are never written there: accept them "
                         "where you can look at them, and commit them")  # fmt: skip
    return "check"


@dataclass(frozen=True)
class Kept:
    """The snapshots of one program at one level."""

    folder: Path
    name: str
    """What the program is called among those of the folder."""
    level: Level

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        safe = re.sub(r"^\.", "_", _ODD.sub("_", self.name))[:_LONGEST]
        if safe != self.name:
            safe += f"-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        return f"{safe}.{self.level}.jax-"

    def path(self, environment: str) -> Path:
        """The file for one environment."""
        return self.folder / f"{self.stem}{environment.removeprefix('jax-')}{SUFFIX}"

    def of_other_environments(self) -> list[Path]:
        """All files there are."""
        return [p for p in files(self.folder) if p.name.startswith(self.stem)]


@dataclass(frozen=True)
class Outcome:
    """What was found of one snapshot."""

    state: Literal["holds", "different", "missing", "undecided"]
    messages: tuple[str, ...] = ()
    accepted: bool = False


def check(kept: Kept, program: Program, how: Mode, of: str) -> Outcome:
    """Compares ``program`` with its snapshot; proposes or accepts a new one where that is allowed.

    Raises:
        InputError: a file can't be read or written.
    """
    if program.unknowns:
        reasons = [f"undecided: {u.construct}: {u.reason}" for u in program.unknowns]
        return Outcome("undecided", tuple(dict.fromkeys(reasons)))
    now = snapshot_of(program, kept.level, of)
    path = kept.path(now.environment)
    old: Snapshot | None = None
    damaged = ""
    if path.exists():
        try:
            old = read(_bytes(path), _shown(path))
        except InputError as error:
            damaged = str(error)
    if old is not None and (old.stamp, old.level) != (now.stamp, now.level):
        damaged = f"{_shown(path)}: it is of another environment or level; accept it again"
    if old is not None and not damaged and old.digest == now.digest:
        if how != "check":
            _proposal(path).unlink(missing_ok=True)
        return Outcome("holds")
    told = _told(kept, now, old, damaged)
    if how == "accept":
        _write(path, now)
        _proposal(path).unlink(missing_ok=True)
        first = told.state == "missing" or (told.state == "undecided" and not damaged)
        said = ("its first snapshot",) if first else told.messages
        return Outcome("holds", (f"accepted: {said[0]}", *said[1:]), True)
    if how == "propose":
        _write(_proposal(path), now)
        message = f"proposed as {_shown(_proposal(path))}"
        return Outcome(told.state, (*told.messages, message))
    return told


def _told(kept: Kept, now: Snapshot, old: Snapshot | None, damaged: str) -> Outcome:
    if damaged:
        return Outcome("undecided", (damaged,))
    if old is not None:
        head = f"not the program of its snapshot ({old.digest[:8]} → {now.digest[:8]})"
        return Outcome("different", (head, *changes(old, now)))
    others = kept.of_other_environments()
    if not others:
        return Outcome("missing", ("there is no snapshot of it",))
    return Outcome("undecided", (_environments(now, others),))


def _environments(now: Snapshot, others: list[Path]) -> str:
    head = f"no snapshot of this environment ({now.environment})"
    try:
        near = [read(_bytes(path), _shown(path)) for path in others]
    except InputError as error:
        return f"{head}; {error}"
    alike = [path for path, one in zip(others, near, strict=True) if one.stamp == now.stamp]
    if alike:
        return f"{head} under its name, but {_shown(alike[0])} is of it: accept it again"
    there = near[0].stamp
    fields = [
        f"{name} is {left} there and {right} here"
        for name in sorted({*there, *now.stamp})
        for left, right in [apart(there.get(name, "absent"), now.stamp.get(name, "absent"))]
        if left != right
    ]
    names = dict.fromkeys(s.environment for s in near)
    return f"{head}, but of {', '.join(names)}: {'; '.join(fields)}"


def files(folder: Path) -> list[Path]:
    """The snapshots in a folder; none where there is no such folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def unused(folder: Path, used: Iterable[Kept]) -> list[Path]:
    """Snapshots under ``folder`` that belong to none of ``used``, whatever their environment."""
    known = [(kept.folder, kept.stem) for kept in used]
    return [
        path
        for path in sorted(folder.rglob(f"*{SUFFIX}"))
        if not any(path.parent == home and path.name.startswith(stem) for home, stem in known)
    ]


def _proposal(path: Path) -> Path:
    return path.with_name(path.name + PROPOSED)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{_shown(path)}: can't be read: {error.strerror or error}") from None


def _write(path: Path, snapshot: Snapshot) -> None:
    """Whole or not at all, whoever else writes the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(PROPOSED, ".relower-", path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(written(snapshot))
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{_shown(path)}: can't be written: {error.strerror or error}") from None


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
