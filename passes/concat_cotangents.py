"""concat_cotangents: a sum of arrays padded to one shape becomes their concatenation.

before:  ``pad(a, 0, (0, n)) + pad(b, 0, (m, 0))``, of any number of parts, in any order
after:   ``concatenate([a, b])``

This is what the derivative of an array leaves that was read in slices, a fused ``[gate | up]``
weight or a cotangent taken apart by hand; `jnp.split` leaves a concatenation at once. One further
term of the sum stays one; a part of no width lies nowhere, and is left out. ``−0.0 + 0.0`` is
``+0.0``, so the sign of a zero may differ, and a subnormal that the addition would flush stays.

TPU7x's compiler does the same on its own for up to four parts of bf16[8192, n]: 127,307 estimated
cycles both ways for two of 4,096 columns or four of 2,048 (libtpu 0.0.52). From five on it doesn't:
99,458 → 89,513 for five of 1,280, 225,668 → 109,404 for six, 127,307 → 120,536 for eight of 1,024,
541,435 → 460,621 for six results of matrix products. Two such results it adds in the products,
which is better than to concatenate them: 343,645 against 362,905. So fewer than five are joined
only where that lets split_fused_wi work on them as a whole. Where no part lies the compiler's own
zeros are cheaper (two parts of 2,048 in 8,192: 95,480, with zeros between them 127,307): such sums
are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.weak_types import weak
from ..matchers.disjoint_pads import PARAMS, Laid, Sum, axes_of, find_sum, lay, roots
from ..matchers.graph import OUTPUT, Scope
from ..matchers.lockstep import chain_of
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
    if _plain(match) is not None or len(axes) != 1 or _laid(match) is not None:
        return None
    spans = [(p.config[axes[0]][0], p.config[axes[0]][0] + p.operand.aval.shape[axes[0]])
             for p in parts if p.operand.aval.shape[axes[0]]]  # fmt: skip
    return Reason("overlap", "two parts lie in one place", str(sorted(spans)),
                  "parts none of which begins before the last one ends")  # fmt: skip


def _filled(match: Match) -> Reason | None:
    laid = _laid(match)
    if laid is None or not any(laid.gaps):
        return None
    return Reason("gaps", "no part lies in some places, where zeros would have to be written",
                  f"{sum(laid.gaps)} places of {match.eqn.outvars[0].aval.shape[laid.axis]}",
                  "parts that fill the whole")  # fmt: skip


def _laid(match: Match) -> Laid | None:
    parts, axes = _sum(match).parts, axes_of(_sum(match).parts)
    plain = _plain(match) is None and len(axes) == 1
    return lay(parts, axes[0]) if plain else None


def _whole(match: Match) -> Reason | None:
    for part in _sum(match).parts:
        spec = getattr(getattr(part.operand.aval, "sharding", None), "spec", None) or ()
        if any(s is not None for s in spec):
            return Reason("sharding", "a part is split over a mesh axis", str(spec),
                          "parts that each device holds whole")  # fmt: skip
    return None


def _profitable(match: Match) -> Reason | None:
    scope, terms = match.scope, _sum(match)
    added = {match.index, *terms.inner}
    for part in terms.parts:
        others = set(scope.readers(scope.eqns[part.index].outvars[0])) - added
        if others:
            reader = min(others)
            name = "an output" if reader == OUTPUT else scope.eqns[reader].primitive.name
            return Reason("read-elsewhere", "a padded part is read elsewhere, so it would be made"
                          " all the same", name, "the sum as its only reader")  # fmt: skip
    if _one_chain(match):
        return None
    laid = _laid(match)
    parts = len(terms.parts) if laid is None else len(laid.order)
    if parts < FEWEST:
        return Reason("few-parts", "the compiler joins so few parts by itself",
                      f"{parts} parts", f"at least {FEWEST}")  # fmt: skip
    return None


FEWEST = 5


def _one_chain(match: Match) -> bool:
    """Whether the parts, joined, are what split_fused_wi works on as a whole."""
    terms, laid = _sum(match), _laid(match)
    atoms = [] if laid is None else [terms.parts[i].operand for i in laid.order]
    if laid is None or len(atoms) < 2:
        return False
    return chain_of(match.scope, atoms, laid.axis).root is not None


def _replace(match: Match) -> Replacement:
    terms, laid, weakly = _sum(match), _laid(match), match.eqn.outvars[0].aval.weak_type
    assert laid is not None

    def joined(*operands: jax.Array) -> Sequence[Any]:
        whole = lax.concatenate(operands[: len(laid.order)], laid.axis)
        for other in operands[len(laid.order) :]:
            whole = lax.add(whole, other)
        if jax.typeof(whole).weak_type == weakly:
            return [whole]
        return [weak(whole) if weakly else lax.convert_element_type(whole, whole.dtype)]

    operands = (*(terms.parts[i].operand for i in laid.order), *terms.others)
    return Replacement(operands, tuple(match.eqn.outvars), joined, (laid.axis, len(laid.order)))


def before(*parts: jax.Array) -> jax.Array:
    """The cotangent of an array read in slices, from those of the slices, ``[n, m]`` each."""
    (rows, width), dtype = parts[0].shape, parts[0].dtype

    def slices(x: jax.Array) -> list[jax.Array]:
        return [x[:, i * width : (i + 1) * width] for i in range(len(parts))]

    x = jax.ShapeDtypeStruct((rows, width * len(parts)), dtype)
    (whole,) = jax.linear_transpose(slices, x)([2 * part for part in parts])
    result: jax.Array = whole
    return result


def after(*parts: jax.Array) -> jax.Array:
    """The same, the slices' side by side."""
    return lax.concatenate([2 * part for part in parts], 1)


PASS = Pass(
    name="concat_cotangents",
    contract=Contract.VALUE,
    summary="a sum of pads that don't overlap → concatenate",
    measure="additions",
    suggest="take the parts with `jnp.split`, whose derivative is one concatenation, rather "
    "than by slices",
    roots=roots,
    find=_find,
    requirements=(
        Requirement("not-zeros", "All parts are padded with zeros.", _zeros),
        Requirement("interior", "Elements are added before and after only.", _plain),
        Requirement("several-axes", "All parts are padded along one and the same axis.", _one_axis),
        Requirement("overlap", "No two parts lie in one place.", _disjoint),
        Requirement("gaps", "The parts fill the whole.", _filled),
        Requirement("sharding", "No part is split over a mesh axis that its type names.", _whole),
    ),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (jax.ShapeDtypeStruct((64, 16), jnp.float32),) * 6,
            "six slices",
        ),
    ),
)
