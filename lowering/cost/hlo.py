"""Optimised HLO as XLA prints it, read into computations and instructions.

Only what a cost needs is read: shapes, operands, called computations, the compiler's notes on an
instruction (``backend_config``) and where it came from (``metadata`` and the tables of frames).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .frames import Frames, read_frames
from .shapes import Shape, read_shape

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_SEVERAL = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_METADATA = re.compile(r'\bmetadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}')
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s}]+)')
_ATTRIBUTE = re.compile(
    r'\b(\w+)=("(?:[^"\\]|\\.)*"|\{(?:[^{}]|\{[^{}]*\})*\}|\[[\d,]*\]<=\[[\d,]*\]'
    r"|mesh\[[^\]]*\]\s*\{[^{}]*\}|[^\s,{}]+)"
)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """Of its results: one, or a tuple's leaves in order."""
    operands: tuple[str, ...]
    literal: str
    """What stands in the parentheses: a constant's value, a parameter's number."""
    called: Mapping[str, tuple[str, ...]]
    """Computations by role: ``calls``, ``to_apply``, ``body``, ``condition``, ``branches``."""
    attributes: Mapping[str, str] = field(repr=False)
    """Attributes with a simple value, as text, quotes removed."""
    config: Mapping[str, Any] = field(repr=False)
    """The compiler's notes; empty where there are none or they are no JSON object."""
    metadata: Mapping[str, str] = field(repr=False)
    is_root: bool = False


@dataclass(frozen=True)
class Computation:
    """One HLO computation, its instructions in scheduled order."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction
    thread: str
    """The execution thread, as in ``sparsecore``; ``main`` where none is given."""

    def parameter(self, number: int) -> Instruction | None:
        """The parameter of that number."""
        wanted = str(number)
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter" and instruction.literal == wanted:
                return instruction
        return None

    def users(self, name: str) -> list[Instruction]:
        """The instructions that read ``name``."""
        return [i for i in self.instructions.values() if name in i.operands]


@dataclass(frozen=True)
class HloModule:
    """An optimised program."""

    entry: Computation
    computations: Mapping[str, Computation] = field(repr=False)
    frames: Frames = field(repr=False)

    def source(self, instruction: Instruction) -> str | None:
        """``file:line`` of the user's code that an instruction came from."""
        return self.frames.source(instruction.metadata)


def read_hlo(text: str) -> HloModule:
    """Reads the text of an optimised module.

    Raises:
        InputError: it has no entry computation, or an instruction has another form.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for header, lines, footer in _computations(text):
        match = _HEADER.match(header)
        assert match is not None
        made = _computation(match["name"], lines, footer)
        computations[made.name] = made
        if match["entry"]:
            entry = made
    if entry is None:
        raise InputError("optimised HLO: no entry computation found; is this what XLA printed?")
    return HloModule(entry, computations, read_frames(text))


def _computations(text: str) -> Iterator[tuple[str, list[str], str]]:
    header = ""
    body: list[str] = []
    for line in text.splitlines():
        if not header:
            if _HEADER.match(line):
                header, body = line, []
        elif line.startswith("}"):
            yield header, body, line
            header = ""
        else:
            body.append(line)


def _computation(name: str, lines: list[str], footer: str) -> Computation:
    instructions = {}
    root = None
    for line in lines:
        if not line.strip():
            continue
        made = _instruction(line)
        instructions[made.name] = made
        root = made if made.is_root or root is None else root
    if root is None:
        raise InputError(f"optimised HLO: computation {name} is empty")
    thread = re.search(r'execution_thread="([^"]+)"', footer)
    return Computation(name, instructions, root, thread[1] if thread else "main")


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise InputError(f"optimised HLO: no instruction: {line.strip()[:80]!r}")
    rest = match["rest"]
    shapes, end = read_shape(rest)
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise InputError(f"optimised HLO: no operation in {line.strip()[:80]!r}")
    close = _closing(rest, opcode.end() - 1)
    inside, after = rest[opcode.end() : close], rest[close + 1 :]
    after, config = _config(after)
    metadata = _METADATA.search(after)
    if metadata is not None:
        after = after[: metadata.start()] + after[metadata.end() :]
    return Instruction(
        name=match["name"],
        opcode=opcode["opcode"],
        shapes=shapes,
        operands=tuple(_OPERAND.findall(inside)),
        literal=inside,
        called=_called(after),
        attributes={key: value.strip('"') for key, value in _ATTRIBUTE.findall(after)},
        config=config,
        metadata=_fields(metadata[1]) if metadata else {},
        is_root=bool(match["root"]),
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis at ``opening`` closes; the end of the text where it doesn't."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, opening):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return len(text)


def _config(text: str) -> tuple[str, Mapping[str, Any]]:
    """The text without its ``backend_config``, and that as a mapping."""
    mark = "backend_config="
    start = text.find(mark)
    if start < 0:
        return text, {}
    try:
        value, end = _DECODER.raw_decode(text, start + len(mark))
        if isinstance(value, str):
            value = json.loads(value)
    except ValueError:
        return text[:start], {}
    return text[:start] + text[end:], value if isinstance(value, dict) else {}


def _called(text: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {r: (name,) for r, name in _CALLED.findall(text)}
    branches = found.pop("true_computation", ()) + found.pop("false_computation", ())
    for role, group in _SEVERAL.findall(text):
        names = tuple(name.strip().lstrip("%") for name in group.split(",") if name.strip())
        if role == "branch_computations":
            branches += names
        else:
            found["calls"] = found.get("calls", ()) + names
    return {**found, "branches": branches} if branches else found


def _fields(text: str) -> dict[str, str]:
    return {
        key: value[1:-1].replace('\\"', '"') if value.startswith('"') else value
        for key, value in _FIELD.findall(text)
    }
