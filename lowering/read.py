"""From MLIR's generic text to plain data (`ir.Module`), for the levels that take programs apart.

This is no parser of MLIR: it reads what `printed` holds, a line at a time, and takes everything a
line has. A line of another form is an error, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .ir import Block, Function, Module, Op, walk
from .printed import Printed, Printer
from .session import Session as Session
from .syntax import closing, split
from .tails import Tail, Tails

PROGRAM_DIALECTS = frozenset({"builtin", "chlo", "func", "sdy", "stablehlo"})
KERNEL_DIALECTS = frozenset(
    {"affine", "arith", "builtin", "cf", "func", "llvm", "math", "memref", "scf", "tpu", "vector"}
)
UNKNOWN_DIALECT = "an operation of a dialect that no rule of the form knows"
_LABEL = re.compile(r"bb(\d+)(?:\((.*)\))?:(?:  // .*)?")
_LINE = re.compile(r' *(?:(%\w+)(?::(\d+))? = )?(?:"([^"]*)"\(([^()]*)\)|(\}|\^))(.*)\n')


class Unreadable(Exception):
    """The text isn't what MLIR prints."""


class Reader:
    """Reads a whole module of ``dialects``.

    ``kernel_of(body, label, loc)`` turns the encoded body of a kernel into its token.
    """

    def __init__(
        self,
        session: Session,
        dialects: frozenset[str],
        kernel_of: Callable[[bytes, str, int], str] | None = None,
    ) -> None:
        self._session = session
        self._dialects = dialects
        self._kernel_of = kernel_of

    def read(self, module: Any) -> Module:
        """The module's plain data.

        Raises:
            Unreadable: MLIR prints something that this reader doesn't know.
        """
        printer = Printer(module, self._session, self._kernel_of)
        found = Module(printer.attributes(), printer.meshes(), {}, [])
        functions = FunctionReader(found, printer.tails)
        for key in printer.keys:
            found.functions[key] = functions.read(printer.function(key))
            for op in walk(found.functions[key].blocks):
                if op.name.partition(".")[0] not in self._dialects:
                    self._session.unknown(op.name, UNKNOWN_DIALECT, op.loc)
        return found


@dataclass(slots=True)
class _Frame:
    """An operation whose region is open."""

    op: Op
    results: list[str]
    """Names of its results, which are defined when it closes."""
    outer: list[Block]
    """The blocks of the region it stands in."""
    names: list[str]
    """What the open region defines, and nothing outside it sees."""


