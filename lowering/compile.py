"""Compiling a lowered program for a TPU on a CPU host, in a child process under limits."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import InputError
from .process import Ended, Limits, run_limited
from .scratch import scratch

FailureKind = Literal["missing", "target", "rejected", "crash", "time", "memory"]

_FATAL = re.compile(r"^F\d{4} [\d:.]+\s+\d+ (?P<where>\S+?)\] (?P<what>.*)")
_CHECK = "Check failed: "


@dataclass(frozen=True)
class StagedModule:
    """A lowered program as a compiler takes it; plain data, from `stage_module`."""

    module: bytes
    """StableHLO as MLIR bytecode."""
    settings: Mapping[str, Any]
    """What jax would tell the compiler beside the module."""
    target: str
    name: str
    """What the user calls it, for messages."""
    notes: tuple[str, ...] = ()
    """What to know of the program that its figures don't say."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``module.bc`` and ``request.json`` into an existing folder."""
        Path(folder, "module.bc").write_bytes(self.module)
        request = {
            "settings": dict(self.settings),
            "target": self.target,
            "name": self.name,
            "notes": list(self.notes),
        }
        Path(folder, "request.json").write_text(json.dumps(request))

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> StagedModule:
        """Reads what `save` wrote."""
        request = json.loads(Path(folder, "request.json").read_text())
        module = Path(folder, "module.bc").read_bytes()
        return StagedModule(
            module,
            request["settings"],
            request["target"],
            request["name"],
            tuple(request["notes"]),
        )


@dataclass(frozen=True)
class Compiled:
    """What the compiler said about a program, for one device."""

    hlo: str = field(repr=False)
    """The optimised HLO."""
    memory: Mapping[str, int]
    """Bytes: arguments, outputs, alias, temp, code, peak."""
    cost: Mapping[str, float]
    """XLA's own counts, loops counted once: flops, bytes accessed, transcendentals."""
    seconds: float


class CompileFailed(InputError):
    """The compiler gave no program; ``kind`` says why, the message says it in one line."""

    def __init__(
        self, cause: str, kind: FailureKind, name: str = "", *, accident: bool = False
    ) -> None:
        super().__init__(f"{name}: {cause}" if name else cause)
        self.cause = cause
        """The message without the program's name."""
        self.kind = kind
        """``missing``: no libtpu; ``target``: it doesn't know the topology; ``rejected``: it
        refused the program; ``crash``: its process died; ``time``, ``memory``: over a limit."""
        self.accident = accident
        """Whether another try may end otherwise: somebody killed the process, as a host without
        memory does, or it failed before the compiler had its say."""

    def of(self, name: str) -> CompileFailed:
        """The same failure of a program with another name."""
        return CompileFailed(self.cause, self.kind, name, accident=self.accident)


def stage_module(chosen: Any, target: str) -> StagedModule:
    """Traces and lowers a case for a target. Needs jax, but neither libtpu nor a TPU.

    Raises:
        InputError: as for `lower`.
    """
    from ..compat.compiler import compile_settings, module_bytes
    from .lower import stage
    from .own_mesh import of_host, remark
    from .targets import make_mesh, parse_target

    goal = parse_target(target)
    mesh = make_mesh(goal, chosen.mesh, "auto", "abstract")
    lowered, _ = stage(chosen, goal, mesh, "abstract")
    settings = compile_settings(lowered, mesh.size)
    own = None if chosen.mesh else of_host(lowered)
    notes = () if own is None else (remark(own),)
    return StagedModule(module_bytes(lowered), settings, str(goal), chosen.name, notes)


def compile_staged(
    staged: StagedModule, *, flags: Sequence[str] = (), limits: Limits | None = None
) -> Compiled:
    """Compiles a program with libtpu in a process of its own, which is gone afterwards.

    Args:
        staged: the program.
        flags: flags of libtpu, as in ``--xla_jf_dump_to=DIR``, beside the user's own.
        limits: of that process.

    Raises:
        CompileFailed: one line on what kept the compiler from answering.
    """
    limits = limits or Limits()
    with scratch() as folder:
        staged.save(folder)
        noise = Path(folder, "noise.txt")
        ended = run_limited(
            child_command(folder), env=child_environment(flags, folder), output=noise, limits=limits
        )
        answer = Path(folder, "answer.json")
        if not answer.is_file():
            raise _failure(staged.name, ended, limits, noise)
        found = json.loads(answer.read_text())
        if "error" in found:
            raise CompileFailed(found["error"], found["kind"], staged.name)
        hlo = Path(folder, "hlo.txt").read_text()
        return Compiled(hlo, found["memory"], found["cost"], ended.seconds)


def child_command(folder: str) -> list[str]:
    """The command that compiles what a folder holds, for as long as this process lives."""
    own = str(os.getpid())
    return [sys.executable, "-P", "-m", "relower.lowering.compile_child", folder, own]


def child_environment(flags: Sequence[str], folder: str) -> dict[str, str]:
    """The variables of the compiling child: this process's, with what libtpu needs.

    A failing analysis writes gigabytes of logs, into `/tmp` too where told not to. Of these only
    the lines that say why a process dies are written, and into ``folder``; all of them where
    ``TPU_LOG_DIR`` says that they are wanted.
    """
    own = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    logs = {"TPU_LOG_DIR": "disabled", "TPU_MIN_LOG_LEVEL": "3", "TMPDIR": folder}
    return {
        **os.environ,
        **({} if "TPU_LOG_DIR" in os.environ else logs),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # hosts without a metadata server would hang
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu locks the host
        "LIBTPU_INIT_ARGS": " ".join([*own, *flags]),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program has no profile
    }


def _failure(name: str, ended: Ended, limits: Limits, noise: Path) -> CompileFailed:
    if ended.why == "time":
        return CompileFailed(
            f"the TPU compiler was stopped after {limits.seconds:g} s; raise the limit",
            "time",
            name,
        )
    if ended.why == "memory":
        assert limits.memory is not None
        return CompileFailed(
            f"the TPU compiler was stopped at {ended.peak / 2**30:.1f} GiB of memory; "
            f"raise the limit of {limits.memory / 2**30:.1f} GiB",
            "memory",
            name,
        )
    how = f"exit code {ended.code}" if ended.code >= 0 else signal.Signals(-ended.code).name
    said = fatal_line(noise.read_text(errors="replace")) or "it said nothing"
    killed = ended.code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    # The compiler aborts; an exit code is Python's, as where the installation is being changed.
    who = "the TPU compiler died" if ended.code < 0 else "the process around the compiler failed"
    accident = killed or ended.code >= 0
    return CompileFailed(f"{who} ({how}): {said}", "crash", name, accident=accident)


def fatal_line(noise: str) -> str:
    """The line of a dead compiler's output that says why, or its last one."""
    lines = [line.strip() for line in noise.splitlines() if line.strip()]
    for line in lines:
        match = _FATAL.match(line)
        if match is not None:
            what = match["what"].removeprefix(_CHECK)
            return f"{what} ({match['where']})"[:400]
    return lines[-1][:400] if lines else ""
