"""What triangular_inverse makes of a whole model's rounding errors, held against float64.

    python benchmarks/model_rounding.py
    python benchmarks/model_rounding.py --draws 12

The gradients of a language model of two gated delta nets (examples/gated_delta_net.py, float32 on
this CPU), of fresh parameters and a batch in each draw: by triangular solves as written, with the
gradient optimized, with the optimized loss differentiated, and with an inverse and a derivative of
it that are rounded once from float64. Each is compared with the same in float64.

Printed is how many times the solves' error each way's is: the geometric mean over draws and leaves,
the least and greatest of a draw's mean, and of one leaf in one draw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import relower

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gated_delta_net as gdn

CONFIG = replace(gdn.TINY, batch=2)
NAME = "triangular_inverse"
Gradients = Callable[[Any, Any], Any]


class InFloat64:
    """`jax.numpy` to a module that then computes in float64 what it would in float32."""

    float32 = jnp.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


def gradients(params: Any, batch: Any, config: gdn.Config = CONFIG) -> Any:
    return jax.grad(gdn.loss_fn)(params, batch, config)


def optimized_inside(params: Any, batch: Any) -> Any:
    loss = relower.optimize(partial(gdn.loss_fn, config=CONFIG), passes=[NAME])
    return jax.grad(loss)(params, batch)


def _inverted(lower: Any) -> np.ndarray:
    wide = np.tril(np.asarray(lower, np.float64), -1)
    return np.linalg.inv(np.eye(wide.shape[-1]) + wide)


def _pulled_back(lower: Any, cotangent: Any) -> np.ndarray:
    x = np.swapaxes(_inverted(lower), -1, -2)
    return -np.tril(x @ np.asarray(cotangent, np.float64) @ x, -1).astype(np.float32)


@jax.custom_vjp
def rounded_once(lower: jax.Array) -> jax.Array:
    """The inverse of ``I + lower``, computed in float64 on the host."""
    like = jax.ShapeDtypeStruct(lower.shape, lower.dtype)
    invert = lambda a: _inverted(a).astype(np.float32)
    return jax.pure_callback(invert, like, lower, vmap_method="expand_dims")


def _backward(lower: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    like = jax.ShapeDtypeStruct(lower.shape, lower.dtype)
    return (jax.pure_callback(_pulled_back, like, lower, cotangent, vmap_method="expand_dims"),)


rounded_once.defvjp(lambda lower: (rounded_once(lower), lower), _backward)


def with_rounded_once(params: Any, batch: Any) -> Any:
    with mock.patch.object(gdn, "triangular_inverse", rounded_once):
        return gradients(params, batch)


WAYS: dict[str, Gradients] = {
    "optimize(grad)": relower.optimize(gradients, passes=[NAME]),
    "grad(optimize)": optimized_inside,
    "rounded once": with_rounded_once,
}


def in_float64(made: list[Any]) -> list[list[np.ndarray]]:
    """The leaves of each draw's gradients."""
    run = jax.jit(partial(gradients, config=replace(CONFIG, dtype=jnp.float64)))
    with mock.patch.object(gdn, "jnp", InFloat64()), jax.enable_x64(True):
        widened = [(jax.tree.map(lambda a: np.asarray(a, np.float64), p), b) for p, b in made]
        found = [jax.tree.leaves(run(*args)) for args in widened]
    return [[np.asarray(a) for a in leaves] for leaves in found]


def errors(fn: Gradients, made: list[Any], exact: list[list[np.ndarray]]) -> np.ndarray:
    """Of each draw and leaf, as a part of its size."""
    run, found = jax.jit(fn), []
    for args, wanted in zip(made, exact, strict=True):
        leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(run(*args))]
        found.append([np.linalg.norm(a - w) / np.linalg.norm(w)
                      for a, w in zip(leaves, wanted, strict=True)])  # fmt: skip
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=32)
    options = parser.parse_args()
    init = jax.jit(lambda key: (gdn.init_params(key, CONFIG), gdn.synthetic_batch(key, CONFIG)))
    made = [init(jax.random.key(seed)) for seed in range(options.draws)]
    exact = in_float64(made)
    solved = errors(gradients, made, exact)
    print(f"{'':16} {'all':>6} {'a draw':>12} {'a leaf in a draw':>18}   {options.draws} draws")
    for name, fn in WAYS.items():
        logs = np.log(errors(fn, made, exact) / solved)
        mean, draws = np.exp(logs.mean()), np.exp(logs.mean(1))
        spread = f"{draws.min():.2f}–{draws.max():.2f}"
        leaves = f"{np.exp(logs.min()):.2f}–{np.exp(logs.max()):.2f}"
        print(f"{name:16} {mean:6.3f} {spread:>12} {leaves:>18}", flush=True)


if __name__ == "__main__":
    main()
