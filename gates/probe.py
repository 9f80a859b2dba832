"""Whether a case lowers to the same program however it is lowered.

The same case in fresh processes, one condition varied at a time: nothing at all, the seed of
Python's hashes, the working directory, where the source stands, what was traced before. A digest
that moves with any of these would make a gate fail, or pass, by accident.
"""

from __future__ import annotations

import os
import re
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..lowering.artifact import load
from ..lowering.change import Difference, Verdict
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.program import Level, Location, Program
from ..lowering.scratch import scratch
from .child import ChildFailed, Job, run
from .parallel import in_order
from .revision import split_revision
from .vacuity import unmet, work

OFFSET = 50
"""Blank lines above the copy of the source."""
SEEDS = (1, 2, 3)
"""Values of PYTHONHASHSEED beside 0, which all other lowerings have."""
VARIATIONS = {
    "again": "lowered again, nothing varied",
    "hash-seed": "another PYTHONHASHSEED",
    "cwd": "another working directory",
    "offset": f"another file name, {OFFSET} lines further down",
    "history": "after unrelated traces",
}
"""What is varied, by name."""

State = Literal["stable", "unstable", "undecided"]
_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[^:/\\]+)")


@dataclass(frozen=True)
class Outcome:
    """One lowering under a varied condition, compared with the first."""

    name: str
    what: str
    differences: Mapping[Level, Difference] = field(default_factory=dict)
    """The comparison at each level; empty where there is none."""
    failure: str = ""
    """Why there is no program to compare."""

    @property
    def state(self) -> State:
        """Unstable if any level is; stable only if every level is identical."""
        verdicts = {found.verdict for found in self.differences.values()}
        if Verdict.DIFFERENT in verdicts:
            return "unstable"
        return "stable" if verdicts == {Verdict.IDENTICAL} else "undecided"

    @property
    def shown(self) -> Difference | None:
        """The difference at the first level that isn't stable."""
        for verdict in (Verdict.DIFFERENT, Verdict.UNKNOWN):
            for found in self.differences.values():
                if found.verdict is verdict:
                    return found
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        shown = self.shown
        return {
            "variation": self.name,
            "what": self.what,
            "state": self.state,
            "failure": self.failure or None,
            "verdicts": {level: found.verdict.name for level, found in self.differences.items()},
            "digests": {level: found.digests[1] for level, found in self.differences.items()},
            "difference": None if shown is None else shown.to_json(),
        }


@dataclass(frozen=True)
class ProbeResult:
    """All lowerings of one case."""

    spec: str
    digests: Mapping[Level, str]
    """Of the first lowering."""
    outcomes: tuple[Outcome, ...]
    reasons: tuple[str, ...] = ()
    """Why stable digests of this case would show nothing."""

    @property
    def state(self) -> State:
        """Unstable if any lowering is; stable only if all are, and there are some."""
        states = {outcome.state for outcome in self.outcomes}
        if "unstable" in states:
            return "unstable"
        return "stable" if states == {"stable"} and not self.reasons else "undecided"

    @property
    def exit_code(self) -> int:
        """0 stable, 1 unstable, 2 undecided."""
        return ("stable", "unstable", "undecided").index(self.state)

    def stable(self, level: Level) -> bool:
        """Whether all lowerings have one program at ``level``."""
        return bool(self.outcomes) and all(
            level in o.differences and o.differences[level].verdict is Verdict.IDENTICAL
            for o in self.outcomes
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "case": self.spec,
            "state": self.state,
            "exit_code": self.exit_code,
            "levels": {
                level: {"digest": digest, "stable": self.stable(level)}
                for level, digest in self.digests.items()
            },
            "reasons": list(self.reasons),
            "lowerings": [outcome.to_json() for outcome in self.outcomes],
        }


@dataclass(frozen=True)
class _Variation:
    name: str
    what: str
    seed: int = 0
    history: bool = False
    elsewhere: bool = False
    moved: bool = False


def variations(without: Sequence[str] = ()) -> tuple[_Variation, ...]:
    """The lowerings that are compared with the first.

    Raises:
        InputError: ``without`` names no variation, or all of them.
    """
    for name in without:
        if name not in VARIATIONS:
            raise InputError(f"--without {name!r}: wanted one of {', '.join(VARIATIONS)}")
    kept = [name for name in VARIATIONS if name not in without]
    if not kept:
        raise InputError("--without names every variation: nothing would be compared")
    found = []
    for name in kept:
        what = VARIATIONS[name]
        if name == "hash-seed":
            found += [_Variation(name, f"PYTHONHASHSEED={seed}", seed=seed) for seed in SEEDS]
        else:
            found.append(
                _Variation(
                    name,
                    what,
                    history=name == "history",
                    elsewhere=name == "cwd",
                    moved=name == "offset",
                )
            )
    return tuple(found)


