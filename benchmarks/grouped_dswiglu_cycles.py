"""What the backward kernel of the grouped SwiGLU costs on TPU7x by libtpu's estimate.

    python benchmarks/grouped_dswiglu_cycles.py

Neither a `lax.ragged_dot` nor the kernel has a figure: what the kernel takes in has one, which is
what the gradients cost by themselves.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from grouped_swiglu_cycles import SIZES
from jax import lax

import relower
from relower.passes import gmm_dswiglu


def gradients(dh: jax.Array, both: jax.Array) -> jax.Array:
    """What the kernel takes in: the gradients of both halves from that of their product."""
    gate, up = jnp.split(both, 2, axis=-1)
    back = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1]
    return lax.concatenate(back(dh), 1)


def main() -> None:
    """Print a few lines for each size."""
    struct, bf16 = jax.ShapeDtypeStruct, jnp.dtype(jnp.bfloat16)
    for m, k, n, groups in SIZES:
        dh, both = struct((m, n), bf16), struct((m, 2 * n), bf16)
        args = (struct((m, k), bf16), struct((groups, n, k), bf16), both,
                struct((groups,), jnp.int32))  # fmt: skip
        print(f"{m} rows, {k} contracted, {n} columns, {groups} groups, bfloat16")
        done = relower.cost(gradients, dh, both)
        print(f"  gradients alone: {done.total().cycles:,.0f} cycles ({done.rung})")
        for name, fn in (("original", gmm_dswiglu.before), ("kernel", gmm_dswiglu.after)):
            whole = relower.cost(fn, *args)
            print(f"  {name}: {whole.memory.temp:,} bytes of temporaries ({whole.rung})")


if __name__ == "__main__":
    main()
