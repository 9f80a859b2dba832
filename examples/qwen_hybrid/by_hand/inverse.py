"""The chunks' triangular inverses by products of matrices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def transposed(a: jax.Array) -> jax.Array:
    """The matrices with rows and columns exchanged."""
    return jnp.swapaxes(a, -1, -2)


def identity(a: jax.Array) -> jax.Array:
    """As many identities as there are matrices."""
    return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def refined(off: jax.Array, inverse: jax.Array, b: jax.Array) -> jax.Array:
    """``(I + off)⁻¹ b``, refined once from the product with the inverse."""
    x = matmul(inverse, b)
    return x + matmul(inverse, (b - x) - matmul(off, x))


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum as rounded, and what rounding took from it."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def refined_in_parts(off: jax.Array, inverse: jax.Array, b: jax.Array) -> jax.Array:
    """As `refined`, of a residual that is summed up in eight parts, without loss.

    A transposed solve loses less than one of the matrix itself, and this is to lose no more.
    """
    x, n = matmul(inverse, b), off.shape[-1]
    rest, lost = two_sum(b, -x)
    for i in range(0, n, n // 8):
        columns, rows = off[..., i : i + n // 8], x[..., i : i + n // 8, :]
        rest, more = two_sum(rest, -matmul(columns, rows))
        lost = lost + more
    return x + matmul(inverse, rest + lost)


def by_blocks(a: jax.Array) -> jax.Array:
    """The inverses of unit lower triangular matrices: of blocks of one, two, four, … rows."""
    n = a.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (n, n), d) for d in (0, 1))
    x, size = identity(a), 1
    while size < n:
        together = row // (2 * size) == column // (2 * size)
        below = jnp.where(together & (row // size > column // size), a, 0)
        x = x - (below if size == 1 else matmul(matmul(x, below), x))
        size *= 2
    return x


@jax.custom_vjp
def inverted(a: jax.Array) -> jax.Array:
    """The inverses of ``a``, whose strictly lower triangles are read."""
    return refined(jnp.tril(a, -1), by_blocks(a), identity(a))


def _forward(a: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = inverted(a)
    return inverse, (a, inverse)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array]:
    """No solve here either: the inverse is at hand."""
    a, inverse = saved
    last, batch = a.ndim - 1, tuple(range(a.ndim - 2))
    g = lax.dot_general(g, inverse, (((last,), (last,)), (batch, batch)),
                        precision=lax.Precision.HIGHEST)  # fmt: skip
    g = refined_in_parts(jnp.triu(transposed(a), 1), transposed(inverse), g)
    return (jnp.tril(-g, -1),)


inverted.defvjp(_forward, _backward)


def triangular_inverse(lower: jax.Array) -> jax.Array:
    """As `ops.triangular_inverse`."""
    return inverted(identity(lower) + lower)
