"""How XLA's own expansion of top_k reads its operand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_WIDENS = jax.__version_info__ >= (0, 12)
"""jaxlib 0.12.0 does, 0.10.2 does not; none between was looked at."""
_MOST = 1 << 16


def reads_widened(dtype: Any, n: int) -> bool:
    """Whether rows of ``n`` elements are widened to float32 and cut off to their upper 16 bits.

    It is how a value and its place share one word to be sorted by. Of a bfloat16 it changes
    nothing, unless the compiler has dropped the rounding of what was computed in float32: then
    top_k cuts off where it should round, on CPUs and on TPUs alike.
    """
    return _WIDENS and dtype == jnp.bfloat16 and n < _MOST
