"""packed_psum_scatter: several psum_scatters of bfloat16 become one, which adds in float32.

before:  ``psum_scatter(a, "expert"), psum_scatter(b, "expert")``, of bfloat16
after:   one psum_scatter of both, widened to float32 and side by side, rounded to bfloat16 after

These are the cotangents of bfloat16 weights that an all_gather brought to every device, one for
each chunk of a routed layer's tokens. Sums in other dtypes are packed_all_gather's, which keeps
their bits. Those of bfloat16 it can't: in which precision they are taken is each compiler's affair.
Here they are taken in float32 by the program's own word, and rounded once, so that their error is
that of one rounding: no more than where a compiler adds in float32 unasked, less where it doesn't.

It helps as packed_all_gather does: each collective has a latency that doesn't depend on its size.
It costs twice the bytes on the way, a copy of the operands and one of the results; arrays over 4
MiB are left alone. A compiler may combine such collectives, where nothing depends on the order, but
doesn't widen them. Cycles are not estimated: libtpu's analysis gives none to a collective.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..compat.primitives import primitive
from ..matchers.collective_checks import is_bfloat16_sum
from ..matchers.graph import Scope
from ..matchers.pattern import Mismatch
from .base import Contract, Example, Match, Pass
from .parts.collective_site import find, profitable, replacement, requirements


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    return find(scope, index, widened=True) if is_bfloat16_sum(scope.eqns[index]) else None


def before(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over four devices of two bfloat16 arrays, ``[tokens, k]``, each device its tokens'."""

    def summed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = lax.psum_scatter(a, "expert", tiled=True)
        return one, lax.psum_scatter(b, "expert", tiled=True)

    return _everywhere(summed, a, b)


def after(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by one psum_scatter, in float32."""

    def summed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = lax.concatenate([a.astype(jnp.float32), b.astype(jnp.float32)], 1)
        total = lax.psum_scatter(wide, "expert", tiled=True)
        one, other = lax.split(total, (a.shape[1], b.shape[1]), 1)
        return one.astype(jnp.bfloat16), other.astype(jnp.bfloat16)

    return _everywhere(summed, a, b)


def _everywhere(fn: Any, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array] = jax.shard_map(
        fn, in_specs=P("expert"), out_specs=P("expert")
    )(*args)
    return found


_SUMS = jax.ShapeDtypeStruct((64, 2), jnp.bfloat16)

PASS = Pass(
    name="packed_psum_scatter",
    contract=Contract.ROUNDING,
    summary="several psum_scatters of bfloat16 over one axis → one in float32",
    measure="psum_scatters of bfloat16",
    suggest="widen the operands to float32, lay them side by side, and add by one `psum_scatter`",
    roots=lambda: frozenset({primitive("reduce_scatter_p")}),
    find=_find,
    requirements=requirements("kind", "dtype"),
    profitable=profitable,
    replace=lambda match: replacement(match, widened=True),
    before=before,
    after=after,
    examples=lambda: (Example((_SUMS, _SUMS), "two sums", mesh={"expert": 4}),),
)
