"""Shape specs: ``bf16[8,128]`` to a ``jax.ShapeDtypeStruct``."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from .errors import InputError

_SPEC = re.compile(r"\s*(?P<dtype>\w+)\s*\[(?P<shape>[\s\d,]*)\]\s*")
_DIGITS = 18
"""Of a dimension, which must be below 2**63."""
_SHORT = {
    "pred": "bool",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "bf16": "bfloat16",
    **{f"{letter}{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64) for letter in "is"},
    **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    "c64": "complex64",
    "c128": "complex128",
}


def parse_spec(text: str) -> Any:
    """``DTYPE[DIM,…]``, as in ``bf16[8,128]``, ``i32[]`` or ``float8_e4m3fn[16]``.

    Raises:
        InputError: the text has another form, the dtype isn't known, or needs 64-bit mode.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise InputError(f"argument spec {text!r}: wanted DTYPE[DIM,...], as in 'bf16[8,128]'")
    dtype = _dtype(match["dtype"], text)
    parts = [part.strip() for part in match["shape"].split(",")]
    if parts == [""]:
        parts = []
    if not all(part.isdigit() for part in parts):
        raise InputError(f"argument spec {text!r}: dimensions must be numbers, as in '[8,128]'")
    if any(len(part.lstrip("0")) > _DIGITS for part in parts):
        raise InputError(f"argument spec {text!r}: a dimension has more than {_DIGITS} digits")
    struct: Any = jax.ShapeDtypeStruct
    return struct(tuple(int(part) for part in parts), dtype)


def _dtype(name: str, text: str) -> Any:
    full = _SHORT.get(name, name.replace("f8_", "float8_") if name.startswith("f8_") else name)
    try:
        dtype = jax.numpy.dtype(full)
        if not jax.numpy.issubdtype(dtype, np.number) and dtype != np.bool_:
            raise TypeError(full)
    except TypeError:
        raise InputError(
            f"argument spec {text!r}: no dtype {name!r}; known: f32, bf16, f16, f64, i8…i64, "
            "u8…u64, bool, c64, and jax's own names"
        ) from None
    if np.dtype(dtype) != jax.dtypes.canonicalize_dtype(dtype):
        raise InputError(f"argument spec {text!r}: {full} needs jax's 64-bit mode (JAX_ENABLE_X64)")
    return dtype
