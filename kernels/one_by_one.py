"""Functions that `jax.vmap` maps one after another, as a kernel with a grid of its own is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap


def one_by_one(function: Callable[..., tuple[jax.Array, ...]]) -> Any:
    """``function``, of arrays and Nones; mapped by `jax.vmap`, a loop over the slices."""
    call: Any = custom_vmap(function)

    def mapped(axis_size: int, batched: Any, *operands: Any) -> Any:
        slices_of = [o for o, b in zip(operands, batched) if o is not None and b]

        def step(slices: Any) -> Any:
            rest = iter(slices)
            return call(*(next(rest) if o is not None and b else o
                          for o, b in zip(operands, batched)))  # fmt: skip

        outs = lax.map(step, slices_of)
        return outs, tuple(True for _ in outs)

    call.def_vmap(mapped)
    return call
