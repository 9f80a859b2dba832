"""Damaged input of every kind that relower reads: artifacts, matrices, MLIR.

Whatever the damage, the answer is a value or one line, soon, and never IDENTICAL where the meaning
changed. The tests run a few hundred of each; as a program, as many as asked for:

    python tests/gates/fuzzing.py --count 5000
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from relower.gates.cells import Matrix
from relower.gates.config import load_matrix
from relower.lowering import artifact
from relower.lowering.change import Verdict
from relower.lowering.diff import diff
from relower.lowering.errors import InputError
from relower.lowering.program import Program

ROOT = Path(__file__).parents[2]
SLOW = 20.0
"""Seconds that no input may take."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, spliced, repeated or overwritten."""
    kind = rng.randrange(6)
    if not data:
        return rng.randbytes(8)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 2:
        return data[:start] + data[end:]
    if kind == 3:
        return data[:end] + data[start:]
    if kind == 4:
        return data[:start] + rng.randbytes(rng.randrange(1, 40)) + data[start:]
    tokens = [b"<", b">", b"(", b"{", b"}", b'"', b"%", b"\0", b"\xff", b"9" * 30, b"[[", b"= "]
    return data[:start] + rng.choice(tokens) * rng.randrange(1, 5) + data[start:]


def artifacts(data: bytes, count: int, seed: int = 0) -> Counter[str]:
    """Damaged artifacts: bytes of the file, and texts inside with all checksums right again."""
    rng, seen = random.Random(seed), Counter()
    whole = artifact.loads(data)
    for number in range(count):
        inside = number % 2 == 1
        changed = _text_damaged(data, rng) if inside else damaged(data, rng)
        started = time.monotonic()
        outcome = _loaded(changed)
        if isinstance(outcome, Program):
            verdict = diff(whole, outcome, next(iter(whole.forms))).verdict
            same = _compared(outcome) == _compared(whole)
            assert verdict is not Verdict.IDENTICAL or same, f"input {number}"
            outcome = f"loaded, {verdict.name}"
        assert time.monotonic() - started < SLOW, f"input {number} was slow"
        seen[outcome] += 1
    return seen


def _refusal(error: InputError) -> str:
    return "refused" if "\n" not in str(error) else "REFUSED IN SEVERAL LINES"


def _loaded(data: bytes) -> Program | str:
    try:
        return artifact.loads(data)
    except InputError as error:
        return _refusal(error)


def _compared(program: Program) -> object:
    level = next(iter(program.forms))
    return (
        [(s.kind, s.name, s.text) for s in program.forms[level].sections],
        {name: k.text for name, k in program.kernels.items()},
        dict(program.stamp.fields),
        program.unknowns,
    )


def _text_damaged(data: bytes, rng: random.Random) -> bytes:
    """One canonical text changed, and every digest that names or covers it made to fit."""
    from relower.lowering.artifact_index import canonical_json, form_digest
    from relower.lowering.program import Section, digest_of

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(members["index.json"])
    names = sorted(n for n in members if n.startswith("text/"))
    name = rng.choice(names)
    text = damaged(members.pop(name), rng).decode(errors="replace")
    old, new = name[5:69], digest_of(text)
    members[f"text/{new}.mlir"] = text.encode()
    for form in index["forms"].values():
        sections = []
        for leaf in form["sections"]:
            leaf[2] = new if leaf[2] == old else leaf[2]
            known = members[f"text/{leaf[2]}.mlir"].decode()
            sections.append(Section(leaf[0], leaf[1], known))
        form["digest"] = form_digest(sections)
    index["nodes"] = {key: _node(index[key]) for key in index["nodes"]}
    index["root"] = _node(index["nodes"])
    members["index.json"] = canonical_json(index)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, body in members.items():
            archive.writestr(member, body)
    return buffer.getvalue()


def _node(value: object) -> str:
    import hashlib

    from relower.lowering.artifact_index import canonical_json

    return hashlib.sha256(canonical_json(value)).hexdigest()


