"""packed_all_gather: several all_gathers over one axis become one, of the operands side by side.

before:  ``all_gather(weights, "expert"), all_gather(ids, "expert")``, anywhere in one body
after:   one all_gather of both in one array of integers, taken apart again

So the weights and ids of all chunks of a routed layer's tokens come by one all_gather, and so do
psum_scatters of one dtype, such as the cotangents of all_gathers. Of different dtypes the very bits
travel, never converted values; their derivative is the collective of the tangents. That holds for
``grad``, ``vjp``, ``jvp`` and ``linearize``; `jax.linear_transpose` of the rewritten function takes
no derivative, and raises where gathers of different dtypes were packed. The one stands where the
first of them stood: what the others' operands are computed by is brought before it, which no effect
and no barrier may stand in the way of.

psum_scatters of bfloat16 stay as they are: XLA:CPU adds in float32 and reads what was computed in
float32 unrounded, which operands joined in bfloat16 are not. To add in float32 by the program's own
word would be of a looser contract.

It helps because each collective has a latency that doesn't depend on its size: done by hand to a
large mixture-of-experts trainer, it took 0.095 s off a micro-batch of 10 s on 128 TPUs v7x. It
costs a copy of the operands and one of the results, so that arrays over 8 MiB are left alone: at
some 2 kB a cycle that is the order of one latency, a rule of thumb and not measured. Compilers
combine collectives on their own only where nothing depends on the order, and not across dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..compat.jaxprs import Eqn
from ..compat.weak_types import weak
from ..matchers.collectives import PARAMS, collectives, common_layout, is_gather, outside, roots
from ..matchers.graph import Scope
from ..matchers.pattern import Mismatch
from ..matchers.side_by_side import Layout, Shape
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts import joined

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


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    eqn = scope.eqns[index]
    unnamed = set(eqn.params) - PARAMS
    if unnamed:
        name = min(unnamed)
        return Mismatch((eqn.primitive.name, f"param {name}"), repr(eqn.params[name]),
                        "no such param")  # fmt: skip
    group = collectives(scope).group(index)
    members = [] if group is None else group.members
    if len(members) > 1:
        found = {"members": tuple(members), "reasons": {}}
        return Match(scope, index, found) if index == members[0] else None
    return _alone(scope, index) if members else None


def _alone(scope: Scope, index: int) -> Match | None:
    """A collective that fits no other, with its differences from the nearest before it."""
    differences = collectives(scope).nearest_differences(index)
    if differences is None:
        differences = outside(scope, index)
        if not differences:
            return None
    return Match(scope, index, {"members": (index,), "reasons": {d.code: d for d in differences}})


def _requirement(code: str) -> Requirement:
    said, sentence = _REQUIREMENTS[code]

    def check(match: Match) -> Reason | None:
        found = match.captures["reasons"].get(code)
        return None if found is None else Reason(code, said, found.found, found.wanted)

    return Requirement(code, sentence, check)


def _profitable(match: Match) -> Reason | None:
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


def _replace(match: Match) -> Replacement:
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
        results = joined.Joined(_collective(first), lay_out, is_gather(first))(xs, shapes)
        return [_typed(r, v.aval) for r, v in zip(results, outs, strict=True)]

    return Replacement(operands, tuple(outs), one, members, also=members[1:])


def _typed(x: jax.Array, aval: Any) -> jax.Array:
    if aval.weak_type == jax.typeof(x).weak_type:
        return x
    return weak(x) if aval.weak_type else lax.convert_element_type(x, aval.dtype)


def before(weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights ``f32[tokens, k]`` and experts ``i32[tokens, k]`` of all tokens, on every device."""

    def routing(weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        every = lax.all_gather(weights, "expert", tiled=True)
        return every, lax.all_gather(ids, "expert", tiled=True)

    everywhere = jax.shard_map(routing, in_specs=P("expert"), out_specs=P(None, "expert"))
    found: tuple[jax.Array, jax.Array] = everywhere(weights, ids)
    return found


def after(weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by one all_gather."""

    def routing(weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = [lax.bitcast_convert_type(a, jnp.uint32) for a in (weights, ids)]
        both = lax.all_gather(lax.concatenate(words, 1), "expert", tiled=True)
        one, other = lax.split(both, (weights.shape[1], ids.shape[1]), 1)
        one = lax.bitcast_convert_type(one, weights.dtype)
        return one, lax.bitcast_convert_type(other, ids.dtype)

    everywhere = jax.shard_map(routing, in_specs=P("expert"), out_specs=P(None, "expert"))
    found: tuple[jax.Array, jax.Array] = everywhere(weights, ids)
    return found


PASS = Pass(
    name="packed_all_gather",
    contract=Contract.BITWISE,
    summary="several all_gathers (or psum_scatters) over one axis → one of all operands",
    measure="all_gathers and psum_scatters",
    roots=roots,
    find=_find,
    requirements=tuple(map(_requirement, _REQUIREMENTS)),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (jax.ShapeDtypeStruct((64, 2), jnp.float32), jax.ShapeDtypeStruct((64, 2), jnp.int32)),
            "routing",
            mesh={"expert": 4},
        ),
    ),
)
