"""``FILE.py:NAME@REV``: the files of a git revision, in a folder of their own.

The files are written by ``git read-tree`` with an index of their own, rather than by ``git
worktree add``: nothing is entered into the user's repository, so there is nothing to prune after a
crash, no hook runs, and branches, index and work tree are never touched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..lowering.errors import InputError
from ..lowering.scratch import scratch

_CASE = re.compile(r"(?P<file>.+?\.py):(?P<name>[^:/\\@\[]*(?:\[[^\]]*\])?)(?:@(?P<rev>.*))?", re.S)
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
"""The largest file that Git LFS takes for a pointer."""
_NAMED = 3
"""Paths that a note names before it only counts."""
# What git sets for hooks, and would take for this repository whatever the folder.
_OF_ANOTHER_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
)
# Settings of the user's by which even this would write to the repository or run something.
_QUIET = (
    "-c", "core.splitIndex=false", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false",
    "-c", "core.sparseCheckout=false", "-c", f"core.hooksPath={os.devnull}",
)  # fmt: skip


def is_case(text: str) -> bool:
    """Whether ``text`` has the form of ``FILE.py:NAME``, with or without ``@REV``."""
    match = _CASE.fullmatch(text)
    return match is not None and bool(match["name"])


def split_revision(spec: str) -> tuple[str, str | None]:
    """``FILE.py:NAME`` and the revision after an ``@``, if there is one."""
    match = _CASE.fullmatch(spec)
    if match is None or match["rev"] is None:
        return spec, None
    return f"{match['file']}:{match['name']}", match["rev"]


@dataclass(frozen=True)
class Place:
    """A case at a revision, before any file of it is written."""

    spec: str
    """As the user gave it."""
    rev: str
    commit: str
    toplevel: Path
    """The user's work tree."""
    file: str
    """From the top of the repository."""
    name: str
    folder: str
    """The working directory from the top of the repository; where it is outside, the top."""


@dataclass(frozen=True)
class Checkout:
    """The files of one commit."""

    root: Path
    notes: tuple[str, ...]
    """What of the commit isn't there."""


@dataclass(frozen=True)
class At:
    """A case at a revision, with its files at hand."""

    place: Place
    checkout: Checkout

    @property
    def spec(self) -> str:
        """``FILE.py:NAME`` within the checkout."""
        return f"{self.checkout.root / self.place.file}:{self.place.name}"

    @property
    def cwd(self) -> Path:
        """The folder that corresponds to the working directory, or the nearest above it."""
        folder = self.checkout.root / self.place.folder
        while not folder.is_dir():
            folder = folder.parent
        return folder

    def request(self) -> dict[str, str]:
        """What a child is told, so that it takes no module from the work tree."""
        return {
            "rev": self.place.rev,
            "toplevel": str(self.place.toplevel),
            "root": str(self.checkout.root),
        }

    def worded(self, text: str) -> str:
        """``text`` with files of the checkout named as git names them, ``REV:FILE``."""
        return text.replace(f"{self.checkout.root}{os.sep}", f"{self.place.rev}:")

    def worded_json(self, text: str) -> str:
        """`worded` for JSON."""
        root = json.dumps(f"{self.checkout.root}{os.sep}")[1:-1]
        return text.replace(root, json.dumps(f"{self.place.rev}:")[1:-1])


def locate(spec: str, cwd: str | os.PathLike[str] = ".") -> Place | None:
    """Where the files of ``FILE.py:NAME@REV`` are; None for a case without a revision.

    Raises:
        InputError: FILE is in no git repository, REV names no commit, or FILE isn't in it.
    """
    plain, rev = split_revision(spec)
    if rev is None:
        return None
    if not rev:
        raise InputError(f"{spec}: wanted a git revision after @, as in @main or @HEAD~1")
    path, _, name = plain.rpartition(":")
    here = Path(os.path.realpath(cwd))
    file = here / path
    # The folder may be gone from the work tree by now; the file itself may be a link.
    full = Path(os.path.realpath(file.parent), file.name)
    nearest = next(folder for folder in full.parents if folder.is_dir())
    try:
        top = _git(nearest, "rev-parse", "--show-toplevel")
    except _GitError as error:
        raise InputError(f"{spec}: {path} is in no git work tree: {error}") from None
    toplevel = Path(os.path.realpath(top))
    commit = _commit(spec, rev, toplevel)
    inside = full.relative_to(toplevel).as_posix()
    try:
        kind = _git(toplevel, "cat-file", "-t", f"{commit}:{inside}")
    except _GitError:
        kind = ""
    if kind != "blob":
        raise InputError(f"{spec}: {rev} ({commit[:10]}) has no file {inside}")
    folder = here.relative_to(toplevel).as_posix() if here.is_relative_to(toplevel) else "."
    return Place(spec, rev, commit, toplevel, inside, name, folder)


