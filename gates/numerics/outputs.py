"""What the gate reads of a step's output: scalars by name, and every leaf of a tree."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...lowering.errors import InputError
from ...lowering.numerics import Numerics, Where

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Reading:
    """What one step gave."""

    scalars: Mapping[str, Array]
    grads: Mapping[str, Array]
    """Leaves by path below the gradients."""
    params: Mapping[str, Array]


def read(out: Any, numerics: Numerics, computed_norm: bool = True) -> Reading:
    """The scalars and leaves of a step's output, as arrays of the host.

    Raises:
        InputError: a path or a function finds nothing, no scalar, or something that is no array.
    """
    grads = _leaves(_found(out, numerics.grads, "grads"), "grads")
    params = {} if numerics.params is None else _leaves(
        _found(out, numerics.params, "params"), "params"
    )  # fmt: skip
    scalars: dict[str, Array] = {}
    for name, where in numerics.metrics.items():
        if where is None:
            continue
        value = _leaves(_found(out, where, f"metrics {name!r}"), f"metrics {name!r}")
        (leaf,) = value.values() if len(value) == 1 else (None,)
        if leaf is None or leaf.shape != ():
            shapes = ", ".join(str(v.shape) for v in value.values()) or "nothing"
            raise InputError(f"numerics: metrics {name!r} is {shapes}; wanted one scalar")
        scalars[name] = leaf
    if numerics.metrics["grad_norm"] is None and computed_norm:
        squares = [np.sum(np.square(wide(g)), dtype=np.float64) for g in grads.values()]
        scalars["grad_norm"] = np.asarray(np.sqrt(sum(squares)), np.float32)
    return Reading(scalars, grads, params)


def wide(x: Array) -> Array:
    """Floats in float64, in which those of every other dtype are exact."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _found(out: Any, where: Where, what: str) -> Any:
    if callable(where):
        return _called(out, where, what)
    leaves = jax.tree_util.tree_flatten_with_path(out)[0]
    paths = [(jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in leaves]
    inside = {
        path[len(where) :].lstrip("/"): leaf
        for path, leaf in paths
        if path == where or not where or path.startswith(f"{where}/")
    }
    if not inside:
        heads = {"/".join(path.split("/")[: n + 1]) for path, _ in paths for n in range(3)}
        near = difflib.get_close_matches(where, heads, n=3) or sorted(heads)[:8]
        raise InputError(
            f"numerics: {what}: the output has nothing at {where!r}; it has {', '.join(near)}"
        )
    return inside


def _called(out: Any, where: Callable[[Any], Any], what: str) -> Any:
    from ...lowering.load import describe

    try:
        return where(out)
    except Exception as error:
        raise InputError(f"numerics: {what}: its function fails: {describe(error)}") from error


def _leaves(tree: Any, what: str) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        try:
            found[name] = np.asarray(leaf)
        except Exception as error:
            raise InputError(f"numerics: {what}: {name or 'it'} is a {type(leaf).__name__}; "
                             "wanted arrays") from error  # fmt: skip
    if not found:
        raise InputError(f"numerics: {what} holds no arrays: nothing would be compared")
    return found
