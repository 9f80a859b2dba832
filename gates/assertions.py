"""What the pytest plugin's ``program`` fixture asserts.

A comparison that came out the other way is an `AssertionError`. One that could not be decided
fails the test by `pytest.fail`, which is no `AssertionError`: a control written as
``with pytest.raises(AssertionError)`` must not be satisfied by UNKNOWN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, NoReturn

import pytest

from ..lowering.artifact import load
from ..lowering.case import Case
from ..lowering.change import Difference, Verdict
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Level, Program
from ..lowering.scratch import scratch
from .child import Job, run
from .containment import checked, strays
from .render import plain
from .revision import is_case, split_revision
from .vacuity import unmet, work

if TYPE_CHECKING:
    from .pytest_snapshots import Snapshots

GROUPS_SHOWN = 20
TIMEOUT = 900.0
"""Seconds for lowering one ``FILE.py:NAME``."""

Comparable = Program | Case | tuple[object, ...] | str
"""A lowered program, a case, ``(function, *args)``, ``FILE.py:NAME`` or an artifact's path."""


class ProgramAssertions:
    """Lowers what it is given for one target, and compares."""

    def __init__(
        self,
        root: Path,
        target: str | None = None,
        route: str | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._root = root
        self._snapshots = snapshots
        self._where = {
            key: value for key, value in (("target", target), ("route", route)) if value is not None
        }

    def assert_identical(
        self, a: Comparable, b: Comparable, level: Level = "exact", allow: Sequence[str] = ()
    ) -> Difference:
        """Fails unless the verdict is IDENTICAL.

        Args:
            a: a program, a case, ``(function, *args)``, ``"FILE.py:NAME"`` as seen from pytest's
                root folder, or the path of an artifact.
            b: the other one.
            level: ``exact``, ``inlined`` or ``dataflow``.
            allow: fields of the stamp that may differ.

        Raises:
            AssertionError: the programs differ; it shows where.
            pytest.fail.Exception: the verdict is UNKNOWN, nothing was compared, or one side can't
                be lowered.
        """
        __tracebackhide__ = True
        found = self._compared(a, b, level, allow)
        if found.verdict is Verdict.DIFFERENT:
            raise AssertionError(f"the programs must be identical, and differ\n{_text(found)}")
        return found

    def assert_differs(
        self,
        a: Comparable,
        b: Comparable,
        only_in: str | Sequence[str] | None = None,
        level: Level = "exact",
        allow: Sequence[str] = (),
    ) -> Difference:
        """Fails unless the verdict is DIFFERENT, and every difference is where ``only_in`` says.

        Args:
            a: as for `assert_identical`.
            b: as for `assert_identical`.
            only_in: ``"kernel:NAME"`` or ``"scope:PATH"``, or several, as in ``relower.toml``.
            level: ``exact``, ``inlined`` or ``dataflow``.
            allow: fields of the stamp that may differ.

        Raises:
            AssertionError: the programs are identical, or differ elsewhere too.
            pytest.fail.Exception: the verdict is UNKNOWN, nothing was compared, or one side can't
                be lowered.
        """
        __tracebackhide__ = True
        patterns = [only_in] if isinstance(only_in, str) else list(only_in or ())
        if only_in is not None and not patterns:
            _undecided("only_in is empty; wanted 'kernel:NAME' or 'scope:PATH', or None")
        try:
            checked(patterns, "only_in")
        except InputError as error:
            _undecided(str(error))
        found = self._compared(a, b, level, allow)
        if found.verdict is Verdict.IDENTICAL:
            raise AssertionError(f"the programs must differ, and are identical\n{_text(found)}")
        if patterns:
            stray = strays(found, patterns)
            if stray:
                raise AssertionError(f"{stray[0]}\n{_text(found)}")
        return found

    def assert_snapshot(
        self, what: Comparable, name: str | None = None, level: Level = "exact"
    ) -> None:
        """Fails unless ``what`` is the program that was accepted for this test.

        Snapshots are in the folder ``relower.snapshots`` beside the test's file, one for each
        environment. ``--relower-accept`` writes them, but never where ``CI`` is set. Without it, a
        program that has none, or another one, is written beside it as a proposal; in CI nothing is.

        Args:
            what: as for `assert_identical`.
            name: tells several programs of one test apart.
            level: ``exact``, ``inlined`` or ``dataflow``.

        Raises:
            AssertionError: the program isn't the one accepted; it names what changed.
            pytest.fail.Exception: there is no snapshot, or none of this environment; the program
                holds something that no rule knows, or nothing; or it can't be lowered.
        """
        __tracebackhide__ = True
        if self._snapshots is None:
            _undecided("assert_snapshot needs a test to belong to")
        made = self.lower(what, level)
        if not work(made):
            _undecided("the program has no operations: a snapshot of it shows nothing")
        if level not in made.forms:
            _undecided(f"the program has no form at level {level}")
        try:
            found = self._snapshots.check(made, name, level)
        except InputError as error:
            _undecided(str(error))
        if found.state == "different":
            raise AssertionError("\n  ".join(found.messages))
        if found.state != "holds":
            _undecided("\n  ".join(found.messages))

    def lower(self, what: Comparable, level: Level | None = None) -> Program:
        """Lowers ``what`` for the target of this test; a program is returned as it is.

        Args:
            what: as for `assert_identical`. A ``"FILE.py:NAME"`` is lowered in a process of its
                own, anything else in this one.
            level: the one level to build; None builds all.

        Raises:
            pytest.fail.Exception: it can't be lowered, or misses what its case expects.
        """
        __tracebackhide__ = True
        if _untupled(what, level):
            _undecided(
                "found a function and an argument beside it; wanted them in one tuple, as in "
                "program.lower((f, x))"
            )
        levels = LEVELS if level is None else (level,)
        if level is not None and level not in LEVELS:
            _undecided(f"level {level!r}: wanted one of {', '.join(LEVELS)}")
        try:
            made, expect = self._lowered(what, levels)
        except InputError as error:
            _undecided(str(error))
        missing = unmet(made, expect)
        if missing:
            _undecided(f"the program {'; '.join(missing)}")
        return made

    def _compared(
        self, a: Comparable, b: Comparable, level: Level, allow: Sequence[str]
    ) -> Difference:
        __tracebackhide__ = True
        if self._same(a, b):
            _undecided("a program is compared with itself: that shows nothing")
        sides = (self.lower(a, level), self.lower(b, level))
        for name, side in zip("ab", sides):
            if not work(side):
                _undecided(f"{name} has no operations: nothing was compared")
        try:
            found = diff(*sides, level, [allow] if isinstance(allow, str) else allow)
        except InputError as error:
            _undecided(str(error))
        if found.verdict is Verdict.UNKNOWN:
            _undecided(f"it can't be decided whether the programs differ\n{_text(found)}")
        return found

    def _same(self, a: Comparable, b: Comparable) -> bool:
        """Whether both say the same: one path in two spellings, tuples of the same things."""
        if isinstance(a, str) and isinstance(b, str):
            return self._place(a) == self._place(b)
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(map(_alike, a, b))
        return a is b

    def _place(self, what: str) -> tuple[str, str]:
        """The real path of a file, and what is named in it."""
        file, name = what, ""
        if is_case(what):
            plain = split_revision(what)[0]
            file = plain.rpartition(":")[0]
            name = what[len(file) :]
        return os.path.realpath(self._root / file), name

    def _lowered(
        self, what: Comparable, levels: tuple[Level, ...]
    ) -> tuple[Program, Mapping[str, int]]:
        if isinstance(what, Program):
            return what, {}
        if isinstance(what, str):
            return self._from_file(what, levels)
        _quiet_libtpu()
        from ..lowering.lower import lower

        options = {**self._where, "levels": levels}
        if isinstance(what, Case):
            return lower(what, **options), what.expect  # type: ignore[arg-type]
        if isinstance(what, tuple) and what and callable(what[0]):
            function: Callable[..., object] = what[0]
            return lower(function, *what[1:], **options), {}  # type: ignore[arg-type]
        raise InputError(
            f"found a {type(what).__name__}; wanted a Program, a Case, (function, *args), "
            "'FILE.py:NAME' or the path of an artifact"
        )

    def _from_file(self, what: str, levels: tuple[Level, ...]) -> tuple[Program, Mapping[str, int]]:
        if not is_case(what):
            return load(self._root / what), {}
        with scratch() as folder:
            output = str(Path(folder, "lowered.program"))
            job = Job(
                "lower",
                spec=what,
                levels=levels,
                output=output,
                target=self._where.get("target"),
                route=self._where.get("route"),
            )
            answer = run(job, timeout=TIMEOUT, cwd=self._root)
            return load(output), answer["expect"]


def _untupled(what: object, level: object) -> bool:
    """Whether a function was given with an argument where the level belongs."""
    return callable(what) and level is not None and not isinstance(level, str)


def _alike(x: object, y: object) -> bool:
    """Whether two things are one; a method is made anew each time it is looked up."""
    return x is y or (
        isinstance(x, MethodType)
        and isinstance(y, MethodType)
        and (x.__self__ is y.__self__ and x.__func__ is y.__func__)
    )


def _quiet_libtpu() -> None:
    """Keeps libtpu, where the topology route loads it, from hanging or fighting over its lock."""
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")


def _undecided(text: str) -> NoReturn:
    __tracebackhide__ = True
    raise pytest.fail.Exception(f"relower: {text}") from None


def _text(found: Difference) -> str:
    return plain(found, GROUPS_SHOWN, "relower.diff(a, b).groups holds all")
