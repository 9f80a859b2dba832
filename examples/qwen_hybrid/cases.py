"""The trainer's two functions as cases for relower.

Each case is a function that takes nothing: `relower explain examples/qwen_hybrid/cases.py:tiny`.
Those named tiny… run on a CPU in seconds, real… have layers of a frontier model's size; both are
lowered for a mesh of eight devices.

    tiny, real                 forward and backward over the micro-batches: loss and gradients
    tiny_update, real_update   clip and AdamW
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import relower

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Wherever this is loaded from.

from qwen_hybrid import trainer
from qwen_hybrid.config import MESH, REAL, TINY, Config


def abstract_inputs(config: Config, mesh: Any) -> tuple[Any, Any]:
    """The types of a state and a batch, and where they lie; nothing is allocated."""
    key = jax.random.key(0)
    state, batch = jax.eval_shape(
        lambda: (trainer.init_state(key, config), trainer.synthetic_batch(key, config))
    )

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, state, trainer.shardings(state, mesh)), batch


def forward_backward(config: Config, make: Callable[..., Any] | None = None) -> Any:
    """Forward and backward as a `relower.case`."""

    def build(mesh: Any) -> tuple[Any, Any]:
        state, batch = abstract_inputs(config, mesh)
        made = (make or trainer.make_forward_backward)(config, mesh)
        return jax.jit(made), (state.params, batch)

    return relower.case(build, mesh=MESH)


def update(config: Config) -> Any:
    """The update as a `relower.case`."""

    def build(mesh: Any) -> tuple[Any, Any]:
        state, _ = abstract_inputs(config, mesh)
        return jax.jit(trainer.make_update(config), donate_argnums=0), (state, state.params)

    return relower.case(build, mesh=MESH)


def tiny() -> Any:
    return forward_backward(TINY)


def real() -> Any:
    return forward_backward(REAL)


def tiny_update() -> Any:
    return update(TINY)


def real_update() -> Any:
    return update(REAL)
