"""All_gathers and psum_scatters of one body that one of them could do together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..compat import jaxprs
from ..compat.jaxprs import Eqn, Var
from ..compat.primitives import primitive
from ..compat.vma import varying
from .graph import Scope
from .motion import is_barrier, is_pure, made_after
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


@dataclass
class Group:
    """Collectives that can be one, in order; each alone where it fits no other."""

    members: list[int]
    needs: set[int] = field(default_factory=set)
    """Positions of other groups whose results the operands depend on."""


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
    return max(int(a.aval.size * a.aval.dtype.itemsize) for a in (*eqn.invars, *eqn.outvars))


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


class Collectives:
    """The collectives of one body and how they can be joined."""

    def __init__(self, scope: Scope) -> None:
        self.eqns = scope.eqns
        known = roots()
        self.indices = [
            i
            for i in scope.live
            if scope.eqns[i].primitive in known
            and set(scope.eqns[i].params) <= PARAMS
            and jaxprs.is_var(scope.eqns[i].invars[0])
            and scope.readers(scope.eqns[i].outvars[0])  # its axis name alone keeps a dead one live
        ]
        self._place = {index: n for n, index in enumerate(self.indices)}

    @cached_property
    def _made(self) -> dict[Var, int]:
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @cached_property
    def _ancestors(self) -> dict[int, int]:
        """For each collective, those that its operand depends on, as bits by position."""
        below: dict[Var, int] = {}
        found: dict[int, int] = {}
        for index, eqn in enumerate(self.eqns):
            bits = 0
            for atom in eqn.invars:
                if jaxprs.is_var(atom):
                    bits |= below.get(atom, 0)
            if index in self._place:
                found[index] = bits
                bits |= 1 << self._place[index]
            if bits:
                below.update((v, bits) for v in eqn.outvars)
        return found

    def depends(self, index: int, on: int) -> bool:
        """Whether a collective's operand depends on the result of another."""
        return bool(self._ancestors[index] >> self._place[on] & 1)

    @cached_property
    def groups(self) -> list[Group]:
        """Each collective in the first group that it fits, or in one of its own."""
        groups: list[Group] = []
        group_of: dict[int, int] = {}
        for index in self.indices:
            needs = {group_of[i] for i in self.indices if i < index and self.depends(index, i)}
            closed = self._closure(groups, needs)
            for n, group in enumerate(groups):
                if n not in closed and self._fits(group, index):
                    break
            else:
                n = len(groups)
                groups.append(Group([]))
            groups[n].members.append(index)
            groups[n].needs |= closed
            group_of[index] = n
        return groups

    def _fits(self, group: Group, index: int) -> bool:
        if any(self.differences(m, index) for m in group.members):
            return False
        shapes = [self.eqns[i].invars[0].aval.shape for i in (*group.members, index)]
        return common_layout(self.eqns[index], shapes) is not None

    @staticmethod
    def _closure(groups: list[Group], needs: set[int]) -> set[int]:
        closed, waiting = set(needs), list(needs)
        while waiting:
            for n in groups[waiting.pop()].needs - closed:
                closed.add(n)
                waiting.append(n)
        return closed

    def differences(self, first: int, index: int) -> list[Difference]:
        """Everything for which a collective can't be done together with an earlier one."""
        a, b = self.eqns[first], self.eqns[index]
        found = [d for check in CHECKS if (d := check(a, b)) is not None]
        return found + self._placing(first, index)

    def _placing(self, first: int, index: int) -> list[Difference]:
        """Why the operand of the second can't be ready at the first."""
        if self.depends(index, first):
            return [Difference("dependent", "an operand computed from the other's result",
                               "independent operands")]  # fmt: skip
        operand = self.eqns[index].invars[0]
        between = [self.eqns[i] for i in made_after(self.eqns, self._made, [operand], first)]
        wanted = "an operand that can be ready at the first"
        found = []
        effects = sorted({e.primitive.name for e in between if not is_pure(e)})
        if effects:
            found.append(Difference("effects", f"{', '.join(effects)} before it", wanted))
        if any(map(is_barrier, between)):
            found.append(Difference("barrier", "an operand that comes out of a barrier", wanted))
        return found


_cache: weakref.WeakKeyDictionary[Scope, Collectives] = weakref.WeakKeyDictionary()


def collectives(scope: Scope) -> Collectives:
    """Those of a scope; looked for once."""
    known = _cache.get(scope)
    if known is None:
        known = _cache[scope] = Collectives(scope)
    return known


def outside(scope: Scope, index: int) -> list[Difference]:
    """That a collective of the same kind stands in a body around this one's, if one does."""
    eqn = scope.eqns[index]
    while scope.callers:
        caller = scope.callers[0]
        call, scope = caller.scope.eqns[caller.index], caller.scope
        if call.primitive is primitive("custom_jvp_call_p"):
            return []  # as a packed one is, which has its own verdict
        if any(scope.eqns[i].primitive is eqn.primitive for i in collectives(scope).indices):
            found = f"one in a body of {call.primitive.name}"
            return [Difference("scope", found, "both in one body")]
    return []


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


def _other_operand(a: Eqn, b: Eqn) -> Difference | None:
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
    _other_operand,
    _small,
)
