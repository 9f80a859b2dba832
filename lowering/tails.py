"""What follows an operation's operands in MLIR's generic text, with the noise rules applied.

A *tail* is the part of a line after the operands: successors, properties, attributes and types. It
says all of an operation but which values it reads, so equal tails are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import custom_calls
from .attributes import MARKS, AttributeReader, entry_text
from .ir import Op, reference
from .session import Session
from .syntax import closing, entries, split, unquoted

KERNEL_TARGET = "tpu_custom_call"
"""The custom call whose backend config is known to be JSON and to hold a Mosaic kernel."""
CUSTOM_CALL = "stablehlo.custom_call"
TRACES = frozenset({"tpu.trace", "tpu.trace_start"})
TRANSFERS = frozenset({"stablehlo.send", "stablehlo.recv"})
FRONTEND = "mhlo.frontend_attributes"
ALWAYS = frozenset({CUSTOM_CALL, *TRACES, *TRANSFERS})
"""Operations that have rules of their own."""
TAIL_MARKS = (*MARKS, FRONTEND)
"""A tail without these marks, without a long attribute and not of `ALWAYS` is canonical."""

_CONFIGS = ("backend_config", "mhlo.backend_config")
_KEPT_TAILS = 1 << 16
_KEPT_LENGTH = 1 << 14


@dataclass(slots=True)
class Tail:
    """One tail in plain data, its names replaced by references."""

    attrs: dict[str, str]
    """Properties and attributes, sorted by name."""
    types: str = ""
    """The operation's type as printed, ``(…) -> …``; empty where a region opens first."""
    opens: bool = False
    successors: list[int] = field(default_factory=list)
    frontend: dict[str, str] = field(default_factory=dict)
    callee: str | None = None
    kernel: str | None = None
    pure_call: bool = False
    changed: bool = False
    """Whether a rule set something aside, so that the canonical text isn't the printed one."""
    rules: list[tuple[str, int]] = field(default_factory=list)
    """Rules of the ledger and how often this tail uses each."""
    resolved: str | None = None
    """The canonical text with the names it got at level exact."""

    def text(self) -> str:
        """The canonical text, references not yet resolved."""
        parts = [] if self.callee is None else [f" @{reference('func', self.callee)}"]
        if self.successors:
            parts.append(" [" + ", ".join(f"^bb{index}" for index in self.successors) + "]")
        parts.extend(_braced(word, attrs) for word, attrs in _named(self.attrs, self.frontend))
        parts.append(self.types and f" : {self.types}")
        return "".join(parts) + (" ({" if self.opens else "")


