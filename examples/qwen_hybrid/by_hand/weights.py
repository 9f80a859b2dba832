"""The experts' input weights rounded and gathered in one piece."""

from __future__ import annotations

import jax
from jax import lax

from ..ops import fake_quantise


def gathered_wi(wi: jax.Array) -> jax.Array:
    """As `ops.gathered_wi`: columns have scales of their own, so the halves need no splitting."""
    whole = lax.optimization_barrier(fake_quantise(wi))
    return lax.all_gather(whole, "fsdp", axis=1, tiled=True)
