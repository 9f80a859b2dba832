"""Custom calls: their configuration in canonical form, their kernels, and whether they are pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any

from .ir import Op, reference

# Calls without an effect beyond their results, whatever their operands hold. Kernels aren't among
# them: how many run, and in what order, is part of the program.
_PURE_TARGETS = frozenset(
    {"Cholesky", "Eigh", "Qr", "TopK", "ApproxTopK", "PartialReduce", "mhlo.topk"}
)
# A decimal number this long may be the address of something in the process that traced.
_ADDRESS = re.compile(r"(?<![\w.])\d{11,}(?![\w.])|0x[0-9a-fA-F]{9,}")


class _DuplicateKey(Exception):
    pass


class _Inexact(Exception):
    pass


@dataclass(frozen=True)
class Config:
    """A backend config: canonical text, and the encoded kernel body in it, if any."""

    text: str
    reordered: bool = False
    body: bytes | None = None
    has_debug_locations: bool = False
    collective_id: bool = False


def read_config(raw: str, body_token: str) -> Config | None:
    """The canonical form of a backend config that is a JSON object; None if it isn't one.

    ``body_token`` takes the place of the kernel's body. Debug locations are left out.
    """
    if "\\u0000" in raw or "\0" in raw:
        return None  # it could pass for a reference; the text is compared as it is
    try:
        config = json.loads(raw, object_pairs_hook=_no_duplicates, parse_float=_exact)
    except (ValueError, RecursionError, _DuplicateKey, _Inexact):
        return None
    if not isinstance(config, dict):
        return None
    reordered = json.dumps(config) != json.dumps(config, sort_keys=True)
    inner = config.get("custom_call_config")
    if not isinstance(inner, dict) or not isinstance(inner.get("body"), str):
        return Config(_dump(config), reordered)
    try:
        body = base64.b64decode(inner["body"], validate=True)
    except binascii.Error:
        return Config(_dump(config), reordered)
    debug = inner.pop("debug_locations", None)
    inner["body"] = body_token
    number = inner.get("collective_id")
    collective = type(number) is int and number >= 0  # true is no id, and a negative one is odd
    if collective:
        inner["collective_id"] = reference("collective", str(inner["collective_id"]))
    return Config(_dump(config), reordered, body, debug is not None, collective)


def _exact(text: str) -> float:
    """A number that Python writes as it stands; of others the config's own text is compared."""
    value = float(text)
    if repr(value) != text:
        raise _Inexact
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKey
    return found


def _dump(config: Any) -> str:
    # ensure_ascii would escape the references' control characters; no other can be in the text,
    # for JSON allows them only as escapes and those are loaded and written back as escapes.
    text = json.dumps(config, sort_keys=True, separators=(", ", ": "))
    return re.sub(r'"\\u0000(\w+)\\u0000(-?\d+)\\u0000"', "\0\\1\0\\2\0", text)


def is_pure(op: Op, target: str) -> bool:
    """Whether the call may be moved, merged and dropped: known target, no effect declared."""
    calls_functions = op.attrs.get("called_computations", "[]") != "[]"
    declared = op.attrs.get("has_side_effect", "false") != "false"
    return target in _PURE_TARGETS and not declared and not calls_functions


def unknown_reason(op: Op, target: str, configs: dict[str, str]) -> str | None:
    """Why a call can't be compared by its text, or None where it can.

    ``configs`` holds the whole text of each backend config by the attribute's name.
    """
    if "callback" in target.lower():
        return "the callback is a pointer into the process that traced; two of them look alike"
    if target == "CustomSPMDPartitioning":
        return "how it is partitioned is a Python object of the process that traced"
    if op.kernel is None:
        for name, text in configs.items():
            found = _ADDRESS.search(text)
            if found:
                return f"its {name} holds {found.group()}, which may be an address"
    return None
