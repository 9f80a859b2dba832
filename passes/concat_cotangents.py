"""concat_cotangents: a sum of arrays padded to one shape becomes their concatenation.

before:  ``pad(a, 0, (0, n)) + pad(b, 0, (m, 0))``, of any number of parts, in any order
after:   ``concatenate([a, b])``, with zeros where no part lies

This is what the derivative of an array leaves that was read in slices, a fused ``[gate | up]``
weight or a cotangent taken apart by hand; `jnp.split` leaves a concatenation at once. One further
term of the sum stays one. ``−0.0 + 0.0`` is ``+0.0``, so the sign of a zero may differ, and a
subnormal that the addition would flush stays.

FIGURES
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.weak_types import weak
from ..matchers.disjoint_pads import PARAMS, Sum, axes_of, find_sum, lay, roots
from ..matchers.graph import OUTPUT, Scope
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement


def _find(scope: Scope, index: int) -> Match | None:
    if set(scope.eqns[index].params) - PARAMS["add"]:
        return None
    found = find_sum(scope, index)
    return None if found is None else Match(scope, index, {"sum": found})


def _sum(match: Match) -> Sum:
    found: Sum = match.captures["sum"]
    return found


def _zeros(match: Match) -> Reason | None:
    if all(p.zero for p in _sum(match).parts):
        return None
    return Reason("not-zeros", "a part isn't known to be padded with zeros",
                  "another filling", "zeros of either sign")  # fmt: skip


def _plain(match: Match) -> Reason | None:
    wrong = [c for p in _sum(match).parts for c in p.config if c[2] or min(c) < 0]
    if not wrong:
        return None
    return Reason("interior", "a pad spreads elements apart or cuts some off", str(wrong[0]),
                  "elements added before and after only")  # fmt: skip


def _one_axis(match: Match) -> Reason | None:
    axes = axes_of(_sum(match).parts)
    if len(axes) == 1:
        return None
    return Reason("several-axes", "the parts don't lie side by side along one axis",
                  f"pads along axes {axes}" if axes else "pads that add nothing",
                  "pads along one axis")  # fmt: skip


def _disjoint(match: Match) -> Reason | None:
    parts, axes = _sum(match).parts, axes_of(_sum(match).parts)
    if _plain(match) is not None or len(axes) != 1 or lay(parts, axes[0]) is not None:
        return None
    spans = [(p.config[axes[0]][0], p.config[axes[0]][0] + p.operand.aval.shape[axes[0]])
             for p in parts]  # fmt: skip
    return Reason("overlap", "two parts lie in one place", str(sorted(spans)),
                  "parts none of which begins before the last one ends")  # fmt: skip


def _whole(match: Match) -> Reason | None:
    for part in _sum(match).parts:
        spec = getattr(getattr(part.operand.aval, "sharding", None), "spec", None) or ()
        if any(s is not None for s in spec):
            return Reason("sharding", "a part is split over a mesh axis", str(spec),
                          "parts that each device holds whole")  # fmt: skip
    return None


def _profitable(match: Match) -> Reason | None:
    scope = match.scope
    added = {match.index, *_sum(match).inner}
    for part in _sum(match).parts:
        others = set(scope.readers(scope.eqns[part.index].outvars[0])) - added
        if others:
            reader = min(others)
            name = "an output" if reader == OUTPUT else scope.eqns[reader].primitive.name
            return Reason("read-elsewhere", "a padded part is read elsewhere, so it would be made"
                          " all the same", name, "the sum as its only reader")  # fmt: skip
    return None


def _replace(match: Match) -> Replacement:
    terms, out = _sum(match), match.eqn.outvars[0].aval
    laid = lay(terms.parts, axes_of(terms.parts)[0])
    assert laid is not None
    axis, order, gaps = laid.axis, laid.order, laid.gaps

    def zeros(length: int) -> jax.Array:
        shape = (*out.shape[:axis], length, *out.shape[axis + 1 :])
        return lax.full(shape, 0, out.dtype)

    def joined(*operands: jax.Array) -> Sequence[Any]:
        pieces: list[jax.Array] = []
        for i, gap in zip((*order, None), gaps):
            pieces += [zeros(gap)] if gap else []
            pieces += [operands[i]] if i is not None else []
        whole = lax.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]
        for other in operands[len(order) :]:
            whole = lax.add(whole, other)
        return [weak(whole) if out.weak_type and not jax.typeof(whole).weak_type else whole]

    operands = (*(p.operand for p in terms.parts), *terms.others)
    return Replacement(operands, tuple(match.eqn.outvars), joined, (axis, order, gaps))


def before(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The cotangent of ``x``, ``[n, 2 m]``, from those of its halves, ``[n, m]`` each."""
    rows, half = gate.shape
    x = jax.ShapeDtypeStruct((rows, 2 * half), gate.dtype)
    back = jax.linear_transpose(lambda x: (x[:, :half], x[:, half:]), x)
    (whole,) = back((2 * gate, up))
    result: jax.Array = whole
    return result


def after(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The same, the halves side by side."""
    return lax.concatenate([2 * gate, up], 1)


PASS = Pass(
    name="concat_cotangents",
    contract=Contract.VALUE,
    summary="a sum of pads that don't overlap → concatenate",
    measure="additions",
    roots=roots,
    find=_find,
    requirements=(
        Requirement("not-zeros", "All parts are padded with zeros.", _zeros),
        Requirement("interior", "Elements are added before and after only.", _plain),
        Requirement("several-axes", "All parts are padded along one and the same axis.", _one_axis),
        Requirement("overlap", "No two parts lie in one place.", _disjoint),
        Requirement("sharding", "No part is split over a mesh axis that its type names.", _whole),
    ),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((64, 16), jnp.float32),
                jax.ShapeDtypeStruct((64, 16), jnp.float32),
            ),
            "halves",
        ),
    ),
)