def _commit(spec: str, rev: str, toplevel: Path) -> str:
    query = f"{rev}^{{commit}}"
    try:
        return _git(toplevel, "rev-parse", "--verify", "--quiet", "--end-of-options", query)
    except _GitError:
        pass
    hint = "`git log` shows what there is"
    try:
        if _git(toplevel, "rev-parse", "--is-shallow-repository") == "true":
            hint = "this clone is shallow: `git fetch --unshallow`, or fetch that revision"
    except _GitError:
        pass
    raise InputError(f"{spec}: {rev!r} names no commit of {toplevel}; {hint}")


_KEPT: dict[tuple[Path, str], Checkout] | None = None
_STACK: ExitStack | None = None
_LOCK = threading.RLock()


@contextmanager
def kept() -> Iterator[None]:
    """Within this, each commit is checked out once, and removed at the end."""
    global _KEPT, _STACK
    if _KEPT is not None:
        yield
        return
    with ExitStack() as stack:
        _KEPT, _STACK = {}, stack
        try:
            yield
        finally:
            _KEPT, _STACK = None, None


@contextmanager
def at(place: Place) -> Iterator[At]:
    """The files of a case's revision, in a temporary folder that is removed afterwards.

    Raises:
        InputError: git can't write them.
    """
    with ExitStack() as own:
        with _LOCK:
            if _KEPT is None or _STACK is None:
                made = own.enter_context(_checked_out(place))
            else:
                key = (place.toplevel, place.commit)
                if key not in _KEPT:
                    _KEPT[key] = _STACK.enter_context(_checked_out(place))
                made = _KEPT[key]
        yield At(place, made)


@contextmanager
def _checked_out(place: Place) -> Iterator[Checkout]:
    with scratch() as folder:
        home = Path(os.path.realpath(folder))
        root = home / "files"
        root.mkdir()
        try:
            git_dir = _git(place.toplevel, "rev-parse", "--absolute-git-dir")
            _git(
                root,
                *_QUIET,
                f"--git-dir={git_dir}",
                f"--work-tree={root}",
                "read-tree",
                "--reset",
                "-u",
                "--no-sparse-checkout",
                place.commit,
                GIT_INDEX_FILE=str(home / "index"),
                GIT_LFS_SKIP_SMUDGE="1",  # a look at an old revision downloads nothing
            )
            notes = _missing(place, root)
        except _GitError as error:
            raise InputError(f"{place.spec}: {place.rev} can't be checked out: {error}") from None
        yield Checkout(root, notes)


def _missing(place: Place, root: Path) -> tuple[str, ...]:
    """What of a commit isn't in its checkout: submodules, and what Git LFS stores elsewhere."""
    listing = _git(place.toplevel, "ls-tree", "-r", "-z", "-l", place.commit)
    entries = [line.partition("\t") for line in listing.split("\0") if line]
    submodules = [path for meta, _, path in entries if meta.startswith("160000 ")]
    small = [
        path
        for meta, _, path in entries
        if meta.startswith("100") and 0 < int(meta.split()[3]) <= _POINTER_BYTES
    ]
    tracked = any(
        b"filter=lfs" in _start(root / path, 1 << 20)
        for _, _, path in entries
        if path.rpartition("/")[2] == ".gitattributes"
    )
    pointers = [p for p in small if _start(root / p, len(_POINTER)) == _POINTER] if tracked else []
    notes = []
    for paths, noun, why in (
        (submodules, "submodule", "not checked out"),
        (pointers, "Git LFS file", "a pointer, not its content"),
    ):
        if paths:
            named = ", ".join(paths[:_NAMED]) + (", …" if len(paths) > _NAMED else "")
            plural = f"{len(paths)} {noun}{'s' * (len(paths) > 1)}"
            notes.append(f"{place.rev}: {plural} {why}: {named}")
    return tuple(notes)


def _start(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""


class _GitError(Exception):
    """What git said, in one line."""


def _git(folder: Path, *arguments: str, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_REPOSITORY}
    settings: Mapping[str, str] = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **variables}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env={**environment, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise InputError("git isn't installed, and @REV needs it") from None
    if done.returncode:
        lines = [x.strip() for x in done.stderr.decode(errors="replace").splitlines() if x.strip()]
        raise _GitError(lines[-1] if lines else f"git {arguments[0]} failed")
    return os.fsdecode(done.stdout).rstrip("\n")
