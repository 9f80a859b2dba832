"""What jax's staging objects hold beside their public interface."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
from jax._src import config as _config


def kernel_locations() -> AbstractContextManager[Any]:
    """A context in which kernels are lowered with their locations in the body.

    From 0.12 on jax moves them to a field beside it, as a list that Python can't read; earlier
    versions know no other place than the body.
    """
    setting = getattr(_config, "jax_mosaic_unzip_debug_locations", None)
    return nullcontext() if setting is None else cast(AbstractContextManager[Any], setting(False))


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
