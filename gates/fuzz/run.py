"""Run many seeds in processes of their own, and add up what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...lowering.errors import InputError

BY_ROUNDING = "decided by rounding"
"""The state of a seed whose two programs differ where rounding alone decides the one as written."""
CHUNK = 1000
"""Seeds that one process checks."""
ENOUGH = 1000
"""Programs from which on a pass that never applied, or was never declined, is a fault."""
LOWER_EVERY = 100
"""Of so many seeds from the first on, the first that is a program is lowered for a TPU, too."""
MOST_LOST = 0.15
"""The share of seeds that may turn out to be no program, or one of which nothing can be said."""


@dataclass
class Found:
    """What became of all seeds."""

    passes: tuple[str, ...]
    """The passes that were to be tried."""
    states: Counter[str] = field(default_factory=Counter)
    applied: Counter[str] = field(default_factory=Counter)
    """Sites, by pass."""
    programs: Counter[str] = field(default_factory=Counter)
    """Programs in which a pass applied."""
    declined: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Sites, by pass and reason."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Why seeds were no programs, undefined, or decided by rounding."""
    violations: list[dict[str, Any]] = field(default_factory=list)
    equations: int = 0
    lowered: int = 0
    cpu: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False
    """Whether somebody ended the run early; what was found until then still counts."""

    @property
    def checked(self) -> int:
        """Programs of which every property was looked at."""
        return self.states["held"] + self.states["violated"]

    def add(self, one: dict[str, Any]) -> None:
        """Count one seed."""
        self.states[one["state"]] += 1
        self.equations += one.get("equations", 0)
        self.lowered += bool(one.get("lowered"))
        self.cpu += one.get("seconds", 0.0)
        for name, n in one.get("applied", {}).items():
            self.applied[name] += n
            self.programs[name] += 1
        for name, code, n in one.get("declined", []):
            self.declined[name, code] += n
        if one["state"] not in ("held", "violated"):
            self.refusals[f"{one['state']}: {one['detail'][:90]}"] += 1
        if "violation" in one:
            self.violations.append({"seed": one["seed"], **one["violation"]})

    def vacuous(self) -> list[str]:
        """What makes the run say less than it seems to; nothing of a short run."""
        total = sum(self.states.values())
        if self.checked == 0:
            return [f"of {total} seeds, none was a program that could be checked"]
        said: list[str] = []
        if total >= 100 and total - self.checked > MOST_LOST * total:
            said.append(f"{total - self.checked} of {total} seeds were no programs, undefined, or "
                        "decided by rounding")  # fmt: skip
        if self.checked < ENOUGH:
            return said
        for name in self.passes:
            if not self.applied[name]:
                said.append(f"{name} was applied nowhere")
            if not any(n == name for n, _ in self.declined):
                said.append(f"{name} was declined nowhere")
        return said


@dataclass(frozen=True)
class Asked:
    """What to run."""

    seed: int = 0
    count: int | None = None
    """Seeds; None for as many as the time allows."""
    seconds: float | None = None
    passes: tuple[str, ...] = ()
    """Those to run in every program; none for the choice of each plan."""
    jobs: int = 1
    lower_every: int = LOWER_EVERY


def fuzz(asked: Asked, progress: Callable[[str], None] | None = None) -> Found:
    """Check the seeds.

    Args:
      asked: which, how many, for how long.
      progress: called after each seed with its number.

    Raises:
      InputError: neither a count nor a time, or a pass that there is none of.
    """
    from ...passes import registry

    if asked.count is None and asked.seconds is None:
        raise InputError("found neither a count nor a time; wanted --count or --seconds")
    try:
        names = tuple(registry.by_name(n).name for n in asked.passes)
    except ValueError as error:
        raise InputError(str(error)) from error
    found = Found(names or tuple(p.name for p in registry.all_passes()))
    started = time.monotonic()
    run = _Run(asked, found, progress or (lambda text: None))
    with ThreadPoolExecutor(asked.jobs) as pool:
        futures = [pool.submit(run.work) for _ in range(asked.jobs)]
        try:
            for future in futures:
                future.result()
        except (KeyboardInterrupt, SystemExit):
            found.interrupted = True
        finally:
            run.end()
    found.seconds = time.monotonic() - started
    return found


