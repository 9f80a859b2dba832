"""What jax's staging objects hold beside their public interface."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def hoisted_constants(lowered: Any) -> tuple[str, ...]:
    """Digests of the constants that a lowered program takes as leading arguments, in order.

    With ``jax_use_simplified_jaxpr_constants`` jax leaves large constants out of the module, which
    then says nothing about their values.
    """
    found = getattr(lowered._lowering, "const_args", None) or ()
    return tuple(_digest(np.asarray(value)) for value in found)


def _digest(value: np.ndarray[Any, Any]) -> str:
    head = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()
