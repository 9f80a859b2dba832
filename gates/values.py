"""Values of a TOML file, each checked: an error names the key, what is there and what is wanted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..lowering.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Nothing but ``known`` keys; the error names the key, and one that is close."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"{where}: unknown key {key!r}; {hint}")


def check_defined(name: str, names: Mapping[str, Any], where: str) -> None:
    """``name`` is one of ``names``; the error names one that is close."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
        raise InputError(f"{where} {name!r} isn't defined; {hint}")


def table(value: Any, where: str) -> dict[str, Any]:
    """A TOML table."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: {value!r}; wanted a table")
    return value


def text(value: Any, where: str) -> str | None:
    """A string, or None where there is none."""
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: {value!r}; wanted a string")
    return value


def name(value: Any, where: str) -> str:
    """A name that can stand in reports and in file names."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(f"{where}: {value!r}; wanted letters, digits, '_', '-' and '.'")
    return value


def names(value: Any, where: str, strict: bool = True) -> tuple[str, ...]:
    """A list of strings; unless ``strict`` is off, one string alone will do, and none won't."""
    values = [value] if isinstance(value, str) and strict else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        kind = "a string or a list of strings" if strict else "a list of strings"
        raise InputError(f"{where}: {value!r}; wanted {kind}")
    if strict and not values:
        raise InputError(f"{where}: the list is empty")
    return tuple(values)


def counts(value: Any, where: str) -> dict[str, int]:
    """A table of numbers."""
    found = table(value, where)
    for name, count in found.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InputError(
                f"{where}.{name}: {count!r}; wanted a number (write names with dots in quotes)"
            )
    return found


def is_count(value: Any) -> bool:
    """Whether it is a number of things, which true isn't."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
