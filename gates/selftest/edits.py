"""Where in a module a mutant can be made, and how: what mutants of several kinds share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compat.mlir import ir
from .draft import Draft
from .mutant import Edit, Sites


def named(*names: str) -> Sites:
    """Operations of these names."""
    return lambda draft: draft.ops(*names)


def having(sites: Sites, attribute: str) -> Sites:
    """Those of ``sites`` with an attribute."""
    return lambda draft: [op for op in sites(draft) if attribute in op.attributes]


def rewrite(attribute: str, change: Callable[[str], str]) -> Edit:
    """Changes an attribute by its text."""

    def edit(draft: Draft, op: Any) -> None:
        text = str(op.attributes[attribute])
        assert change(text) != text, text
        op.attributes[attribute] = ir.Attribute.parse(change(text))

    return edit


def rename(name: str) -> Edit:
    """Puts an operation of another name, and the same types, in place of one."""

    def edit(draft: Draft, op: Any) -> None:
        attributes = {key: op.attributes[key] for key in op.attributes}
        with ir.InsertionPoint(op), op.location:
            types = [value.type for value in op.results]
            new = ir.Operation.create(name, types, list(op.operands), attributes)
        for old, value in zip(op.results, new.results, strict=True):
            old.replace_all_uses_with(value)
        op.erase()

    return edit


def one_of(*changes: tuple[str, str]) -> Callable[[str], str]:
    """Replaces the first of the texts that is there by its partner."""

    def change(text: str) -> str:
        for old, new in changes:
            if old in text:
                return text.replace(old, new)
        return text

    return change
