"""A module as MLIR prints it: the header of each function in plain data, its body as text.

MLIR prints a function in generic form far faster than Python can walk it, so the normal form works
on that text. It is complete (nothing is elided, nested attributes are spelled out), every operation
begins a line, and strings in it hold no line break and no bare quote. Source locations are not
printed; they are collected by one walk, in the order of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..compat.mlir import locations_in_order
from .errors import InputError
from .ir import Function, key_text
from .session import Session
from .syntax import closing, entries, split
from .tails import Tails

_MEANT = "xla.sdy."
"""In the name of a function that Shardy's round trip through XLA knows by its name."""
_COUNTER = re.compile(r"_\d+$")
_SYMBOL_ATTRS = ("arg_attrs", "function_type", "res_attrs", "sym_name", "sym_visibility")


@dataclass(slots=True)
class Printed:
    """One function."""

    header: Function
    """Everything but its blocks."""
    arguments: list[tuple[str, str]]
    """Name and type of each argument of the entry block."""
    body: str
    """The lines between the header and the closing bracket, without those arguments."""
    locations: list[int]
    """The location of each operation of the body, in the order of the text."""


class Printer:
    """The functions, meshes and attributes of one module, read on demand."""

    def __init__(
        self,
        module: Any,
        session: Session,
        kernel_of: Callable[[bytes, str, int], str] | None = None,
    ) -> None:
        self._session = session
        self._operation = module.operation
        self._functions: dict[str, Any] = {}
        self._meshes: dict[str, Any] = {}
        self.public: dict[str, None] = {}
        """Keys of the functions that callers may enter, in module order."""
        self.symbols: dict[str, tuple[str, str]] = {}
        """For each symbol the kind and key of the reference that stands for it."""
        for view in module.body.operations:
            self._top_level(view.operation)
        self.tails = Tails(session, self.symbols, kernel_of)

    def _top_level(self, op: Any) -> None:
        if op.name == "func.func":
            key = op.attributes["sym_name"].value
            if "\0" in key:  # which marks references, and no name that a person gives
                raise InputError(f"the name of function {key!r} holds a NUL character; rename it")
            attributes = op.attributes
            if (
                "sym_visibility" not in attributes  # public is MLIR's default
                or attributes["sym_visibility"].value == "public"
            ):
                self.public[key] = None
            self._functions[key] = op
            self.symbols[key] = ("func", key)
        elif op.name == "sdy.mesh":
            key = str(len(self._meshes))
            self._meshes[key] = op
            self.symbols[op.attributes["sym_name"].value] = ("mesh", key)
        else:
            reason = "an operation beside the functions of a module"
            self._session.unknown(op.name, reason, self._session.locations.index_of(op.location))

    @property
    def keys(self) -> list[str]:
        """The symbols of all functions, in module order."""
        return list(self._functions)

    def attributes(self) -> dict[str, str]:
        """The attributes of the module itself."""
        found = self._operation.attributes
        names = sorted(name for name in found if name not in ("sym_name", "sym_visibility"))
        return {key_text(name): self.tails.attributes.text(str(found[name])) for name in names}

    def meshes(self) -> dict[str, str]:
        """The text of each mesh by its key."""
        found: dict[str, str] = {}
        for key, op in self._meshes.items():
            attributes = op.attributes
            names = sorted(name for name in attributes if name != "sym_name")
            texts = (self.tails.attributes.text(str(attributes[name])) for name in names)
            pairs = zip(map(key_text, names), texts, strict=True)
            found[key] = "{" + ", ".join(f"{name} = {text}" for name, text in pairs) + "}"
        return found

    def function(self, key: str) -> Printed:
        """Prints one function."""
        op = self._functions[key]
        table = self._session.locations
        locations = locations_in_order(op, table.known, table.index_of)
        text: str = op.get_asm(print_generic_op_form=True, use_local_scope=True)
        first = text.index("\n") + 1
        last = text.rindex("\n})") + 1
        raw = _attributes(text[:first], '"func.func"() ', " ({\n")
        raw.update(_attributes(text[last:], "}) ", " : () -> ()"))
        arguments: list[tuple[str, str]] = []
        if text.startswith("^bb0(", first):
            end = closing(text, first + 4)
            for item in split(text[first + 5 : end - 1]):
                name, _, kind = item.partition(": ")
                arguments.append((name, kind))
            first = text.index("\n", end) + 1
        elif first == last:  # a declaration
            inputs = raw["function_type"]
            kinds = split(inputs[1 : closing(inputs, 0) - 1])
            arguments = [(f"%arg{index}", kind) for index, kind in enumerate(kinds)]
        header = self._header(key, raw, len(arguments))
        header.loc = locations[0]
        return Printed(header, arguments, text[first:last], locations[1:])

    def _header(self, key: str, raw: dict[str, str], arguments: int) -> Function:
        text = self.tails.attributes.text
        function_type = raw["function_type"]
        inputs = closing(function_type, 0)
        results = function_type[inputs + 4 :]
        types = split(results[1:-1]) if results.startswith("(") else [results]
        attrs = {name: text(raw[name]) for name in sorted(raw) if name not in _SYMBOL_ATTRS}
        if _MEANT in key:
            attrs["sym_name"] = json.dumps(_COUNTER.sub("", key))
        return Function(
            key=key,
            public=key in self.public,
            attrs=attrs,
            arg_attrs=self._dictionaries(raw.get("arg_attrs"), arguments),
            result_types=types,
            result_attrs=self._dictionaries(raw.get("res_attrs"), len(types)),
            blocks=[],
            loc=-1,
        )

    def _dictionaries(self, raw: str | None, count: int) -> list[dict[str, str]]:
        if raw is None:
            return [{} for _ in range(count)]
        found: list[dict[str, str]] = []
        for entry in entries(raw) or ():
            items = entries(entry)
            assert isinstance(items, dict), entry
            if items.pop("jax.result_info", None) is not None:
                self._session.ledger.add("result-info")
            found.append({name: self.tails.attributes.text(items[name]) for name in sorted(items)})
        return found


def _attributes(line: str, before: str, after: str) -> dict[str, str]:
    """The dictionary that stands between two fixed texts of a line; empty where there is none."""
    text = line[len(before) :].rstrip("\n")
    inner = entries(text[: len(text) - len(after.rstrip("\n"))])
    return inner if isinstance(inner, dict) else {}
