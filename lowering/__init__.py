"""Lower for a TPU target on a CPU host, normalise, store and compare programs.

Names are imported when first used, so that importing this package doesn't import jax.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case, case
    from .errors import InputError
    from .ledger import RULES
    from .load import load_case
    from .lower import lower
    from .program import LEVELS, Form, Level, Location, Program, Section, Stamp, Unknown
    from .specs import parse_spec
    from .targets import DEFAULT_TARGET, parse_target

_HOMES = {
    "case": ("Case", "case"),
    "errors": ("InputError",),
    "ledger": ("RULES",),
    "load": ("load_case",),
    "lower": ("lower",),
    "program": ("LEVELS", "Form", "Level", "Location", "Program", "Section", "Stamp", "Unknown"),
    "specs": ("parse_spec",),
    "targets": ("DEFAULT_TARGET", "parse_target"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DEFAULT_TARGET",
    "LEVELS",
    "RULES",
    "Case",
    "Form",
    "InputError",
    "Level",
    "Location",
    "Program",
    "Section",
    "Stamp",
    "Unknown",
    "case",
    "load_case",
    "lower",
    "parse_spec",
    "parse_target",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``lower`` and ``case`` the functions when the modules of those names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
