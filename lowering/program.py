"""The artifact: one lowered program in normal form, as plain data.

A `Program` holds canonical text and digests only. Nothing here calls an MLIR parser, so a
program may come from a stranger.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Level = Literal["exact", "inlined", "dataflow"]
SEVERAL = " = "
"""Between the names of one kernel body."""
LEVELS: tuple[Level, ...] = ("exact", "inlined", "dataflow")

KERNEL = re.compile(r"kernel:([0-9a-f]{12})[0-9a-f]*")
"""A reference to a kernel in canonical text."""


FOREIGN = "a file of MLIR"
"""The stamp's only field, ``origin``, of a program that relower didn't lower itself."""


def digest_of(text: str) -> str:
    """The sha256 of ``text`` in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Location:
    """Where an operation came from; never part of a digest."""

    file: str | None
    line: int | None
    scope: str | None
    """The name-scope path, as in ``jit(step)/while/body/dot_general``."""


@dataclass(frozen=True)
class Section:
    """One function or one kernel body in canonical text, one operation a line."""

    name: str
    """``main``, ``f1``, ``f2``, … in order of first use; a kernel is ``kernel:<digest[:12]>``; the
    attributes and meshes of the whole are ``module``."""
    kind: Literal["module", "function", "kernel"]
    text: str
    label: str = ""
    """What the user calls it (the function's or kernel's own name); never part of a digest."""
    locations: tuple[int, ...] = ()
    """For each line of ``text``, an index into `Program.locations`, or -1."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the label: of a kernel that is called by several, each."""
        return tuple(self.label.split(SEVERAL))

    @cached_property
    def digest(self) -> str:
        """The digest of the canonical text alone."""
        return digest_of(self.text)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """The names of the kernels that the text refers to."""
        if "kernel:" not in self.text:
            return frozenset()
        return frozenset(f"kernel:{match[1]}" for match in KERNEL.finditer(self.text))


@dataclass(frozen=True)
class Form:
    """A program at one level: its functions in order of first use."""

    level: Level
    sections: tuple[Section, ...]
    digest: str
    """Over the digests of the sections and, through their text, of every kernel they call."""


def form_digest(sections: Sequence[Section]) -> str:
    """The digest of a form, from the kind, name and digest of each of its sections."""
    return digest_of("".join(f"{s.kind} {s.name} {s.digest}\n" for s in sections))


@dataclass(frozen=True)
class Unknown:
    """A construct that no rule of the normal form knows: the verdict can't be IDENTICAL."""

    construct: str
    """The operation, attribute or body, by its name."""
    reason: str
    where: Location | None = None


@dataclass(frozen=True)
class Stamp:
    """What must agree before two programs may be compared."""

    fields: Mapping[str, str]
    """jax, jaxlib, libtpu, mosaic, route, target, mesh, axis_types, mesh_context, partitioner, x64,
    prng, flags."""
    queries: tuple[str, ...] = ()
    """Platform queries seen while tracing, each with its caller's line."""


@dataclass(frozen=True, repr=False)
class Program:
    """A lowered program in normal form."""

    forms: Mapping[Level, Form]
    kernels: Mapping[str, Section]
    """Distinct kernel bodies by section name."""
    kernel_calls: Mapping[str, int]
    """Calls of each kernel, counted through the call graph, loops counted once."""
    ops: Mapping[str, int]
    """Operations by name over all functions, counted through the call graph."""
    ledger: Mapping[str, int]
    """How often each noise rule set something aside."""
    stamp: Stamp
    unknowns: tuple[Unknown, ...] = ()
    locations: tuple[Location, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        """A line: the text itself may be megabytes."""
        digests = ", ".join(f"{level} {form.digest[:12]}" for level, form in self.forms.items())
        return (
            f"<Program {digests}; {sum(self.ops.values())} operations, "
            f"{len(self.kernels)} kernels, {len(self.unknowns)} unknown>"
        )


def apart(left: str, right: str) -> tuple[str, str]:
    """Two values of a field of a stamp without the items of lists that both have."""
    a, b = left.split(", "), right.split(", ")
    only_a, only_b = [x for x in a if x not in b], [x for x in b if x not in a]
    if (only_a or only_b) and min(len(a), len(b)) > 1:
        return ", ".join(only_a) or "without", ", ".join(only_b) or "without"
    return left, right
