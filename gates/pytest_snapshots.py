"""Snapshots in pytest: which belong to a test, what a run used, and which nothing uses any more.

Under pytest-xdist each worker tells the controller what it used, and the controller reports. A
snapshot belongs to one test, and a test runs in one worker, so no two write one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..lowering.program import Level, Program
    from .snapshot_files import Mode, Outcome

FOLDER = "relower.snapshots"
"""Beside the test's file; in it a folder for each file of tests."""


@dataclass
class Ledger:
    """What one process saw; the controller adds up those of its workers."""

    used: set[str] = field(default_factory=set)
    """Beginnings of the paths of snapshots."""
    accepted: set[str] = field(default_factory=set)
    tests: dict[str, set[str]] = field(default_factory=dict)
    """By the files of tests with snapshots beside them."""
    partial: set[str] = field(default_factory=set)
    """Files of which not all tests were chosen."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they are sent between processes."""
        return {
            "used": sorted(self.used),
            "accepted": sorted(self.accepted),
            "tests": {file: sorted(tests) for file, tests in self.tests.items()},
            "partial": sorted(self.partial),
        }

    def add(self, other: Mapping[str, Any]) -> None:
        """Takes in what a worker says."""
        self.used |= set(other["used"])
        self.accepted |= set(other["accepted"])
        self.partial |= set(other["partial"])
        for file, tests in other["tests"].items():
            self.tests.setdefault(file, set()).update(tests)

    def unused(self, passed: Set[str]) -> list[str]:
        """Snapshots that no test uses, in files whose tests all passed or that are gone."""
        found: list[Path] = []
        for file, tests in sorted(self.tests.items()):
            if file not in self.partial and tests <= passed:
                found += sorted(folder_of(Path(file)).glob("*.snapshot"))
        for home in sorted({Path(file).parent for file in self.tests}):
            for folder in sorted((home / FOLDER).glob("*/")):
                if not (home / f"{folder.name}.py").exists():
                    found += sorted(folder.glob("*.snapshot"))
        used = tuple(self.used)
        return [str(path) for path in found if not str(path).startswith(used)]


def folder_of(file: Path) -> Path:
    """Where the snapshots of a file of tests are."""
    return file.parent / FOLDER / file.stem


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one test."""

    file: Path
    test: str
    """With its class and parameters."""
    mode: Mode
    ledger: Ledger

    def check(self, program: Program, name: str | None, level: Level) -> Outcome:
        """Compares, and proposes or accepts where that is allowed.

        Raises:
            InputError: the test has had a snapshot of this name and level, or a file is unusable.
        """
        from ..lowering.errors import InputError
        from .snapshot_files import Kept, check

        title = self.test if name is None else f"{self.test}.{name}"
        kept = Kept(folder_of(self.file), title, level)
        begins = str(kept.folder / kept.stem)
        if begins in self.ledger.used:
            raise InputError(f"{title}: two snapshots of one name; give each a name=")
        self.ledger.used.add(begins)
        found = check(kept, program, self.mode, f"{self.file.name}::{title}")
        if found.accepted:
            self.ledger.accepted.add(begins)
        return found


def report(ledger: Ledger, passed: Set[str], root: Path) -> Iterable[str]:
    """Lines for the end of a run."""
    if ledger.accepted:
        count = len(ledger.accepted)
        yield f"relower: {count} snapshot{'s' * (count > 1)} accepted: look before you commit"
    for path in ledger.unused(passed):
        shown = Path(path).relative_to(root) if Path(path).is_relative_to(root) else path
        yield f"relower: no test uses {shown}: delete it"
