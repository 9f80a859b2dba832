"""Plain data to canonical text: one operation a line, names numbered in order of first use."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .ir import REFERENCE, Block, Function, Module, Op
from .program import digest_of

_PLAIN = re.compile(r"[\w$.-]+")


@dataclass
class Page:
    """Lines and the location of each."""

    lines: list[str] = field(default_factory=list)
    locations: list[int] = field(default_factory=list)

    def add(self, line: str, location: int = -1) -> None:
        """Appends a line."""
        self.lines.append(line)
        self.locations.append(location)

    def extend(self, text: str, locations: Sequence[int]) -> None:
        """Appends whole lines of text."""
        self.lines.extend(text.split("\n")[:-1])
        self.locations.extend(locations)

    @property
    def text(self) -> str:
        """All lines, each ended by a newline."""
        return "".join(f"{line}\n" for line in self.lines)


class Names:
    """Numbers for the references of one program at one level, in order of first use."""

    def __init__(self, prefixes: dict[str, str], mesh_classes: dict[str, str]) -> None:
        self._prefixes = prefixes
        self._mesh_classes = mesh_classes
        self._numbers: dict[str, dict[str, str]] = {}
        self._fixed: dict[tuple[str, str], str] = {}
        self.pending: deque[str] = deque()
        """Functions met for the first time, to be printed next."""

    def name(self, kind: str, key: str) -> str:
        """The canonical name of ``key``."""
        if kind == "mesh":
            key = self._mesh_classes.get(key, key)
        if (kind, key) in self._fixed:
            return self._fixed[kind, key]
        table = self._numbers.setdefault(kind, {})
        if key not in table:
            table[key] = f"{self._prefixes.get(kind, '')}{len(table) + 1}"
            if kind == "func":
                self.pending.append(key)
        return table[key]

    def fix(self, kind: str, key: str, name: str) -> None:
        """Gives ``key`` a name that isn't numbered."""
        self._fixed[kind, key] = name

    def count(self, kind: str) -> int:
        """How many names of ``kind`` have been given."""
        return len(self._numbers.get(kind, {}))

    def resolve(self, text: str) -> str:
        """``text`` with every reference replaced."""
        if "\0" not in text:
            return text
        return REFERENCE.sub(lambda m: self.name(m[1], m[2]), text)


def attributes_text(attrs: dict[str, str], resolve: Callable[[str], str]) -> str:
    """A dictionary of attributes after what it belongs to; empty if there are none."""
    if not attrs:
        return ""
    return " {" + ", ".join(f"{name} = {resolve(text)}" for name, text in attrs.items()) + "}"


PREFIXES = {"func": "f", "mesh": "mesh", "channel": "", "collective": ""}


