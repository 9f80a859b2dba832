"""jax's own functions that tell a program where it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

QUERIES = (
    "default_backend",
    "devices",
    "local_devices",
    "device_count",
    "local_device_count",
    "process_count",
    "process_index",
    "process_indices",
)
JAX_ROOT = str(Path(jax.__file__).resolve().parent)

_ORIGINALS: dict[str, Callable[..., Any]] = {
    name: getattr(jax, name) for name in QUERIES if hasattr(jax, name)
}


def originals() -> dict[str, Callable[..., Any]]:
    """The functions by name, as jax had them when this module was first imported."""
    return dict(_ORIGINALS)


# Where Pallas asks what chip it compiles for; jax moved it between versions.
_CHIP_MODULES = ("jax._src.tpu_info", "jax._src.pallas.mosaic.tpu_info")
_CHIP_QUERIES = ("get_device_kind", "get_num_device_cores")


def chip_queries() -> tuple[tuple[ModuleType, str], ...]:
    """The functions that Pallas answers questions about the chip with, as (module, name)."""
    found = []
    for name in _CHIP_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for query in _CHIP_QUERIES:
            # A module that only hands on another's function answers nothing itself.
            if getattr(getattr(module, query, None), "__module__", None) == name:
                found.append((module, query))
    return tuple(found)


def forget_chip() -> None:
    """Drops what jax remembers of earlier answers about the chip."""
    for module, _ in chip_queries():
        clear = getattr(getattr(module, "get_tpu_info", None), "cache_clear", None)
        if clear is not None:
            clear()


def is_internal(module_name: str) -> bool:
    """Whether a module is jax's inside, which must go on asking about the host."""
    return module_name.startswith(("jax._src", "jaxlib"))
