"""How arrays lie next to each other in one, so that a collective takes all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Form = tuple[str, int, Shape]
"""What operands have in common that `layout_of` joins in one way."""


@dataclass(frozen=True)
class Layout:
    """A view of each operand of a collective, and the axis along which the views are joined."""

    views: tuple[Shape, ...]
    """What each operand is reshaped to; all equal but along ``axis``."""
    axis: int
    """Of the views."""
    split: int
    """The axis of the result along which it comes apart again."""
    dimension: int
    """The views' axis that the collective works on."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much of ``axis`` belongs to each operand."""
        return tuple(v[self.axis] for v in self.views)


def layout_of(shapes: Sequence[Shape], dimension: int, tiled: bool, gather: bool) -> Layout | None:
    """How to join arrays of these shapes for one all_gather or psum_scatter; None if none is known.

    Args:
      shapes: of the operands.
      dimension: that is gathered, or scattered.
      tiled: whether the result has as many dimensions as an operand.
      gather: whether it is an all_gather.
    """
    new_axis = gather and not tiled
    ranks = {len(s) for s in shapes}
    if len(ranks) == 1:
        for axis in reversed(range(len(shapes[0]))):
            alike = len({s[:axis] + s[axis + 1 :] for s in shapes}) == 1
            if alike and (new_axis or axis != dimension):
                return Layout(
                    tuple(shapes), axis, _moved(axis, dimension, tiled, gather), dimension
                )
    if set(map(len, shapes)) == {1} and len(set(shapes)) == 1:
        # Rows of their own: the long dimension stays the minor one.
        views = tuple((1, *s) for s in shapes)
        return Layout(views, 0, _moved(0, 1, tiled, gather), 1)
    kept = dimension + (not new_axis)
    if min(ranks) < kept or len({s[:kept] for s in shapes}) > 1:
        return None
    views = tuple((*s[:kept], math.prod(s[kept:])) for s in shapes)
    return Layout(views, kept, _moved(kept, dimension, tiled, gather), dimension)


def forms(shape: Shape, dimension: int, tiled: bool, gather: bool) -> frozenset[Form]:
    """The ways in which `layout_of` may join an operand of this shape with others.

    It knows a layout of several operands exactly where these have one in common.
    """
    new_axis = gather and not tiled
    found: set[Form] = {
        ("axis", axis, shape[:axis] + shape[axis + 1 :])
        for axis in range(len(shape))
        if new_axis or axis != dimension
    }
    if len(shape) == 1:
        found.add(("rows", 0, shape))
    kept = dimension + (not new_axis)
    if len(shape) >= kept:
        found.add(("flat", kept, shape[:kept]))
    return frozenset(found)


def _moved(axis: int, dimension: int, tiled: bool, gather: bool) -> int:
    """Where an operand's axis is in the result."""
    if tiled:
        return axis
    return axis + (axis >= dimension) if gather else axis - (axis > dimension)
