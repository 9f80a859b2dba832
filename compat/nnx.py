"""Flax NNX: a function that changes the objects it is given, as a function of their state.

An NNX module is a pytree, but one whose variables a function may assign to. Whoever flattens the
arguments and calls the function on copies, as any trace does, loses what it assigned: a train step
would train nothing and say nothing. Here the objects are split into a structure and their state,
the state is an argument and a result like any other, and is put back where the caller keeps it.

flax is never imported: where nobody has, no argument is an object of it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from . import tracing

_JITS = "flax.nnx.transforms.compilation"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Call:
    """All of a call but its arrays, so that equal calls have arguments of equal structure."""

    structure: Any
    """Of ``(args, kwargs)``, each object a leaf."""
    is_object: tuple[bool, ...]
    """By leaf."""
    graph: Any
    """The structure of the objects, shared parts included."""

    def arguments(self, state: Any, others: Sequence[Any]) -> tuple[Any, Any, tuple[Any, ...]]:
        """Positional and keyword arguments made anew, and the objects among them."""
        objects = _nnx().merge(self.graph, state)
        of_kind = {True: iter(objects), False: iter(others)}
        leaves = [next(of_kind[kind]) for kind in self.is_object]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return args, kwargs, objects


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_object(value: Any) -> bool:
    nnx = _nnx()
    node = getattr(nnx, "Pytree", nnx.Object)  # flax before 0.11 has the second only
    return isinstance(value, node | nnx.Variable)


def _is_leaf(value: Any) -> bool:
    """Objects, and states: variables in a state are data, as whoever split it has decided."""
    return _is_object(value) or isinstance(value, _nnx().State)


def holds_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether some argument is or contains an NNX object."""
    if not hasattr(_nnx(), "Object"):
        return False  # not imported, or not yet whole
    return any(map(_is_object, jax.tree.leaves((args, kwargs), is_leaf=_is_leaf)))


def split(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of `on_state`'s function for a call, and the objects to `update` after it."""
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_leaf)
    is_object = tuple(map(_is_object, leaves))
    objects = tuple(leaf for leaf, yes in zip(leaves, is_object, strict=True) if yes)
    others = [leaf for leaf, yes in zip(leaves, is_object, strict=True) if not yes]
    graph, state = _nnx().split(objects)
    return (_Call(structure, is_object, graph), state, others), objects


def on_state(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` on what `split` makes of its arguments: its result, and its objects' state then."""
    fn = fn.fun if is_jitted(fn) else fn  # type: ignore[attr-defined]

    def run(call: _Call, state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        args, kwargs, objects = call.arguments(state, others)
        out = fn(*args, **kwargs)
        return out, _nnx().state(objects)

    run.__name__ = tracing.name_of(fn)
    return run


def update(objects: Any, state: Any) -> None:
    """Assigns to the caller's objects what a call made of their state."""
    _nnx().update(objects, state)


def map_arrays(
    change: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Arguments with ``change`` done to every array; what objects share, they share afterwards."""
    (call, state, others), _ = split(args, kwargs)
    made, named, _ = call.arguments(*jax.tree.map(change, (state, others)))
    return made, named


def is_jitted(fn: object) -> bool:
    """Whether ``fn`` is what `nnx.jit` returns."""
    return type(fn).__module__ == _JITS and hasattr(fn, "jitted_fn")


def rejit(jitted: Any, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """``nnx.jit(transform(f), **same options)`` for a ``jitted`` made by ``nnx.jit(f, **options)``.

    Raises:
      TypeError: this flax, or this kind of `nnx.jit`, is not as known here.
    """
    inner: Any = getattr(jitted.jitted_fn, "_fun", None)
    fields = {f.name for f in dataclasses.fields(inner)} if dataclasses.is_dataclass(inner) else ()
    if not {"f", "ctxtag"} <= set(fields):
        raise TypeError(
            f"optimize: found a {type(jitted).__name__} of nnx.jit, which can't be taken apart; "
            "wanted the jit outside: nnx.jit(relower.optimize(f), …)"
        )
    made = copy.copy(jitted)
    made.fun = transform(jitted.fun)
    around = dataclasses.replace(inner, f=made.fun, ctxtag=made)
    made.jitted_fn = tracing.rejit(jitted.jitted_fn, lambda _: around)
    return made


def unwrapped(lowered: Any) -> Any:
    """Jax's own ``Lowered`` of one that `nnx.jit` made; any other as it is."""
    return lowered.lowered if type(lowered).__module__ == _JITS else lowered