class Tails:
    """Reads the tails of one module, each distinct one once.

    ``kernel_of(body, label, loc)`` turns the encoded body of a kernel into its token.
    """

    def __init__(
        self,
        session: Session,
        symbols: Mapping[str, tuple[str, str]],
        kernel_of: Callable[[bytes, str, int], str] | None = None,
    ) -> None:
        self._session = session
        self._symbols = symbols
        self._kernel_of = kernel_of
        self._known: dict[tuple[str, str], Tail] = {}
        self._loc = -1
        self.attributes = AttributeReader(self._unknown, symbols)

    def of(self, name: str, text: str, loc: int) -> Tail:
        """The tail ``text`` of an operation; ``loc`` is where it is met."""
        key = (name, text)
        found = self._known.get(key)
        if found is None:
            self._loc = loc
            found = self._read(name, text)
            if len(text) < _KEPT_LENGTH or found.kernel is not None:
                if len(self._known) >= _KEPT_TAILS:
                    self._known.clear()
                self._known[key] = found
        return found

    def _unknown(self, construct: str, reason: str) -> None:
        self._session.unknown(construct, reason, self._loc)

    def _read(self, name: str, text: str) -> Tail:
        opens = text.endswith(" ({")
        at = 0
        end = len(text) - 3 if opens else len(text)
        successors: list[int] = []
        raw: dict[str, str] = {}
        if text.startswith("[", at):
            after = closing(text, at)
            successors = [int(block.strip()[3:]) for block in split(text[at + 1 : after - 1])]
            at = after
        for opener in (" <{", " {"):
            if text.startswith(opener, at):
                after = closing(text, at + 1)
                inner = entries(text[at + 1 : after])
                if not isinstance(inner, dict) or not raw.keys().isdisjoint(inner):
                    break
                raw.update(inner)
                at = after
        types = text[at + 3 : end] if text.startswith(" : ", at) else text[at:end]
        if types and not text.startswith(" : ", at):
            self._unknown(name, "its printed form can't be read")
        self.attributes.check_types(types)
        tail = Tail({}, types, opens, successors)
        self._attributes(name, raw, tail)
        return tail

    def _attributes(self, name: str, raw: dict[str, str], tail: Tail) -> None:
        frontend = entries(raw.get(FRONTEND, ""))
        read = self.attributes.text
        if isinstance(frontend, dict):
            raw = {key: value for key, value in raw.items() if key != FRONTEND}
            tail.frontend = {key: read(value) for key, value in frontend.items()}
        attrs = {key: read(raw[key]) for key in sorted(raw)}
        tail.attrs = attrs
        if name == "func.call" and attrs.get("callee", "").startswith("@\0func\0"):
            tail.callee = unquoted(raw["callee"][1:])
            del attrs["callee"]
        elif name == CUSTOM_CALL:
            self._custom_call(raw, tail)
        elif name in TRACES and attrs.pop("message", None) is not None:
            tail.rules.append(("kernel-scope", 1))  # the user's name scope, for the profiler
        elif name in TRANSFERS and attrs.get("is_host_transfer", "false") != "false":
            self._unknown(name, "the host's side of the transfer is a callback outside the module")
        unchanged = tail.callee is None and not tail.frontend and attrs == raw
        tail.changed = not unchanged or name in ALWAYS

    def _custom_call(self, raw: dict[str, str], tail: Tail) -> None:
        target = unquoted(raw.get("call_target_name", '""'))
        config = None
        text = raw.get("backend_config", "")
        if text.startswith('"') and closing(text, 0) == len(text):
            config = custom_calls.read_config(unquoted(text), "\0body\0")
        op = Op(CUSTOM_CALL, [], [], tail.attrs, self._loc)
        if config is not None and (config.body is not None or target == KERNEL_TARGET):
            # Only of a kernel's config is it known that the order of its keys means nothing.
            label = ""
            if tail.attrs.pop("kernel_name", None) is not None:
                label = unquoted(raw["kernel_name"])
                tail.rules.append(("kernel-name", 1))
            tail.rules.append(("json-key-order", int(config.reordered)))
            op.kernel = self._kernel(tail, config, label)
        tail.kernel = op.kernel
        tail.pure_call = custom_calls.is_pure(op, target)
        configs = {name: raw[name] for name in _CONFIGS if name in raw}
        reason = custom_calls.unknown_reason(op, target, configs)
        if reason is not None:
            self._unknown(f"custom call {target}", reason)

    def _kernel(self, tail: Tail, config: custom_calls.Config, label: str) -> str | None:
        text = config.text
        kernel = None
        if config.body is not None and self._kernel_of is not None:
            token = self._kernel_of(config.body, label, self._loc)
            kernel = token[: len("kernel:") + 12]
            text = text.replace("\\u0000body\\u0000", token)
            tail.rules.append(("kernel-encoding", 1))
            tail.rules.append(("kernel-location", int(config.has_debug_locations)))
            tail.rules.append(("collective-id", int(config.collective_id)))
        tail.attrs["backend_config"] = "json " + text
        tail.attrs = dict(sorted(tail.attrs.items()))
        return kernel


def _named(attrs: dict[str, str], frontend: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    return [(w, found) for w, found in (("", attrs), (" frontend", frontend)) if found]


def _braced(word: str, attrs: dict[str, str]) -> str:
    return f"{word} {{" + ", ".join(entry_text(k, v) for k, v in attrs.items()) + "}"