def matrices(text: str, count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Damaged ``relower.toml``s."""
    rng, seen = random.Random(seed), Counter()
    path = folder / "relower.toml"
    for number in range(count):
        path.write_bytes(damaged(text.encode(), rng))
        started = time.monotonic()
        try:
            outcome = "read" if isinstance(load_matrix(path), Matrix) else "nothing"
        except InputError as error:
            outcome = _refusal(error)
        assert time.monotonic() - started < SLOW, f"input {number} was slow"
        seen[outcome] += 1
    return seen


def modules(data: bytes, count: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Damaged MLIR, text or bytecode, many to a process; a process that dies is counted."""
    rng, seen = random.Random(seed), Counter()
    (folder / "base").write_bytes(data)
    pending = []
    for number in range(count):
        path = folder / f"input_{number}"
        path.write_bytes(damaged(data, rng))
        pending.append(path)
    while pending:
        answers = list(_in_child(folder / "base", pending))
        for path, outcome in answers:
            seen[outcome] += 1
            path.unlink()
        pending = pending[len(answers) :]
        if pending:  # the child died at the next one
            seen["killed the parser's process, or had to be ended"] += 1
            pending.pop(0).unlink()
    return seen


def _in_child(base: Path, paths: list[Path]) -> Iterator[tuple[Path, str]]:
    request = json.dumps([str(base), *map(str, paths)])
    command = [sys.executable, str(Path(__file__)), "--child"]
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as noise:
        subprocess.run(
            command, input=request.encode(), stdout=answers, stderr=noise, check=False,
            timeout=SLOW * len(paths),
        )  # fmt: skip
        answers.seek(0)
        lines = answers.read().decode().splitlines()
    yield from zip(paths, lines, strict=False)


def child() -> None:
    """Reads every file that standard input names; a line of standard output for each."""
    from relower.lowering.foreign import foreign_program, limit

    base, *paths = map(Path, json.load(sys.stdin))
    limit(max(path.stat().st_size for path in paths))
    whole = foreign_program(base)
    for path in paths:
        started = time.monotonic()
        signal.alarm(int(SLOW))  # a parser that doesn't end is ended, as `read_foreign` does
        try:
            found = foreign_program(path)
        except InputError as error:
            outcome = _refusal(error)
        else:
            verdict = diff(whole, found).verdict
            outcome = f"read, {verdict.name}"
            if verdict is Verdict.IDENTICAL and _meaning(base) != _meaning(path):
                outcome = "IDENTICAL THOUGH CHANGED"
        if time.monotonic() - started > SLOW:
            outcome = "SLOW"
        signal.alarm(0)
        print(outcome, flush=True)


def _meaning(path: Path) -> str:
    """MLIR's own text of a module without locations; functions, meshes, channels by first use."""
    from relower.compat.mlir import parse_stablehlo

    module = parse_stablehlo(path.read_bytes())
    text: str = module.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
    text = re.sub(r"(\\22body\\22: \\22)([\w+/=]+)", lambda m: m[1] + _kernel(m[2]), text)
    for name in ("jax.result_info", "kernel_name"):
        text = re.sub(rf'{name} = "(?:[^"\\]|\\.)*"', name, text)
    text = re.sub(r", (?:res|arg)_attrs = \[(?:\{\}(?:, )?)*\]", "", text)  # of nothing
    module_name = r'("builtin\.module"\(\) <\{)sym_name = "(?:[^"\\]|\\.)*"'
    text = re.sub(module_name, r"\1", text)
    numbers: dict[str, int] = {}
    return re.sub(
        r"@(?:\"(?:[^\"\\]|\\.)*\"|[\w$.-]+)|sym_name = \"(?:[^\"\\]|\\.)*\"|handle = \d+",
        lambda m: f"#{numbers.setdefault(_symbol(m[0]), len(numbers))}",
        text,
    )


def _symbol(text: str) -> str:
    """A symbol as it is called, wherever it stands; a channel by its whole text."""
    return text.removeprefix("sym_name = ").removeprefix("@").strip('"')


def _kernel(body: str) -> str:
    """MLIR's own text of an encoded kernel, or its bytes where it can't be decoded."""
    from relower.compat.mlir import PassManager, ir, mosaic_context

    with mosaic_context(), ir.Location.unknown():
        try:
            module = ir.Module.parse(base64.b64decode(body, validate=True))
            passes = PassManager.parse("builtin.module(mosaic-serde{serialize=false})")
            passes.run(module.operation)
        except (ValueError, RuntimeError, ir.MLIRError):
            return body
        text: str = module.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        return text


def main() -> None:
    """Fuzzes with a small program of its own."""
    parser = argparse.ArgumentParser(description="Damaged input of every kind.")
    parser.add_argument("--count", type=int, default=2000, help="of each kind; default: 2000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    from relower.gates.child import Job, run
    from relower.gates.selftest.places import SOURCE

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = str(folder / "flash.program")
        run(Job("lower", spec=f"{SOURCE}:flash_step", output=output, levels=("exact",)))
        found = {
            "artifacts": artifacts(Path(output).read_bytes(), options.count, options.seed),
            "matrices": matrices(
                (ROOT / "relower.toml").read_text(), options.count, folder, options.seed
            ),
        }
        for kind, data in written_modules(folder).items():
            found[kind] = modules(data, options.count, folder, options.seed)
    for kind, seen in found.items():
        print(kind, dict(seen.most_common()))
        bad = [outcome for outcome in seen if outcome.split(",")[0].isupper()]
        assert not bad, bad


SMALL = """
import io, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
def kernel(x, o):
    o[...] = x[...] * 2.0
def step(w, x):
    with jax.named_scope("layer"):
        y = jnp.tanh(pl.pallas_call(kernel, out_shape=x)(x) @ w)
    return jax.lax.scan(lambda c, r: (c + r.sum(), jnp.sort(r)), 0.0, y)
from relower.lowering import case
from relower.gates.selftest.judge import staged
S = jax.ShapeDtypeStruct
given = staged(case(step, S((128, 128), jnp.float32), S((8, 128), jnp.float32)))
text = given.module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True)
open(sys.argv[1] + "/small.mlir", "w").write(text)
buffer = io.BytesIO()
given.module.operation.write_bytecode(buffer)
open(sys.argv[1] + "/small.mlirbc", "wb").write(buffer.getvalue())
"""


def written_modules(folder: Path) -> dict[str, bytes]:
    """One small module with a kernel, as text and as bytecode."""
    subprocess.run([sys.executable, "-c", SMALL, str(folder)], check=True, capture_output=True)
    return {
        "MLIR text": (folder / "small.mlir").read_bytes(),
        "MLIR bytecode": (folder / "small.mlirbc").read_bytes(),
    }


if __name__ == "__main__":
    main()