def probe(
    job: Job,
    *,
    without: Sequence[str] = (),
    jobs: int = 1,
    timeout: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Lowers a case several times, and compares each lowering with the first.

    Args:
        job: the lowering, whose ``levels`` are compared; without an output.
        without: variations to leave out, by name.
        jobs: how many to lower at once.
        timeout: seconds for one lowering; None waits for ever.
        progress: called with what was just lowered, once for the first and once for each other.

    Raises:
        InputError: the spec has another form, or the first lowering fails.
    """
    if _SPEC.fullmatch(job.spec) is None:
        raise InputError(f"{job.spec!r}: wanted FILE.py:NAME")
    if split_revision(job.spec)[1] is not None:
        raise InputError(
            f"{job.spec}: probe varies the files of a work tree; check the revision out to probe it"
        )
    chosen = variations(without)
    note = progress or (lambda text: None)
    first, expect = _lowered(job, _Variation("first", "as it is"), timeout)
    note("as it is")

    def one(variation: _Variation) -> Callable[[], Outcome]:
        return lambda: _outcome(job, variation, first, timeout)

    outcomes = in_order(
        [one(variation) for variation in chosen], jobs, lambda index: note(chosen[index].what)
    )
    reasons = [] if work(first) else ["it has no operations: nothing was compared"]
    return ProbeResult(
        job.spec,
        {level: form.digest for level, form in first.forms.items()},
        tuple(outcomes),
        (*reasons, *(f"it {text}" for text in unmet(first, expect))),
    )


def _outcome(job: Job, variation: _Variation, first: Program, timeout: float | None) -> Outcome:
    try:
        program, _ = _lowered(job, variation, timeout)
    except _NotTried as error:
        return Outcome(variation.name, variation.what, failure=f"not tried: {error}")
    except ChildFailed as error:
        return Outcome(variation.name, variation.what, failure=f"can't be lowered so: {error}")
    levels: Any = job.levels
    found = {level: diff(first, program, level) for level in levels}
    return Outcome(variation.name, variation.what, found)


class _NotTried(InputError):
    """A condition that can't be varied here."""


def _lowered(
    job: Job, variation: _Variation, timeout: float | None
) -> tuple[Program, Mapping[str, int]]:
    match = _SPEC.fullmatch(job.spec)
    assert match is not None
    source = Path(match["file"])
    moved = _copied(source) if variation.moved else nullcontext(source)
    with scratch() as folder, moved as file:
        output = str(Path(folder, "lowered.program"))
        if variation.moved or variation.elsewhere:
            file = file.absolute()
        answer = run(
            replace(
                job,
                spec=f"{file}:{match['name']}",
                output=output,
                history=variation.history,
            ),
            timeout=timeout,
            cwd=folder if variation.elsewhere else ".",
            variables={
                "PYTHONHASHSEED": str(variation.seed),
                # Nothing of the copy may stay in the user's folder.
                **({"PYTHONDONTWRITEBYTECODE": "1"} if variation.moved else {}),
            },
        )
        program = load(output)
    if variation.moved:
        program = _as_in(program, str(file), str(source.absolute()))
    return program, answer["expect"]


@contextmanager
def _copied(source: Path) -> Iterator[Path]:
    """A copy of ``source`` in the same folder, so that its neighbours can be imported, lower down.

    Raises:
        _NotTried: the folder can't be written to.
    """
    folder = source.absolute().parent
    try:
        with source.open("rb") as raw:
            encoding, _ = tokenize.detect_encoding(raw.readline)
        text = source.read_bytes().decode(encoding)
        # Root may write anywhere; a folder without any write permission is still not for writing.
        if not folder.stat().st_mode & 0o222 or not os.access(folder, os.W_OK):
            raise _NotTried(
                f"the folder {folder} is read-only, and a copy would have to stand there"
            )
        handle, name = tempfile.mkstemp(".py", f"relower_probe_{source.stem}_", folder)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise _NotTried(f"{source} can't be copied within its folder: {error}") from error
    try:
        # A coding cookie holds in the first two lines only, so the copy is UTF-8.
        with os.fdopen(handle, "wb") as out:
            out.write(b"\n" * OFFSET + text.encode())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _as_in(program: Program, copy: str, source: str) -> Program:
    """The locations of a copy as those of the source."""

    def moved(where: Location) -> Location:
        if where.file is None or os.path.realpath(where.file) != os.path.realpath(copy):
            return where
        return replace(where, file=source, line=None if where.line is None else where.line - OFFSET)

    return replace(program, locations=tuple(moved(where) for where in program.locations))
