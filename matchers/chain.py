"""What parts of one array are, taken together, as a tree of what computes them.

Of each kind of equation that works along the axis of the parts independently there is one node for
all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..compat.jaxprs import Eqn
from .along import Axes
from .graph import Value

Node: TypeAlias = "Cut | Shared | Step | Call | Input"


@dataclass(frozen=True, eq=False)
class Cut:
    """The parts are slices of one array, side by side."""

    value: Value
    axis: int
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    """Of all parts together, along every axis."""


@dataclass(frozen=True, eq=False)
class Shared:
    """All parts have the same value."""

    value: Value


@dataclass(frozen=True, eq=False)
class Input:
    """An input of the body of the `Call` that the tree is in."""

    position: int


@dataclass(frozen=True, eq=False)
class Step:
    """One equation for each part, all of one kind."""

    eqns: tuple[Eqn, ...]
    operands: tuple[Node, ...]
    result: int
    axis: int | None
    """The axis of the results that they are parts along; None where they are equal."""
    size: int
    """Of all parts along the axis."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call for each part that has a derivative of its own."""

    eqns: tuple[Eqn, ...]
    inner: Node
    operands: tuple[Node | None, ...]
    """None where a literal is all that the call needs."""
    axes: Axes
    result: int
    axis: int
    sizes: tuple[int, ...]
