"""Snapshots: the small index of a program, kept in git and compared with what it lowers to now.

A snapshot is text of a few kilobytes: the digest of the whole, and for each function and kernel a
short digest of it alone, so that a change can be placed without the program's text. There is one
file for each environment (the stamp: jax's version, the target, flags …), and only the one of this
environment is compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..lowering.errors import InputError
from ..lowering.program import KERNEL, LEVELS, Level, Program, Section, digest_of
from ..lowering.sections import CALLEE
from ..lowering.words import plural

FORMAT = "relower-snapshot 2"
MAX_BYTES = 1 << 24
"""The largest snapshot that is read."""
SHORT = 16
"""Hexadecimal digits of the digest of one function; the verdict rests on the whole one."""
LINES_SHOWN = 12
_HEX = re.compile(r"[0-9a-f]+")
_COUNTER = re.compile(r"_\d+$")
"""What JAX adds to the name of a second function; it moves with whatever is traced before."""
_CONFLICT = re.compile(rb"^(<<<<<<<|=======|>>>>>>>)", re.M)
_KINDS = ("module", "function", "kernel")


@dataclass(frozen=True)
class Part:
    """One function or kernel by itself: what it calls counts as nothing but a call."""

    kind: str
    label: str
    digest: str
    operations: int
    times: int = 1
    """Of a kernel, its calls, counted through the call graph; of anything else, equal copies."""

    @property
    def title(self) -> str:
        """As in ``function main``."""
        return f"{self.kind} {self.label}" if self.kind != "module" else "the module's attributes"


@dataclass(frozen=True)
class Snapshot:
    """The index of one program at one level."""

    of: str
    """What it is of, for people."""
    level: Level
    digest: str
    stamp: Mapping[str, str]
    parts: tuple[Part, ...]
    ops: Mapping[str, int]

    @property
    def environment(self) -> str:
        """As in ``jax-0.12.0.1-1a2b3c4d``: a name for the stamp."""
        return environment(self.stamp)


def environment(stamp: Mapping[str, str]) -> str:
    """A name for a stamp that differs where any field of it does."""
    text = json.dumps(dict(stamp), sort_keys=True)
    return f"jax-{stamp.get('jax', 'none')}-{digest_of(text)[:8]}"


def snapshot_of(program: Program, level: Level, of: str) -> Snapshot:
    """The index of ``program`` at ``level``."""
    form = program.forms[level]
    copies = Counter(_part(section, 1) for section in form.sections)
    parts = [replace(part, times=count) for part, count in copies.items()]
    parts += [_part(k, program.kernel_calls.get(n, 0)) for n, k in program.kernels.items()]
    fields = dict(program.stamp.fields)
    return Snapshot(of, level, form.digest, fields, tuple(parts), dict(program.ops))


def _part(section: Section, times: int) -> Part:
    alone = KERNEL.sub("kernel:", CALLEE.sub("@", section.text))
    digest = hashlib.sha256(alone.encode()).hexdigest()[:SHORT]
    operations = sum('"(' in line for line in section.text.split("\n"))
    label = _COUNTER.sub("", section.label) or section.name
    return Part(section.kind, label, digest, operations, times)


def written(snapshot: Snapshot) -> str:
    """The text of a snapshot: JSON with one function, kernel, kind of operation or field a line.

    The last line is a digest of all others, so that a file edited by hand is noticed.
    """

    def lines(items: Sequence[str]) -> str:
        return ",\n".join(f"  {item}" for item in items)

    def table(values: Mapping[str, Any]) -> str:
        return lines([f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(values.items())])

    parts = [json.dumps([p.kind, p.label, p.digest, p.operations, p.times]) for p in snapshot.parts]
    return (
        f'{{\n "format": {json.dumps(FORMAT)},\n "of": {json.dumps(snapshot.of)},\n'
        f' "level": {json.dumps(snapshot.level)},\n "digest": {json.dumps(snapshot.digest)},\n'
        f' "stamp": {{\n{table(snapshot.stamp)}\n }},\n "parts": [\n{lines(parts)}\n ],\n'
        f' "ops": {{\n{table(snapshot.ops)}\n }},\n "sum": "{_sum(snapshot)}"\n}}\n'
    )


def _sum(snapshot: Snapshot) -> str:
    """A digest of all that a snapshot says."""
    said = [FORMAT, snapshot.of, snapshot.level, snapshot.digest, dict(snapshot.stamp)]
    parts = [[p.kind, p.label, p.digest, p.operations, p.times] for p in snapshot.parts]
    return digest_of(json.dumps([*said, parts, dict(snapshot.ops)], sort_keys=True))


def read(data: bytes, name: str) -> Snapshot:
    """The snapshot that `written` wrote.

    Raises:
        InputError: it is none, damaged, or not as it was written; one line with ``name``.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes")
        if not data.strip():
            raise ValueError("the file is empty")
        if _CONFLICT.search(data):
            raise ValueError("it holds the marks of a merge conflict")
        value = json.loads(data.decode(), object_pairs_hook=_no_duplicates)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"wanted the format {FORMAT!r}")
        keys = {"format", "of", "level", "digest", "stamp", "parts", "ops", "sum"}
        if set(value) != keys or value["level"] not in LEVELS:
            raise ValueError("its keys or its level")
        parts = tuple(_read_part(entry) for entry in value["parts"])
        texts = (value["of"], value["digest"], *value["stamp"].values())
        if not all(isinstance(t, str) for t in texts) or not _is_digest(value["digest"], 64):
            raise ValueError("its digest or its stamp")
        if not all(type(n) is int and n >= 0 for n in value["ops"].values()):
            raise ValueError("its counts")
        found = Snapshot(
            value["of"], value["level"], value["digest"], value["stamp"], parts, value["ops"]
        )
        if value["sum"] != _sum(found):
            raise ValueError("edited, or merged, since it was written: its sum isn't that of the "
                             "rest")  # fmt: skip
        return found
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{name}: not a whole snapshot ({reason}); accept it again") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _is_digest(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None


