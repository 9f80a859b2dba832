"""Weak types: those of values that come from Python scalars and give way in type promotion."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.lax import lax as lax_internal


def weak(x: jax.Array) -> jax.Array:
    """``x``, typed as if it came from a Python scalar. Lowers to nothing."""
    convert: Any = lax_internal._convert_element_type
    return convert(x, x.dtype, weak_type=True)
