"""Slices, pads and concatenations of an array, run again on the same array of another type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ...compat.primitives import primitive
from ...compat.tracing import rebind
from ...matchers.fact import Constant
from ...matchers.widened import Step, Widened


def moved(found: Widened, xs: Sequence[jax.Array], dtype: Any, tangents: bool) -> list[jax.Array]:
    """The leaves, of what the conversions take or of what they have made."""
    known = dict(enumerate(xs))
    for step in found.steps:
        operands = [
            _filled(step, i, 0.0 if tangents else c.value, dtype)
            if isinstance(c, Constant)
            else known[c]
            for i, c in enumerate(step.operands)
        ]
        known.update(zip(step.results, _run(step, operands), strict=True))
    return [known[number] for number, _ in found.leaves]


def _filled(step: Step, position: int, value: float, dtype: Any) -> jax.Array:
    return lax.full(step.eqn.invars[position].aval.shape, value, dtype)


def _run(step: Step, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """As jax's functions for what may have a constant beside it, which say where it varies."""
    params = step.eqn.params
    if step.eqn.primitive is primitive("pad_p"):
        return [lax.pad(*operands, params["padding_config"])]
    if step.eqn.primitive is primitive("concatenate_p"):
        return [lax.concatenate(operands, params["dimension"])]
    return rebind(step.eqn, operands)
