"""Shapes as HLO prints them: element type, extents, memory space."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

HBM = 0
"""The memory space of a shape that names none."""

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?P<layout>\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")


@dataclass(frozen=True)
class Shape:
    """An array's shape."""

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM
    """0 is HBM, 1 VMEM; others are smaller memories."""

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size without the padding of its layout; 0 for a token."""
        return -(-self.elements * bits_of(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits_of(dtype: str) -> int:
    """Bits of one element, by HLO's name of its type."""
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    match = _BITS.match(dtype)
    return int(match[1]) if match else 0


def read_shape(text: str) -> tuple[tuple[Shape, ...], int]:
    """The leaves of the shape at the start of ``text``, and where it ends."""
    end = _end_of_shape(text)
    plain = _COMMENT.sub("", text[:end])
    shapes = []
    for match in _ARRAY.finditer(plain):
        space = _SPACE.search(match["layout"] or "")
        dims = [d.strip().lstrip("<=") for d in match["dims"].split(",") if d.strip()]
        extents = tuple(int(d) for d in dims if d.isdecimal())
        shapes.append(Shape(match["dtype"], extents, int(space[1]) if space else HBM))
    return tuple(shapes), end


def _end_of_shape(text: str) -> int:
    """A tuple ends at its parenthesis, an array at the first space."""
    if not text.startswith("("):
        space = text.find(" ")
        return len(text) if space < 0 else space
    depth = 0
    for match in re.compile(r"[()]").finditer(text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)
