"""Attributes as canonical text: as MLIR prints them, with names replaced by references."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .ir import reference
from .program import digest_of
from .syntax import closing, entries, outside_strings, unquoted

_LARGE = 2000
_SYMBOL = re.compile(r'@(?P<name>"(?:[^"\\]|\\.)*"|[\w$.]+)(?P<nested>::@)?|"(?:[^"\\]|\\.)*"')
_FLAT_SYMBOL = re.compile(r'@("(?:[^"\\]|\\.)*"|[\w$.]+)')
_CHANNEL = re.compile(r"#stablehlo\.channel_handle<handle = (-?\d+), type = (-?\d+)>")
MARKS = ("@", "channel_handle", "dense_resource<")
"""Attribute text without any of these, and no longer than `is_long` allows, is canonical."""


def is_long(text: str) -> bool:
    """Whether an attribute is represented by its digest."""
    return len(text) > _LARGE


class AttributeReader:
    """Canonical text of attributes.

    ``symbols`` maps the symbols of the module to the kind and key of the reference that stands for
    each. ``on_unknown(construct, reason)`` is called for what can't be compared by its text.
    """

    def __init__(
        self,
        on_unknown: Callable[[str, str], None],
        symbols: Mapping[str, tuple[str, str]],
    ) -> None:
        self._on_unknown = on_unknown
        self._symbols = symbols

    def text(self, raw: str) -> str:
        """``raw`` with references for symbols and channels; where it is long, its digest."""
        if not is_long(raw) and not any(mark in raw for mark in MARKS):
            return raw
        if raw.startswith('"') and closing(raw, 0) == len(raw):
            return shortened(raw)
        symbol = _FLAT_SYMBOL.fullmatch(raw)
        if symbol is not None:
            return self._symbol(unquoted(symbol[1]), raw)
        channel = _CHANNEL.fullmatch(raw)
        if channel is not None:
            return _channel_text(int(channel[1]), channel[2])
        if any(mark in raw for mark in MARKS):
            inner = entries(raw) if raw[0] in "[{" else None
            if isinstance(inner, list):
                return "[" + ", ".join(self.text(item) for item in inner) + "]"
            if isinstance(inner, dict):
                items = ((name, self.text(value)) for name, value in inner.items())
                return "{" + ", ".join(entry_text(name, value) for name, value in items) + "}"
        return self._leaf(raw)

    def check_types(self, text: str) -> None:
        """Reports a type that names a symbol, which no rule knows."""
        if "@" in text and "@" in outside_strings(text):
            self._on_unknown(text.strip()[:80], "a symbol inside a type that no rule renames")

    def _symbol(self, name: str, raw: str) -> str:
        if name not in self._symbols:
            self._on_unknown(raw[:80], "a symbol that the module doesn't define")
            return raw
        kind, key = self._symbols[name]
        return "@" + reference(kind, key)

    def _leaf(self, raw: str) -> str:
        if "dense_resource<" in raw and "dense_resource<" in outside_strings(raw):
            self._on_unknown("dense_resource", "the constant's bytes are outside the module")
        if "@<" in raw and "@<" in outside_strings(raw):  # as MLIR prints an empty symbol
            self._on_unknown(raw[:80], "a symbol that the module doesn't define")
        text = _SYMBOL.sub(self._inside, raw) if "@" in raw else raw
        return shortened(text)

    def _inside(self, match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0]  # a string
        kind, key = self._symbols.get(unquoted(match["name"]), ("", ""))
        if kind == "mesh" and not match["nested"]:
            return "@" + reference(kind, key)
        text = match.string[:80]
        self._on_unknown(text, "a symbol inside an attribute that no rule renames")
        return match[0]


def entry_text(name: str, value: str) -> str:
    """One attribute of a dictionary, as MLIR writes it but with units spelled out."""
    return f"{name} = {value}"


def shortened(text: str) -> str:
    """The text of an attribute, or its digest and type where it is long."""
    if not is_long(text) or "\0" in text:
        return text
    value, colon, kind = text.rpartition(" : ")
    is_typed = value.startswith("dense") and colon and '"' not in kind
    suffix = f" : {kind}" if is_typed else ""
    return f"sha256<{digest_of(text)}, {len(text)} characters>{suffix}"


def _channel_text(handle: int, kind: str) -> str:
    # XLA takes a handle below one as "no channel", so that value is kept as it is.
    shown = reference("channel", str(handle)) if handle > 0 else str(handle)
    return f"#stablehlo.channel_handle<handle = {shown}, type = {kind}>"
