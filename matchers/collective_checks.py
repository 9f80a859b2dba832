"""What one collective is, and why two of them can't be done as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compat.jaxprs import Eqn
from ..compat.primitives import primitive
from ..compat.vma import varying
from .side_by_side import Layout, Shape, layout_of

MOST_BYTES = 8 << 20
"""The larger side of a collective that is worth the copies by which others share its way."""

PARAMS = frozenset({"all_gather_dimension", "axis_index_groups", "axis_name", "axis_size",
                    "scatter_dimension", "tiled"})  # fmt: skip
_GATHERS = ("all_gather_p", "all_gather_invariant_p")


@dataclass(frozen=True)
class Difference:
    """Why two collectives can't be one."""

    code: str
    found: str
    wanted: str


def roots() -> frozenset[Any]:
    """The primitives concerned, as objects."""
    names = (*_GATHERS, "reduce_scatter_p")
    return frozenset(p for p in map(primitive, names) if p is not None)


def is_gather(eqn: Eqn) -> bool:
    """Whether an equation is an all_gather of any kind."""
    return any(eqn.primitive is primitive(name) for name in _GATHERS)


def dimension(eqn: Eqn) -> int:
    """The dimension that is gathered or scattered."""
    return int(eqn.params["all_gather_dimension" if is_gather(eqn) else "scatter_dimension"])


def size(eqn: Eqn) -> int:
    """Bytes of the larger of operand and result."""
    wide = 2 if is_bfloat16_sum(eqn) else 1  # those travel in float32, or not at all
    return max(int(a.aval.size * a.aval.dtype.itemsize) for a in (*eqn.invars, *eqn.outvars)) * wide


def is_bfloat16_sum(eqn: Eqn) -> bool:
    """Whether an equation adds numbers in bfloat16."""
    return not is_gather(eqn) and bool(eqn.invars[0].aval.dtype == jnp.bfloat16)


def has_bits(dtype: Any) -> bool:
    """Whether elements are whole bytes that an integer of 8 to 64 bits holds."""
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(jnp.iinfo(dtype).bits >= 8)
    return jnp.issubdtype(dtype, jnp.floating) and bool(jnp.finfo(dtype).bits >= 8)


def common_layout(eqn: Eqn, shapes: Sequence[Shape]) -> Layout | None:
    """How operands of these shapes lie side by side for the collective of ``eqn``."""
    return layout_of(shapes, dimension(eqn), bool(eqn.params["tiled"]), is_gather(eqn))


Check = Callable[[Eqn, Eqn], Difference | None]


def _same(code: str, of: Callable[[Eqn], Any], say: Callable[[Any], str] = str) -> Check:
    def check(a: Eqn, b: Eqn) -> Difference | None:
        one, other = of(a), of(b)
        return None if one == other else Difference(code, say(other), say(one))

    return check


def _axes(axes: Any) -> str:
    return ", ".join(sorted(map(str, axes))) or "none"


def _dtypes(a: Eqn, b: Eqn) -> Difference | None:
    one, other = a.invars[0].aval.dtype, b.invars[0].aval.dtype
    if is_gather(a):
        if one == other or (has_bits(one) and has_bits(other)):
            return None
        wanted = "elements of whole bytes, up to 64 bits"
        return Difference("dtype", f"{one} and {other}", wanted)
    if one != other:
        return Difference("dtype", f"{one} and {other}", f"{one}, to be added")
    if one == jnp.bfloat16:
        return Difference("dtype", f"sums of {one}", "sums that no compiler takes in another dtype")
    return None


def _shapes(a: Eqn, b: Eqn) -> Difference | None:
    one, other = (e.invars[0].aval.shape for e in (a, b))
    if dimension(a) != dimension(b) or common_layout(a, [one, other]) is not None:
        return None
    wanted = "equal dimensions up to the one worked on, or all but one other"
    return Difference("shapes", f"{one} and {other}", wanted)


def _whole(a: Eqn, b: Eqn) -> Difference | None:
    for eqn in (a, b):
        sharding = getattr(eqn.invars[0].aval, "sharding", None)
        if sharding is not None and any(part is not None for part in sharding.spec):
            return Difference("sharding", str(sharding.spec), "operands split over no other axis")
    return None


def other_operand(a: Eqn, b: Eqn) -> Difference | None:
    """That the compiler may find two to be one."""
    if a.invars[0] is not b.invars[0]:
        return None
    return Difference("same-operand", "the operand of the other again", "two operands")


def _small(a: Eqn, b: Eqn) -> Difference | None:
    most = max(size(a), size(b))
    if most <= MOST_BYTES:
        return None
    return Difference("large", f"{most:,} bytes", f"at most {MOST_BYTES:,} bytes each")


CHECKS: tuple[Check, ...] = (
    _same("kind", lambda e: e.primitive, lambda p: p.name),
    _same(
        "axes",
        lambda e: (e.params["axis_name"], e.params["axis_size"]),
        lambda v: f"{v[0]} of {v[1]}",
    ),
    _same("groups", lambda e: e.params.get("axis_index_groups")),
    _same("dimension", dimension),
    _same("tiling", lambda e: e.params.get("tiled")),
    _same("context", lambda e: e.ctx),
    _same("varying", lambda e: varying(e.invars[0].aval), _axes),
    _whole,
    _dtypes,
    _shapes,
    other_operand,
    _small,
)

ANY_SUMS = frozenset({_dtypes})
"""Checks that don't matter among sums of one dtype that are taken in a wider one."""