def _read_part(entry: Any) -> Part:
    kind, label, digest, operations, times = entry
    if kind not in _KINDS or not isinstance(label, str) or not _is_digest(digest, SHORT):
        raise ValueError("a function or kernel of it")
    if not all(type(n) is int and n >= 0 for n in (operations, times)):
        raise ValueError("a count of it")
    return Part(kind, label, digest, operations, times)


def changes(old: Snapshot, new: Snapshot) -> list[str]:
    """Which functions, kernels and counts differ, a line each."""
    found = _parts_changed(old.parts, new.parts)
    if len(found) > LINES_SHOWN:
        found[LINES_SHOWN:] = [f"and {len(found) - LINES_SHOWN} more functions and kernels"]
    if not found:
        found = ["each function and kernel by itself is the same; their order, or which is called "
                 "where, isn't"]  # fmt: skip
    counts = [
        f"{name} {old.ops.get(name, 0)} → {new.ops.get(name, 0)}"
        for name in sorted({*old.ops, *new.ops})
        if old.ops.get(name, 0) != new.ops.get(name, 0)
    ]
    if counts:
        more = f" and {len(counts) - LINES_SHOWN} more" if len(counts) > LINES_SHOWN else ""
        found.append(f"operations: {', '.join(counts[:LINES_SHOWN])}{more}")
    return found


def _parts_changed(old: Sequence[Part], new: Sequence[Part]) -> list[str]:
    before, after = Counter(old), Counter(new)
    gone, come = list((before - after).elements()), list((after - before).elements())
    found = []
    for part in gone:
        same = next((p for p in come if (p.kind, p.label) == (part.kind, part.label)), None)
        if same is None:
            found.append(f"{part.title} is gone ({plural(part.operations, 'operation')})")
            continue
        come.remove(same)
        what = [] if part.digest == same.digest else [f"{part.digest[:8]} → {same.digest[:8]}"]
        if part.operations != same.operations:
            what.append(f"{part.operations} → {plural(same.operations, 'operation')}")
        if part.times != same.times:
            nouns = ("call", "calls") if part.kind == "kernel" else ("copy", "copies")
            what.append(f"{part.times} → {plural(same.times, *nouns)}")
        found.append(f"{part.title} changed: {', '.join(what)}")
    return found + [
        f"{part.title} is new ({plural(part.operations, 'operation')})" for part in come
    ]