class FunctionPrinter:
    """Prints functions of one module with shared `Names`."""

    def __init__(self, module: Module, names: Names) -> None:
        self._types = module.types
        self._names = names
        self._page = Page()
        self._values: dict[int, str] = {}
        self._tails: dict[tuple[int, int, str | None, str], str] = {}

    def function(self, function: Function) -> Page:
        """The page of one function: header, one line an argument, one a result, the body."""
        self._page = Page()
        self._values = {}
        kind = "public" if function.public else "private"
        self._page.add(f"func.func {kind}{self._attrs(function.attrs)}", function.loc)
        arguments = function.declared
        if function.blocks:
            entry = function.blocks[0].args
            arguments = [(self._define(value), self._types[value]) for value in entry]
        for (name, text), attrs in zip(arguments, function.arg_attrs, strict=True):
            self._page.add(f"  arg {name}: {text}{self._attrs(attrs)}")
        results = zip(function.result_types, function.result_attrs, strict=True)
        for index, (text, attrs) in enumerate(results):
            self._page.add(f"  result {index}: {text}{self._attrs(attrs)}")
        self._region(function.blocks, 1, skip_entry=True)
        return self._page

    def _attrs(self, attrs: dict[str, str]) -> str:
        return attributes_text(attrs, self._names.resolve)

    def _define(self, value: int) -> str:
        found = self._values.get(value)
        if found is None:
            found = self._values[value] = f"%{len(self._values)}"
        return found

    def _region(self, blocks: Sequence[Block], depth: int, skip_entry: bool = False) -> None:
        indent = "  " * depth
        for index, block in enumerate(blocks):
            if not (skip_entry and index == 0) and (block.args or len(blocks) > 1):
                args = ", ".join(f"{self._define(a)}: {self._types[a]}" for a in block.args)
                self._page.add(f"{indent}^{index}({args}):")
            for op in block.ops:
                self._op(op, depth)

    def _op(self, op: Op, depth: int) -> None:
        indent = "  " * depth
        names = self._values
        try:
            operands = ", ".join([names[value] for value in op.operands])
        except KeyError:  # in a region of several blocks, read before it is defined
            operands = ", ".join([self._define(value) for value in op.operands])
        results = ""
        if op.results:
            results = ", ".join([self._define(value) for value in op.results]) + " = "
        line = f'{indent}{results}"{op.name}"({operands}){self._tail(op)}'
        if not op.regions:
            self._page.add(line, op.loc)
            return
        self._page.add(f"{line} ({{", op.loc)
        for index, region in enumerate(op.regions):
            if index:
                self._page.add(f"{indent}}}, {{", op.loc)
            self._region(region, depth + 1)
        self._page.add(f"{indent}}})", op.loc)

    def _tail(self, op: Op) -> str:
        """What follows the operands; operations that were read from equal text share it."""
        key = (id(op.attrs), id(op.frontend), op.callee, op.signature)
        found = self._tails.get(key) if op.signature and not op.successors else None
        if found is None:
            found = "" if op.callee is None else f" @{self._names.name('func', op.callee)}"
            if op.successors:
                found += " [" + ", ".join(f"^{index}" for index in op.successors) + "]"
            found += self._attrs(op.attrs)
            if op.frontend:
                found += " frontend" + self._attrs(op.frontend)
            found += f" : {op.signature or self._signature(op)}"
            if op.signature and not op.successors:
                self._tails[key] = found
        return found

    def _signature(self, op: Op) -> str:
        inputs = ", ".join([self._types[value] for value in op.operands])
        outputs = [self._types[value] for value in op.results]
        outcome = ", ".join(outputs)
        is_bare = len(outputs) == 1 and not outcome.startswith("(")
        return f"({inputs}) -> {outcome if is_bare else f'({outcome})'}"


def public_name(key: str) -> str:
    """The name of a function that callers may enter; never that of a numbered or another one."""
    if key == "main":
        return key
    if not _PLAIN.fullmatch(key):
        key = f"sha256:{digest_of(key)}"  # Without quotes and spaces, and so never a plain one.
    return f'"{key}"'


def in_order(names: Names, public: list[str], keys: list[str]) -> Iterator[tuple[str, str]]:
    """Name and key of every function: public ones first, each callee when first met."""
    done: set[str] = set()

    def pending() -> Iterator[tuple[str, str]]:
        while names.pending:
            key = names.pending.popleft()
            if key not in done:
                done.add(key)
                yield names.name("func", key), key

    for key in public:
        names.fix("func", key, public_name(key))
    for key in public:
        names.pending.append(key)
        yield from pending()
    for key in keys:
        names.name("func", key)
        yield from pending()


def print_in_order(module: Module, names: Names) -> list[tuple[str, Function, Page]]:
    """Name, function and page of every function, as `in_order` names them."""
    printer = FunctionPrinter(module, names)
    public = [key for key, function in module.functions.items() if function.public]
    return [
        (name, module.functions[key], printer.function(module.functions[key]))
        for name, key in in_order(names, public, list(module.functions))
    ]
