"""What the child that verifies needs of its environment; told without loading jax."""

from __future__ import annotations

from collections.abc import Mapping

HOST_DEVICES = 8
"""How many devices of this host a site may spread over, unless the user sets another number."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that a child needs beside those it has."""
    flags = environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        return {}
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={HOST_DEVICES}".strip()}
