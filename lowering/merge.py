"""Equal private functions become one."""

from __future__ import annotations

import re

from .ir import REFERENCE, Module, reference, walk
from .ledger import Ledger
from .printer import FunctionPrinter, Names


class _PlainNames(Names):
    """Names every reference by its own key, so that equal texts call the very same functions."""

    def name(self, kind: str, key: str) -> str:
        return f"{kind} {key}"


def merge_functions(module: Module, ledger: Ledger) -> None:
    """Merges private functions of equal text, in place, until no two are equal."""
    while True:
        printer = FunctionPrinter(module, _PlainNames({}, {}))
        first: dict[str, str] = {}
        merged: dict[str, str] = {}
        for key, function in module.functions.items():
            if not function.public:
                kept = first.setdefault(printer.function(function).text, key)
                if kept != key:
                    merged[key] = kept
        if not merged:
            return
        ledger.add("function-merged", len(merged))
        for key in merged:
            del module.functions[key]
        _redirect(module, merged)


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
