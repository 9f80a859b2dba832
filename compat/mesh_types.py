"""The mesh in a type: which mesh a value's sharding was stated on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType


def differs_only_in_mesh(a: Any, b: Any) -> bool:
    """Whether two types are equal but that one, split over nothing, names no mesh.

    Some primitives hand on the type of an argument as it is, which names none, where others name
    the mesh in scope. Along Auto and Manual axes a type says nothing of how its value is split, so
    nothing is lost between the two; jax's own check of a jaxpr takes them for one. A constant
    that a shard_map closes over is an operand and an input of its body that name none.
    """
    left, right = getattr(a, "sharding", None), getattr(b, "sharding", None)
    if left is None or right is None or type(a) is not type(b):
        return False
    if left.mesh.empty == right.mesh.empty or left.spec != right.spec:
        return False
    named = right if left.mesh.empty else left
    automatic = all(kind != AxisType.Explicit for kind in named.mesh.axis_types)
    whole = all(part is None for part in named.spec)
    return automatic and whole and bool(a.update(sharding=right) == b)


def told_apart(a: Any, b: Any) -> tuple[str, str]:
    """Short texts of two types, with what differs where the short texts are equal."""
    left, right = a.str_short(), b.str_short()
    for what, of in _TRAITS.items():
        if left != right:
            break
        if of(a) != of(b):
            return f"{left} with {what} {of(a)}", f"{right} with {what} {of(b)}"
    return left, right


_TRAITS: dict[str, Callable[[Any], Any]] = {
    "weak_type": lambda aval: getattr(aval, "weak_type", False),
    "mesh": lambda aval: getattr(getattr(aval, "sharding", None), "mesh", None),
    "sharding": lambda aval: getattr(aval, "sharding", None),
    "memory space": lambda aval: getattr(aval, "memory_space", None),
}


def by_hand(mesh: Any) -> tuple[Any, tuple[str, ...]]:
    """The mesh in whose context something was traced, before axes of it were split by hand.

    Returns:
      None for an empty mesh, or one whose manual axes are Auto, and the names of these.
    """
    if mesh.empty:
        return None, ()
    manual = mesh.manual_axes
    return mesh.update_axis_types(dict.fromkeys(manual, AxisType.Auto)), tuple(manual)


def is_explicit(mesh: Any) -> bool:
    """Whether an axis of a mesh is in the types of arrays."""
    return AxisType.Explicit in mesh.axis_types


def a_mesh_is_set() -> bool:
    """Whether a mesh is set around the caller, as by `jax.set_mesh`."""
    return not jax.sharding.get_abstract_mesh().empty