class FunctionReader:
    """Reads the functions of one module, values numbered in ``module``."""

    def __init__(self, module: Module, tails: Tails) -> None:
        self._types = module.types
        self._tails = tails
        self._known: dict[tuple[str, str], tuple[Tail, list[str]]] = {}
        self._signatures: dict[str, list[str]] = {}
        self._values: dict[str, int] = {}
        self._early: dict[str, int] = {}
        self._frames: list[_Frame] = []
        self._blocks: list[Block] = []
        self._places: Iterator[int] = iter(())

    def read(self, printed: Printed) -> Function:
        """The function, its blocks among it.

        Raises:
            Unreadable: a line isn't what MLIR prints.
        """
        self._values, self._early, self._frames = {}, {}, []
        self._places = iter(printed.locations)
        self._blocks = top = [Block([])]
        entry = top[0].args
        for name, text in printed.arguments:
            entry.append(self._define(name, text))
        body = printed.body
        at = 0
        for match in _LINE.finditer(body):
            if match.start() != at:
                break
            at = match.end()
            results, count, name, operands, other, text = match.groups()
            if name is not None:
                self._op(name, results, count, operands, text)
            elif other == "^":
                self._label(text)
            else:
                self._close(text)
        if at != len(body) or self._frames or self._early:
            raise Unreadable(f"function {printed.header.key}: {body[at : at + 80]!r}")
        if body:
            printed.header.blocks = top
        else:
            printed.header.declared = printed.arguments
        return printed.header

    def _op(self, name: str, results: str | None, count: str | None, reads: str, text: str) -> None:
        tail, types = self._known.get((name, text)) or self._tail(name, text)
        operands: list[int] = []
        if reads:
            names = reads.split(", ")
            try:
                operands = [self._values[value] for value in names]
            except KeyError:
                operands = [self._use(value) for value in names]
        op = Op(
            name,
            operands,
            [],
            tail.attrs,
            next(self._places),
            tail.frontend,
            [],
            tail.successors,
            tail.callee,
            tail.kernel,
            tail.pure_call,
            tail.types,
        )
        self._blocks[-1].ops.append(op)
        if tail.opens:
            self._frames.append(_Frame(op, _names(results, count), self._blocks, []))
            self._enter(op)
        elif results is not None:
            self._results(op, _names(results, count), types)

    def _enter(self, op: Op) -> None:
        self._blocks = [Block([])]
        op.regions.append(self._blocks)

    def _results(self, op: Op, names: list[str], types: list[str]) -> None:
        if len(names) != len(types):
            raise Unreadable(f"{op.name}: {len(names)} results of {len(types)} types")
        op.results = [self._define(name, text) for name, text in zip(names, types, strict=True)]

    def _define(self, name: str, text: str) -> int:
        number = self._early.pop(name, None) if self._early else None
        if number is None:
            number = len(self._types)
            self._types.append(text)
        else:
            self._types[number] = text
        self._values[name] = number
        if self._frames:
            self._frames[-1].names.append(name)
        return number

    def _use(self, name: str) -> int:
        """A value, which in a region of several blocks may be read before it is defined."""
        if name in self._values:
            return self._values[name]
        if name not in self._early:
            self._early[name] = len(self._types)
            self._types.append("")
        return self._early[name]

    def _tail(self, name: str, text: str) -> tuple[Tail, list[str]]:
        tail = self._tails.of(name, text, -1)
        found = self._known[name, text] = (tail, [] if tail.opens else self._outcome(tail.types))
        return found

    def _outcome(self, signature: str) -> list[str]:
        """The types of the results."""
        found = self._signatures.get(signature)
        if found is None:
            text = signature[closing(signature, 0) + 4 :]
            found = split(text[1:-1]) if text.startswith("(") else [text]
            self._signatures[signature] = found
        return found

    def _label(self, text: str) -> None:
        match = _LABEL.fullmatch(text)
        if match is None:
            raise Unreadable(text[:80])
        if self._blocks[0].ops:
            self._blocks.append(Block([]))
        if int(match[1]) != len(self._blocks) - 1:
            raise Unreadable(f"block {match[1]} is number {len(self._blocks) - 1} of its region")
        for item in match[2].split(", %") if match[2] else ():
            name, _, kind = item.partition(": ")
            self._blocks[-1].args.append(self._define(f"%{name.removeprefix('%')}", kind))

    def _close(self, text: str) -> None:
        if not self._frames or not (text == ", {" or text.startswith(")")):
            raise Unreadable(text[:80])
        frame = self._frames[-1]
        for name in frame.names:
            del self._values[name]
        if not self._blocks[0].ops and not self._blocks[0].args:
            self._blocks.clear()  # a region without blocks
        if text == ", {":
            frame.names = []
            self._enter(frame.op)
            return
        self._frames.pop()
        self._blocks = frame.outer
        op = frame.op
        tail, types = self._known.get((op.name, text[1:])) or self._tail(op.name, text[1:])
        if tail.attrs:
            op.attrs = dict(sorted({**op.attrs, **tail.attrs}.items()))
        op.frontend = tail.frontend or op.frontend
        op.signature = tail.types
        self._results(op, frame.results, types)


def _names(name: str | None, count: str | None) -> list[str]:
    """The names of the results that a line defines."""
    if name is None:
        return []
    return [name] if count is None else [f"{name}#{index}" for index in range(int(count))]
