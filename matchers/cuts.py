"""Recognise slices of one array that lie side by side."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .along import Stop
from .chain import Cut
from .graph import Scope, Value


@functools.cache
def calls() -> frozenset[Any]:
    """Calls that say nothing of derivatives."""
    return frozenset(primitive(n) for n in ("jit_p", "closed_call_p", "call_p")) - {None}


@functools.cache
def custom() -> frozenset[Any]:
    """Calls with a derivative of their own."""
    return frozenset(primitive(n) for n in ("custom_jvp_call_p", "custom_vjp_call_p")) - {None}


def made_by(place: tuple[Scope, Atom]) -> tuple[int, int] | None:
    """The equation, and which of its results, that binds a variable in its scope."""
    scope, atom = place
    return None if jaxprs.is_literal(atom) else scope.definition(atom)


def cut(made: Any, axis: int) -> Cut | None:
    """The array that all parts are cut from, where they lie side by side along the axis."""
    boxes = [b for s, i, r in made if (b := box(s, s.eqns[i], r)) is not None]
    if len(boxes) < len(made):
        return None
    (value, starts, limits), *others = boxes
    whole = value.atom.aval.shape
    if len(others) and all(b[2][axis] - b[1][axis] == whole[axis] for b in boxes):
        return None  # cut along other axes only
    for (v, _, _), i in zip(others, range(1, len(boxes)), strict=True):
        if v != value:
            raise Stop("cut", f"part {i} cut from another array", "parts of one array")
    spans = [(b[1][axis], b[2][axis]) for b in boxes]
    if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        raise Stop("cut", f"parts {spans} along axis {axis}",
                   "parts that each begin where the one before ends")  # fmt: skip
    rest = {(_without(b[1], axis), _without(b[2], axis)) for b in boxes}
    if len(rest) > 1:
        raise Stop(
            "cut", "parts cut differently along other axes", "one axis along which they differ"
        )
    _unsplit(value, axis)
    limits = (*limits[:axis], spans[-1][1], *limits[axis + 1 :])
    return Cut(value, axis, starts, limits)


def _without(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def box(
    scope: Scope, eqn: Eqn, result: int
) -> tuple[Value, tuple[int, ...], tuple[int, ...]] | None:
    """Which part of which array a slice or split takes."""
    if eqn.primitive is primitive("slice_p"):
        strides = eqn.params["strides"]
        if strides is not None and any(s != 1 for s in strides):
            return None
        starts, limits = (tuple(map(int, eqn.params[f"{n}_indices"])) for n in ("start", "limit"))
        return _place(scope, eqn.invars[0]), starts, limits
    if eqn.primitive is primitive("split_p"):
        axis, sizes = int(eqn.params["axis"]), [int(s) for s in eqn.params["sizes"]]
        shape, at = tuple(eqn.invars[0].aval.shape), sum(sizes[:result])
        starts = (*(0,) * axis, at, *(0,) * (len(shape) - axis - 1))
        limits = (*shape[:axis], at + sizes[result], *shape[axis + 1 :])
        return _place(scope, eqn.invars[0]), starts, limits
    return None


def _place(scope: Scope, atom: Atom) -> Value:
    """Where an array is made, seen out of calls, so that it is one value for all parts."""
    while not jaxprs.is_literal(atom) and scope.definition(atom) is None:
        step = scope.step(atom)
        if step is None:
            break
        scope, atom = step
    return Value(scope, atom)


def _unsplit(value: Value, axis: int) -> None:
    """Raises where the array is known to be split over devices along the axis."""
    spec = getattr(getattr(value.atom.aval, "sharding", None), "spec", None) or ()
    made = made_by((value.scope, value.atom))
    if made is not None:
        eqn = value.scope.eqns[made[0]]
        if eqn.primitive is primitive("sharding_constraint_p"):
            spec = getattr(eqn.params["sharding"], "spec", None) or spec
    if len(spec) > axis and spec[axis] is not None:
        raise Stop("sharding", f"an array split as {spec}", f"axis {axis} whole on each device")


def cut_from_one(scope: Scope, atoms: Sequence[Atom]) -> bool:
    """Whether every one of several values is computed from a cut of one array, in the main."""
    found: list[set[Value]] = [set() for _ in atoms]
    walks = [_cuts_behind(scope, atom) for atom in atoms]
    waiting = list(zip(walks, found, strict=True))
    while waiting:  # side by side, as the cuts of parts are mostly near
        for walk, values in tuple(waiting):
            taken = next(walk, None)
            if taken is None:
                if not values:
                    return False
                waiting.remove((walk, values))
                continue
            values.add(taken)
            if all(taken in others for others in found):
                return True
    return False


def _cuts_behind(scope: Scope, atom: Atom) -> Iterator[Value]:
    """The arrays that a value is cut from, each operation's first array looked behind."""
    for _ in range(64):
        if jaxprs.is_literal(atom):
            break
        step: _Step | None = scope.memo.get(("cut behind", atom))
        if step is None:
            step = scope.memo["cut behind", atom] = _step_behind(scope, atom)
        taken, behind = step
        if taken is not None:
            yield taken
        if behind is None:
            break
        scope, atom = behind


def _is_spread(scope: Scope, atom: Atom) -> bool:
    """Whether an array is one number everywhere, as the other case of a mask is."""
    made = None if jaxprs.is_literal(atom) else scope.definition(atom)
    if made is None:
        return False
    eqn = scope.eqns[made[0]]
    return eqn.primitive is primitive("broadcast_in_dim_p") and not eqn.invars[0].aval.ndim


_Step = tuple[Value | None, tuple[Scope, Atom] | None]
"""The array that a variable is cut from, if it is, and the one that it is made of."""


def _step_behind(scope: Scope, atom: Atom) -> _Step:
    made = scope.definition(atom)
    if made is None and scope.is_shared:
        return None, None  # to say of a near miss that it is one is worth no look at every call
    if made is None or scope.eqns[made[0]].primitive in calls() | custom():
        return None, scope.step(atom)
    eqn = scope.eqns[made[0]]
    taken = box(scope, eqn, made[1])
    at = made[1] if eqn.primitive is primitive("optimization_barrier_p") else 0
    if eqn.primitive is primitive("select_n_p"):
        at = 1  # what is chosen, not by what
    arrays = [a for a in eqn.invars[at:] if a.aval.ndim]
    array = next((a for a in arrays if not _is_spread(scope, a)), next(iter(arrays), None))
    return None if taken is None else taken[0], None if array is None else (scope, array)