def _chunks(asked: Asked) -> Iterator[tuple[int, int]]:
    first = asked.seed
    end = None if asked.count is None else asked.seed + asked.count
    while end is None or first < end:
        count = CHUNK if end is None else min(CHUNK, end - first)
        yield first, count
        first += count


class _Run:
    """The processes of one run."""

    def __init__(self, asked: Asked, found: Found, progress: Callable[[str], None]) -> None:
        self._asked, self._found, self._progress = asked, found, progress
        self._until = time.time() + (1e9 if asked.seconds is None else asked.seconds)
        self._chunks = _chunks(asked)
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._ended = False

    def end(self) -> None:
        """Start no more, and end what runs."""
        with self._lock:
            self._ended = True
            for child in self._children:
                child.kill()

    def work(self) -> None:
        """Check chunk after chunk, each in a process of its own."""
        while self._goes_on():
            with self._lock:
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            self._chunk(*chunk)

    def _goes_on(self) -> bool:
        return not self._ended and time.time() < self._until

    def _chunk(self, first: int, count: int) -> None:
        """Check consecutive seeds, in a new process wherever one ends before they are done."""
        end = first + count
        while first < end and self._goes_on():
            request = {"first": first, "count": end - first, "until": self._until,
                       "passes": list(self._asked.passes),
                       "origin": self._asked.seed,
                       "lower_every": self._asked.lower_every}  # fmt: skip
            for one in self._answers(request):
                with self._lock:
                    self._found.add(one)
                    self._progress(f"seed {one['seed']}")
                first = one["seed"] + 1

    def _answers(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a process says of each seed; of one during which it died, that it did."""
        command = [sys.executable, "-m", "relower.gates.fuzz.worker", json.dumps(request)]
        running: int | None = None
        with tempfile.TemporaryFile("w+") as errors:
            with self._child(command, errors) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    said = json.loads(line)
                    running = said.get("begin")
                    if running is None:
                        yield said
            if self._ended:
                return
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing said"])[-1]
        if running is not None:
            yield _died(running, f"the process ended with {child.returncode}: {last}")
        elif child.returncode:
            raise RuntimeError(f"a process of the fuzzer ended with {child.returncode}: {last}")

    @contextlib.contextmanager
    def _child(self, command: list[str], errors: Any) -> Iterator[subprocess.Popen[str]]:
        with self._lock:
            if self._ended:
                command = [sys.executable, "-c", ""]
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
            )
            self._children.add(child)
        try:
            yield child
            child.wait()
        finally:
            child.kill()
            child.wait()
            with self._lock:
                self._children.discard(child)


def _died(seed: int, detail: str) -> dict[str, Any]:
    return {"seed": seed, "state": "violated", "detail": "", "violation": {
        "property": "stays up", "detail": detail, "first_detail": detail, "plan": None,
        "text": f"seed {seed}", "passes": [], "tries": 0, "jaxpr": "",
    }}  # fmt: skip


def environment() -> dict[str, str]:
    """Eight host devices, and no search for a TPU."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        flags = f"{flags} --xla_force_host_platform_device_count=8".strip()
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


SCRIPT = '''"""relower fuzz, seed {seed}: {property}.

{detail}
"""

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from relower.gates.fuzz.check import check
from relower.gates.fuzz.lowers import lowers
from relower.gates.fuzz.plan import Node, Plan

plan = {plan}
passes = {passes}
found = lowers(plan, passes) if "{property}".startswith("lowers") else check(plan, passes).violation
print(found or "every property holds")
sys.exit(found is not None)
'''


def save(violation: dict[str, Any], folder: Path) -> Path | None:
    """Write a script that shows a violation; None where the process died of it."""
    if violation["plan"] is None:
        return None
    path = folder / f"relower-fuzz-{violation['seed']}.py"
    text = SCRIPT.format(**{**violation, "passes": tuple(violation["passes"]),
                            "detail": violation["detail"].replace("\\", "/")})  # fmt: skip
    path.write_text(text)
    return path
