"""Attributes as canonical text: printed whole by MLIR, names replaced by references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.mlir import channel_handle
from .ir import key_text, reference
from .program import digest_of

MESH_MARK = "\x01mesh "
"""Prefix of the symbols that meshes are renamed to before a module is read."""

_LARGE = 2000
_SYMBOL_REFERENCES = frozenset({"FlatSymbolRefAttr"})


class AttributePrinter:
    """Text of attributes and types, each distinct one printed once.

    ``on_unknown(construct, reason)`` is called for what can't be compared by its text.
    """

    def __init__(self, on_unknown: Callable[[str, str], None]) -> None:
        self._on_unknown = on_unknown
        self._attributes: dict[Any, str] = {}
        self._types: dict[Any, str] = {}

    def type_text(self, mlir_type: Any) -> str:
        """The text of a type."""
        found = self._types.get(mlir_type)
        if found is None:
            found = self._types[mlir_type] = str(mlir_type)
        return found

    def text(self, attribute: Any) -> str:
        """The text of an attribute, with references for symbols and channels."""
        found = self._attributes.get(attribute)
        if found is None:
            found = self._attributes[attribute] = self._print(attribute)
        return found

    def _print(self, attribute: Any) -> str:
        kind = type(attribute).__name__
        if kind == "StringAttr":
            return _shorten(str(attribute), None)
        if kind in _SYMBOL_REFERENCES:
            return "@" + reference("func", attribute.value)
        channel = channel_handle(attribute)
        if channel is not None:
            return _channel_text(*channel)
        text = str(attribute)
        if kind == "ArrayAttr" and "@" in text:
            return "[" + ", ".join(self.text(item) for item in attribute) + "]"
        if kind == "DictAttr" and ("@" in text or "channel_handle" in text):
            items = sorted((item.name, self.text(item.attr)) for item in attribute)
            return "{" + ", ".join(f"{key_text(name)} = {value}" for name, value in items) + "}"
        return self._checked(attribute, _mesh_references(text))

    def _checked(self, attribute: Any, text: str) -> str:
        bare = text.replace("\0", "")
        if "@" in bare or "dense_resource<" in bare:
            outside = "".join(_outside_quotes(text))
            if "dense_resource<" in outside:
                self._on_unknown("dense_resource", "the constant's bytes are outside the module")
            if "@" in outside.replace("@\0", ""):
                self._on_unknown(text[:80], "a symbol inside an attribute that no rule renames")
        return _shorten(text, attribute)


def shortened(text: str) -> str:
    """The text of an attribute, or its digest where it is long."""
    return _shorten(text, None)


def _channel_text(handle: int, kind: int) -> str:
    # XLA takes a handle below one as "no channel", so that value is kept as it is.
    shown = reference("channel", str(handle)) if handle > 0 else str(handle)
    return f"#stablehlo.channel_handle<handle = {shown}, type = {kind}>"


def _mesh_references(text: str) -> str:
    """Replaces the printed marks of `MESH_MARK`; inside a string its quotes would be escaped."""
    head, *rest = text.split('@"\\01mesh ')
    parts = [head]
    for piece in rest:
        key, tail = piece.split('"', 1)
        parts.append("@" + reference("mesh", key) + tail)
    return "".join(parts)


def _outside_quotes(text: str) -> list[str]:
    """The parts of printed MLIR outside string literals, whose quotes are printed as escapes."""
    return text.split('"')[::2]


def _shorten(text: str, attribute: Any) -> str:
    if len(text) <= _LARGE or "\0" in text:
        return text
    suffix = f" : {attribute.type}" if hasattr(attribute, "type") else ""
    return f"sha256<{digest_of(text)}, {len(text)} characters>{suffix}"
