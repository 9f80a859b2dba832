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
word is packed_psum_scatter's, of a looser contract.

It helps because each collective has a latency that doesn't depend on its size: done by hand to a
large mixture-of-experts trainer, it took 0.095 s off a micro-batch of 10 s on 128 TPUs v7x. It
costs a copy of the operands and one of the results, so that arrays over 8 MiB are left alone: at
some 2 kB a cycle that is the order of one latency, a rule of thumb and not measured. Compilers
combine collectives on their own only where nothing depends on the order, and not across dtypes.
Cycles are not estimated: libtpu's analysis gives none to a collective.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..matchers.collective_checks import roots
from .base import Contract, Example, Pass
from .parts.collective_site import find, profitable, replacement, requirements


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
    suggest="lay the operands side by side and exchange them by one collective",
    roots=roots,
    find=find,
    requirements=requirements(),
    profitable=profitable,
    replace=replacement,
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
