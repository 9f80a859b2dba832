"""jax's own functions that tell a program where it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


def is_internal(module_name: str) -> bool:
    """Whether a module is jax's inside, which must go on asking about the host."""
    return module_name.startswith(("jax._src", "jaxlib"))
