"""Programs as plain data: what the normal form works on once MLIR has been read.

Reading MLIR once into lists, and then inlining, numbering and printing those, keeps every level
of the normal form in a few small functions that can be tested without a compiler, and leaves the
module that JAX handed over untouched.

Attribute values are text, printed by MLIR without aliases or elision. Names that mean nothing by
themselves (private functions, meshes, channel ids) stand in that text as *references*, written
``NUL kind NUL key NUL``; MLIR's printer escapes control characters, so nothing a user writes can
look like one. The printer of this package numbers them in order of first use.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.$-]*")
REFERENCE = re.compile("\0([^\0]*)\0([^\0]*)\0")


def reference(kind: str, key: str) -> str:
    """The text that stands for a name of ``kind`` until the printer numbers it."""
    return f"\0{kind}\0{key}\0"


def key_text(name: str) -> str:
    """The name of an attribute as text; one that isn't plain is quoted, so no two look alike."""
    return name if _PLAIN_KEY.fullmatch(name) else json.dumps(name)


@dataclass(slots=True)
class Op:
    """One operation. Values are numbers that are unique in their `Module`."""

    name: str
    operands: list[int]
    results: list[int]
    attrs: dict[str, str]
    """Sorted by name; frontend attributes and the callee of a call are kept apart."""
    loc: int
    frontend: dict[str, str] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    callee: str | None = None
    """For ``func.call``: the key of the function called."""
    kernel: str | None = None
    """For a call of a Mosaic kernel: the section name of its body."""
    pure_call: bool = False
    """For a custom call: known to have no effect beyond its results."""
    signature: str = ""
    """Its type as printed, ``(…) -> …``; empty where the types of its values must say."""


@dataclass(slots=True)
class Block:
    """Arguments and operations; the last operation is the terminator."""

    args: list[int]
    ops: list[Op] = field(default_factory=list)


@dataclass(slots=True)
class Function:
    """A function; ``key`` is its symbol in the module that was read."""

    key: str
    public: bool
    attrs: dict[str, str]
    arg_attrs: list[dict[str, str]]
    result_types: list[str]
    result_attrs: list[dict[str, str]]
    blocks: list[Block]
    loc: int
    declared: list[tuple[str, str]] = field(default_factory=list)
    """Names and types of the arguments of a function without a body."""


@dataclass(slots=True)
class Module:
    """Functions by key in module order, module attributes, meshes and the types of all values."""

    attrs: dict[str, str]
    meshes: dict[str, str]
    """The text of each mesh by its key, in module order."""
    functions: dict[str, Function]
    types: list[str]
    """The type of every value, indexed by its number."""

    def new_value(self, type_text: str) -> int:
        """A fresh value of that type."""
        self.types.append(type_text)
        return len(self.types) - 1


def walk(blocks: list[Block]) -> list[Op]:
    """Every operation below ``blocks``, outer ones first."""
    found: list[Op] = []
    pending = [blocks]
    while pending:
        for block in pending.pop():
            for op in block.ops:
                found.append(op)
                pending.extend(op.regions)
    return found
