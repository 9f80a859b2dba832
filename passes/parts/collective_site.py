"""What passes that do several collectives as one ask of a site, and what they put in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...compat.jaxprs import Eqn
from ...compat.weak_types import weak
from ...matchers.collective_checks import PARAMS, common_layout, is_gather
from ...matchers.collectives import collectives, outside
from ...matchers.graph import Scope
from ...matchers.pattern import Mismatch
from ...matchers.side_by_side import Layout, Shape
from ..base import Match, Reason, Replacement, Requirement
from . import joined

_REQUIREMENTS = {
    "kind": ("they are collectives of different kinds", "All are of one kind."),
    "axes": ("they run over different mesh axes", "All run over the same mesh axes."),
    "groups": ("they have different axis groups", "All have the same axis groups."),
    "dimension": ("they work on different dimensions", "All work on the same dimension."),
    "tiling": ("one is tiled and the other is not", "All are tiled, or none."),
    "context": ("they were traced in different contexts", "All were traced in one context."),
    "varying": ("their operands vary over different mesh axes",
                "The operands vary over the same mesh axes."),
    "sharding": ("an operand is split over an axis that isn't manual",
                 "No operand is split over an axis that isn't manual."),
    "dtype": ("their elements can't travel together",
              "Gathered elements are whole bytes or of one dtype, summed ones of one dtype and not"
              " bfloat16."),
    "shapes": ("their operands don't fit side by side",
               "The operands have equal dimensions up to the one that is worked on, or all but one"
               " other."),
    "scope": ("they stand in different bodies", "All stand in one body."),
    "same-operand": ("they have the same operand, which the compiler finds out",
                     "The operands are different arrays."),
    "dependent": ("one depends on the other", "None depends on another's result."),
    "effects": ("one can't come before an effect that its operand depends on",
                "No operand after the first depends on an effect after the first."),
    "barrier": ("one can't come before a barrier that its operand comes out of",
                "No operand after the first comes out of a barrier after the first."),
}  # fmt: skip


def find(scope: Scope, index: int, *, widened: bool = False) -> Match | Mismatch | None:
    """The first of a group of collectives, or one that fits no other, with the reasons why.

    Args:
      scope: the body.
      index: the equation.
      widened: whether they are sums of bfloat16, to be taken in float32, or any others.
    """
    eqn = scope.eqns[index]
    unnamed = set(eqn.params) - PARAMS
    if unnamed:
        name = min(unnamed)
        return Mismatch((eqn.primitive.name, f"param {name}"), repr(eqn.params[name]),
                        "no such param")  # fmt: skip
    group = collectives(scope, widened=widened).group(index)
    members = [] if group is None else group.members
    if len(members) > 1:
        found = {"members": tuple(members), "reasons": {}}
        return Match(scope, index, found) if index == members[0] else None
    return _alone(scope, index, widened) if members else None


def _alone(scope: Scope, index: int, widened: bool) -> Match | None:
    """A collective that fits no other, with its differences from the nearest before it."""
    differences = collectives(scope, widened=widened).nearest_differences(index)
    if differences is None:
        differences = outside(scope, index, widened=widened)
        if not differences:
            return None
    return Match(scope, index, {"members": (index,), "reasons": {d.code: d for d in differences}})


def requirements(*left_out: str) -> tuple[Requirement, ...]:
    """A named check for each difference that there can be, without some."""
    return tuple(_requirement(code) for code in _REQUIREMENTS if code not in left_out)


def _requirement(code: str) -> Requirement:
    said, sentence = _REQUIREMENTS[code]

    def check(match: Match) -> Reason | None:
        found = match.captures["reasons"].get(code)
        return None if found is None else Reason(code, said, found.found, found.wanted)

    return Requirement(code, sentence, check)


def profitable(match: Match) -> Reason | None:
    """Whether the copies cost less than a latency, and there is more than one to do."""
    found = match.captures["reasons"].get("large")
    if found is not None:
        return Reason("large", "the copies cost more than a collective's latency",
                      found.found, found.wanted)  # fmt: skip
    if len(match.captures["members"]) > 1:
        return None
    return Reason("order", "each of the two needs something that only the other's group can give",
                  "collectives that wait for each other", "some order of them all")  # fmt: skip


def _collective(eqn: Eqn) -> Callable[[jax.Array, int], jax.Array]:
    """The equation's collective on other operands and along another dimension."""
    name = "all_gather_dimension" if is_gather(eqn) else "scatter_dimension"

    def run(x: jax.Array, dimension: int) -> jax.Array:
        found = eqn.primitive.bind(x, **{**eqn.params, name: dimension})
        result: jax.Array = found[0] if eqn.primitive.multiple_results else found
        return result

    return run


def replacement(match: Match, *, widened: bool = False) -> Replacement:
    """One collective of all operands side by side, in float32 if they are to be ``widened``."""
    members = match.captures["members"]
    eqns = [match.scope.eqns[i] for i in members]
    first, outs = eqns[0], [e.outvars[0] for e in eqns]
    operands = tuple(e.invars[0] for e in eqns)
    shapes = [v.aval.shape for v in outs]

    def lay_out(shapes: Sequence[Shape]) -> Layout:
        layout = common_layout(first, shapes)
        assert layout is not None, shapes
        return layout

    def one(*xs: Any) -> Sequence[Any]:
        if widened:
            xs = tuple(lax.convert_element_type(x, jnp.float32) for x in xs)
        results = joined.Joined(_collective(first), lay_out, is_gather(first))(xs, shapes)
        return [_typed(r, v.aval) for r, v in zip(results, outs, strict=True)]

    return Replacement(operands, tuple(outs), one, (members, widened), also=members[1:])


def _typed(x: jax.Array, aval: Any) -> jax.Array:
    if aval.weak_type and x.dtype == aval.dtype:
        return x if jax.typeof(x).weak_type else weak(x)
    same = x.dtype == aval.dtype and not jax.typeof(x).weak_type
    return x if same else lax.convert_element_type(x, aval.dtype)
