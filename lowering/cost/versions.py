"""Versions that a figure depends on, without importing any of them."""

from __future__ import annotations

import importlib.metadata


def versions() -> dict[str, str]:
    """Of jax, jaxlib and libtpu; ``none`` where one isn't installed."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
