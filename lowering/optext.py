"""A tolerant reader of canonical text: lines to a tree of operations.

It reads what the normal form prints (one operation a line) and MLIR's generic form, which differs
in where attributes and types stand. It never fails: a line it can't read becomes an operation
named ``text`` that holds the line, so nothing escapes comparison. This is not a parser of MLIR;
artifacts from strangers are read with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .syntax import split

MAX_DEPTH = 200
"""Regions nested deeper than this are read as flat lines."""

_OP = re.compile(
    r'\s*(?:(?P<results>%[^="]*?) = )?"(?P<name>[^"\\]*)"\((?P<operands>[^()]*)\)(?P<rest>.*)',
    re.DOTALL,
)
_LABEL = re.compile(r"\s*\^(?P<name>\w+)(?:\((?P<args>.*)\))?:\s*$", re.DOTALL)
_FUNCTION = re.compile(r"\s*func\.func (?P<rest>.*)$", re.DOTALL)
_PARAMETER = re.compile(r"\s*arg (?P<value>%\w+): (?P<rest>.*)$", re.DOTALL)
_RESULT = re.compile(r"\s*result \d+: (?P<rest>.*)$", re.DOTALL)
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_OPENING = re.compile(r" ?\(\{$")


@dataclass(eq=False, slots=True)
class Value:
    """A result of an operation or an argument of a block."""

    owner: Op | Block
    index: int
    type: str = ""


@dataclass(eq=False, slots=True)
class Op:
    """One operation; ``rest`` is the line after the operands, without an opened region."""

    name: str
    rest: str
    line: int
    operands: list[Value | str] = field(default_factory=list)
    """A value, or the name of one that isn't defined in the text."""
    results: list[Value] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    parent: Block | None = None


@dataclass(eq=False, slots=True)
class Block:
    """Arguments and operations."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    parent: Region | None = None
    line: int = 0


@dataclass(eq=False, slots=True)
class Region:
    """Blocks of an operation."""

    owner: Op
    blocks: list[Block] = field(default_factory=list)


def read(text: str, shared: dict[str, str] | None = None) -> Block:
    """The tree of ``text``; its top block holds functions, or whatever the text has.

    Texts read with one ``shared`` have each distinct `Op.rest` once between them, so that equal
    ones are quickly seen to be.
    """
    return _Reader({} if shared is None else shared).read(text)


def walk(block: Block) -> Iterator[Op]:
    """Every operation below ``block``, outer ones first, in the order of the text."""
    stack = [iter(block.ops)]
    while stack:
        op = next(stack[-1], None)
        if op is None:
            stack.pop()
            continue
        yield op
        inner = [op for region in op.regions for block in region.blocks for op in block.ops]
        if inner:
            stack.append(iter(inner))


class _Reader:
    """Reads line by line, holding the stack of open regions."""

    def __init__(self, shared: dict[str, str]) -> None:
        self._shared = shared
        self._top = Block()
        self._block = self._top
        self._stack: list[Region] = []
        self._values: dict[str, Value] = {}
        self._pending: list[tuple[Op, int, str]] = []

    def read(self, text: str) -> Block:
        lines = text.split("\n")
        if lines and not lines[-1]:
            lines.pop()
        for number, line in enumerate(lines):
            match = _OP.fullmatch(line)
            if match is not None:
                self._op(number, *match.groups())
            else:
                self._line(number, line)
        self._attach()
        self._resolve()
        return self._top

    def _line(self, number: int, line: str) -> None:
        """A line that isn't an operation's."""
        body = line.strip()
        if body.startswith("}") and self._stack and self._close(body):
            return
        if (label := _LABEL.fullmatch(line)) is not None and self._stack:
            self._label(number, label)
        elif (found := _FUNCTION.fullmatch(line)) is not None:
            self._function(number, found["rest"])
        elif line and not line.startswith(" ") and self._stack:
            self._end_function()
            self._add(Op("text", body, number))
        elif (found := _PARAMETER.fullmatch(line)) is not None:
            op = self._add(Op("argument", f": {found['rest']}", number))
            self._define(op, found["value"])
        elif (found := _RESULT.fullmatch(line)) is not None:
            self._add(Op("result", f": {found['rest']}", number))
        elif body:
            self._add(Op("text", body, number))

    def _op(self, number: int, results: str | None, name: str, reads: str, rest: str) -> None:
        opens = rest.endswith("({") and len(self._stack) < MAX_DEPTH
        if opens:
            rest = _OPENING.sub("", rest)
        rest = self._shared.setdefault(rest, rest)
        values = self._values
        try:
            operands: list[Value | str] = [values[v] for v in reads.split(", ")] if reads else []
            op = Op(name, rest, number, operands, [], [], self._block)
        except KeyError:
            op = Op(name, rest, number, [], [], [], self._block)
            self._unknown_reads(op, reads)
        self._block.ops.append(op)
        if results:
            if "," not in results and ":" not in results:
                value = values[results] = Value(op, 0)
                op.results.append(value)
            else:
                self._define(op, results)
        if opens:
            self._open(op)

    def _unknown_reads(self, op: Op, reads: str) -> None:
        """Operands of which some aren't defined yet, or of an unexpected form."""
        for name in _VALUE.findall(reads):
            known = self._values.get(name)
            if known is None:
                self._pending.append((op, len(op.operands), name))
            op.operands.append(known or name)

    def _function(self, number: int, rest: str) -> None:
        self._end_function()
        op = self._add(Op("func.func", f" {rest}", number))
        self._open(op)

    def _end_function(self) -> None:
        self._attach()
        self._resolve()
        self._values = {}
        self._stack = []
        self._block = self._top

    def _open(self, op: Op) -> None:
        self._attach()
        region = Region(op)
        op.regions.append(region)
        self._stack.append(region)
        self._block = Block(parent=region)

    def _attach(self) -> None:
        """Gives a region the block that no label began, once there is something in it."""
        region = self._block.parent
        if region is not None and not region.blocks and self._block.ops:
            region.blocks.append(self._block)
            self._block.line = self._block.ops[0].line

    def _close(self, body: str) -> bool:
        owner = self._stack[-1].owner
        if owner.name == "func.func" and owner.rest.startswith((" public", " private")):
            return False  # a canonical function is closed by the next one
        self._attach()
        if body == "}, {":
            self._stack.pop()
            self._open(owner)
            return True
        if body.startswith("})"):
            self._stack.pop()
            self._block = owner.parent or self._top
            owner.rest += body[2:]
            return True
        return False

    def _label(self, number: int, match: re.Match[str]) -> None:
        self._attach()
        block = Block(parent=self._stack[-1], line=number)
        self._stack[-1].blocks.append(block)
        self._block = block
        for index, item in enumerate(split(match["args"] or "")):
            name, _, kind = item.partition(": ")
            block.args.append(Value(block, index, kind))
            self._values[name] = block.args[-1]

    def _add(self, op: Op) -> Op:
        op.parent = self._block
        self._block.ops.append(op)
        return op

    def _define(self, op: Op, names: str) -> None:
        for name in names.split(","):
            head, _, count = name.strip().partition(":")
            if count.isdigit() and int(count) < 1 << 16:
                for index in range(int(count)):
                    self._values[f"{head}#{index}"] = self._result(op)
            else:
                self._values[head] = self._result(op)

    def _result(self, op: Op) -> Value:
        op.results.append(Value(op, len(op.results)))
        return op.results[-1]

    def _resolve(self) -> None:
        for op, index, name in self._pending:
            op.operands[index] = self._values.get(name, name)
        self._pending = []
