"""Equal private functions become one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .ir import REFERENCE, Function, Module, reference, walk
from .ledger import Ledger
from .printer import FunctionPrinter, Names


class _Classes(Names):
    """Names every function by the first one found equal to it, and the rest by their own keys.

    So equal texts call the very same functions.
    """

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__({}, {})
        self._functions = functions
        self.kept: dict[str, str] = {}
        """For each private function that was met, the first one equal to it."""
        self.early = False
        """Whether a function was named before it was known what it is equal to."""

    def name(self, kind: str, key: str) -> str:
        if kind == "func":
            if key not in self.kept and key in self._functions:
                self.early |= not self._functions[key].public
            key = self.kept.get(key, key)
        return f"{kind} {key}"


def merge_functions(module: Module, ledger: Ledger) -> None:
    """Merges private functions of equal text, in place, until no two are equal.

    Callees come before their callers, so each function is printed once, with what it calls already
    merged. Only functions that call each other in a circle, where no order does, need more rounds.
    """
    names = _Classes(module.functions)
    order = [key for key in _callees_first(module) if not module.functions[key].public]
    classes = _round(module, order, names, names.kept)
    while names.early:
        again: dict[str, str] = {}  # all by what was known before, whatever their order
        found = _round(module, order, names, again)
        names.kept = again
        if found == classes:
            break
        classes = found
    merged = _to_first(module, names.kept)
    if not merged:
        return
    ledger.add("function-merged", len(merged))
    for key in merged:
        del module.functions[key]
    _redirect(module, merged)


def _round(module: Module, order: list[str], names: _Classes, kept: dict[str, str]) -> int:
    """Fills ``kept``; returns how many different functions there are."""
    found: dict[str, str] = {}
    printer = FunctionPrinter(module, names)
    for key in order:
        text = printer.function(module.functions[key]).text
        kept[key] = found.setdefault(text, key)
    return len(found)


def _callees_first(module: Module) -> Iterator[str]:
    """The key of every function, after those of the functions that it calls."""
    entered: set[str] = set()
    left: set[str] = set()
    for root in module.functions:
        stack = [root]
        while stack:
            key = stack[-1]
            if key in entered:
                stack.pop()
                if key not in left:
                    left.add(key)
                    yield key
                continue
            entered.add(key)
            callees = (op.callee for op in walk(module.functions[key].blocks))
            stack.extend({c: None for c in callees if c in module.functions and c not in entered})


def _to_first(module: Module, kept: dict[str, str]) -> dict[str, str]:
    """For each function that goes, the one equal to it that comes first in the module."""
    first: dict[str, str] = {}
    merged: dict[str, str] = {}
    for key in module.functions:
        if key in kept and first.setdefault(kept[key], key) != key:
            merged[key] = first[kept[key]]
    return merged


def _redirect(module: Module, merged: dict[str, str]) -> None:
    def renamed(match: re.Match[str]) -> str:
        kind, key = match.groups()
        return reference(kind, merged.get(key, key) if kind == "func" else key)

    for function in module.functions.values():
        for op in walk(function.blocks):
            if op.callee in merged:
                op.callee = merged[op.callee]
            if any("\0func\0" in text for text in op.attrs.values()):
                op.attrs = {k: REFERENCE.sub(renamed, v) for k, v in op.attrs.items()}
