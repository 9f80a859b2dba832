"""What a function returns, where some of its arguments are no arrays.

An Equinox module has its activation function among its leaves, and a train step returns the module.
Such a leaf is no part of the program: it is closed over, and handed on where it is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core


@dataclass(frozen=True)
class Outputs:
    """What a traced function returns: arrays, and argument leaves that are none, as they were."""

    tree: Any
    """The structure of the whole."""
    passed_on: tuple[tuple[int, int], ...] = ()
    """Leaves that are no arrays, each with the leaf of ``(args, kwargs)`` that it is."""

    @property
    def arrays(self) -> Any:
        """The structure of what was traced: None where an argument is passed on."""
        if not self.passed_on:
            return self.tree
        kept = dict(self.passed_on)
        leaves = [None if i in kept else i for i in range(self.tree.num_leaves)]
        return jax.tree.structure(jax.tree.unflatten(self.tree, leaves))

    def filled(self, arrays: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """The output of a call, of its arrays and the leaves of its arguments."""
        if not self.passed_on:
            return jax.tree.unflatten(self.tree, arrays)
        kept, rest = dict(self.passed_on), iter(arrays)
        leaves = [
            arguments[kept[i]] if i in kept else next(rest) for i in range(self.tree.num_leaves)
        ]
        return jax.tree.unflatten(self.tree, leaves)


def passed_on(
    fn: Callable[..., Any], outs: Sequence[Any], out_tree: Any, arguments: Sequence[Any]
) -> tuple[tuple[int, int], ...]:
    """Outputs that are no arrays, with the argument leaf that each is.

    Raises:
      TypeError: one is neither.
    """
    slots = {id(leaf): slot for slot, leaf in enumerate(arguments)}
    found: list[tuple[int, int]] = []
    for i, out in enumerate(outs):
        try:
            core.typeof(out)
        except TypeError:
            if id(out) in slots:
                found.append((i, slots[id(out)]))
                continue
            path, _ = jax.tree_util.tree_flatten_with_path(
                jax.tree.unflatten(out_tree, list(range(len(outs))))
            )[0][i]
            name = getattr(fn, "__name__", type(fn).__name__)
            raise TypeError(
                f"{name} returned {out!r} of type {type(out).__name__} at "
                f"result{jax.tree_util.keystr(path)}; wanted an array or a number, or a leaf "
                "of the arguments as it is"
            ) from None
    return tuple(found)


def on_arrays(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], list[Any]] | None:
    """``fn`` as a function of the arrays and numbers among its arguments, and these.

    It returns what ``fn`` does, with None for what is passed on. None where all arguments are such.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(leaves) if _is_traceable(leaf)]
    if len(slots) == len(leaves):
        return None

    def run(*arrays: Any) -> Any:
        filled = list(leaves)
        for slot, value in zip(slots, arrays, strict=True):
            filled[slot] = value
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        outs, out_tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
        outputs = Outputs(out_tree, passed_on(fn, outs, out_tree, leaves))
        kept = dict(outputs.passed_on)
        return jax.tree.unflatten(outputs.arrays, [o for i, o in enumerate(outs) if i not in kept])

    run.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return run, [leaves[slot] for slot in slots]


def _is_traceable(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    try:
        core.shaped_abstractify(leaf)
    except TypeError:
        return False
    return True
