"""Work that needs jax, done in a fresh process: what is asked, what comes back.

A fresh process keeps one program's lowering from depending on what was traced before it, keeps the
noise of libtpu and of the user's own prints out of reports, and lets the command line start
without loading jax.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..lowering.errors import InputError
from ..lowering.family import Family
from ..lowering.scratch import scratch
from .revision import at, locate

NOISE_LINES = 12
"""Lines of a crashed child's output that are shown."""

_RUNNING: set[subprocess.Popen[bytes]] = set()

PassSet = Literal["default"] | tuple[str, ...] | None
"""All passes of the default contract, passes by name, or none."""


@dataclass(frozen=True)
class Job:
    """One request to a child. Paths are taken as seen from ``cwd``."""

    do: Literal[
        "lower", "explain", "catalogue", "stage", "selftest", "foreign", "verify", "numerics",
        "bisect",
    ]  # fmt: skip
    spec: str = ""
    args: tuple[str, ...] = ()
    passes: PassSet = None
    contract: str = "bitwise"
    disable: tuple[str, ...] = ()
    """Names of passes, and addresses of single sites, that are turned off."""
    frozen: str | None = None
    """A regex on the paths of the output's leaves; looked at only where passes run."""
    assume: str | None = None
    quiet: bool = False
    """Whether a pass asked for by name that applies nowhere is no error."""
    target: str | None = None
    route: str | None = None
    mesh: Mapping[str, int] | None = None
    levels: tuple[str, ...] = ("exact", "inlined", "dataflow")
    output: str | None = None
    """Where ``lower`` puts the artifact, and the folder in which ``stage`` puts a module."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of ``lower``; for ``explain``, how to ``measure``."""
    history: bool = False
    """Trace and lower unrelated programs first; see `history`."""
    record: bool = False
    """Say what the lowering read."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """What to load in place of these files."""
    revision: Mapping[str, str] | None = None
    """For a spec in a checkout: ``rev``, ``toplevel`` of the work tree, and ``root``."""


class ChildFailed(InputError):
    """The child couldn't do what was asked; ``kind`` says why."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """``input``, ``not-applicable``, ``crash`` or ``timeout``."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The variables a child runs under: set before jax loads, unless the user has set them."""
    wanted = {
        "JAX_PLATFORMS": "cpu",  # the host; the target is chosen by the lowering
        "TPU_SKIP_MDS_QUERY": "1",  # hosts without a metadata server would hang
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # children would fight over libtpu's lock
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
    return {**wanted, **base, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def run(
    job: Job,
    *,
    timeout: float | None = None,
    cwd: str | os.PathLike[str] = ".",
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Runs ``job`` in a fresh process and returns its value, plain JSON.

    A spec ``FILE.py:NAME@REV`` is run on the files of that revision, in the folder that
    corresponds to ``cwd``; messages name them ``REV:FILE``.

    Args:
        job: what to do.
        timeout: seconds until the child is killed; None waits for ever.
        cwd: the folder the child runs in.
        variables: environment variables of the child beside, or in place of, this process's.

    Raises:
        ChildFailed: one line about what the user gave, or about how the child died.
    """
    place = locate(job.spec, cwd) if job.spec else None
    if place is None:
        return json.loads(_answered(job, timeout, cwd, variables or {}))["value"]
    with at(place) as there:
        moved = replace(job, spec=there.spec, revision=there.request())
        if job.output is not None:
            moved = replace(moved, output=os.path.abspath(Path(cwd, job.output)))
        try:
            text = _answered(moved, timeout, there.cwd, variables or {})
        except ChildFailed as error:
            raise ChildFailed(there.worded(str(error)), error.kind) from None
        value = json.loads(there.worded_json(text))["value"]
        if isinstance(value, dict):
            value["notes"] = [*there.checkout.notes, *value.get("notes", ())]
        return value


def _answered(
    job: Job,
    timeout: float | None,
    cwd: str | os.PathLike[str],
    variables: Mapping[str, str],
) -> str:
    with scratch() as folder:
        answer = Path(folder, "answer.json")
        noise = Path(folder, "noise.txt")
        request = json.dumps({**asdict(job), "answer": str(answer)})
        with noise.open("wb") as sink:
            code = _wait(_start(sink, cwd, variables), request, timeout, job)
        if not answer.is_file():
            raise ChildFailed(_died(job, code, noise), "crash")
        text = answer.read_text()
    found = json.loads(text)
    if "error" in found:
        raise ChildFailed(found["error"], found["kind"])
    return text


def end_all() -> None:
    """Kills every child that `run` is waiting for, in whatever thread."""
    for started in list(_RUNNING):
        Family(started.pid).kill()


def _start(
    sink: Any, cwd: str | os.PathLike[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "relower.gates.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=sink,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environment({**os.environ, **variables}),
        start_new_session=True,
    )


def _wait(child: subprocess.Popen[bytes], request: str, timeout: float | None, job: Job) -> int:
    _RUNNING.add(child)
    try:
        child.communicate(request.encode(), timeout)
    except subprocess.TimeoutExpired:
        raise ChildFailed(
            f"{job.spec or job.do}: not done after {timeout:g} s; raise the limit of time",
            "timeout",
        ) from None
    finally:
        _kill(child)
        _RUNNING.discard(child)
    return child.returncode


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and what it started, also where the child itself has ended."""
    Family(child.pid).kill()
    child.wait()


def _died(job: Job, code: int, noise: Path) -> str:
    how = f"exit code {code}"
    if code < 0:
        how = signal.Signals(-code).name
    lines = noise.read_text(errors="replace").strip().splitlines()[-NOISE_LINES:]
    last = " | ".join(line.strip() for line in lines if line.strip())
    return f"{job.spec or job.do}: the process that does it died ({how}): {last or 'no output'}"


def passes_from(text: str | Sequence[str] | None) -> PassSet:
    """``none``, ``default``, ``a,b`` or a list of names as a `PassSet`."""
    if text is None or text == "none":
        return None
    if text == "default":
        return "default"
    names = text.split(",") if isinstance(text, str) else list(text)
    names = [name.strip() for name in names]
    if not names or not all(names):
        raise InputError(f"passes {text!r}: wanted 'none', 'default' or names, as in 'a,b'")
    return tuple(names)
