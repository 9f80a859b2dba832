"""The inverse of unit triangular matrices by divide and conquer, on whole batches of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of batches of matrices, in full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def unit_triangular_inverse(a: jax.Array, lower: bool, left: bool = True) -> jax.Array:
    """``[..., n, n]``: the inverses, n a power of two.

    Only the strict triangle of ``a`` is read; its diagonal is taken to be ones. ``left`` says from
    which side a solve would multiply by ``a``: the result is refined once from the same, so that it
    is as exact as the solve's. The derivative is the one that jax takes of a solve, ``-X dL X`` of
    the strict triangle ``dL``, with the inverse at hand in the place of another solve.
    """

    def inverse(a: jax.Array) -> jax.Array:
        x = _lower(a) if lower else transposed(_lower(transposed(a)))
        return solved(a, x, _identity(a), lower, left, carefully=lower != left)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (a,), (da,) = primals, tangents
        x = differentiable(a)
        strict = jnp.tril(da, -1) if lower else jnp.triu(da, 1)
        return x, -solved(a, x, matmul(strict, x), lower, left=True)

    differentiable = jax.custom_jvp(inverse)
    differentiable.defjvp(derivative)
    result: jax.Array = differentiable(a)
    return result


def solved(
    a: jax.Array,
    inverse: jax.Array,
    b: jax.Array,
    lower: bool,
    left: bool,
    carefully: bool = False,
) -> jax.Array:
    """``a⁻¹ b``, or ``b a⁻¹``, of unit triangular matrices whose inverses are known.

    One step of refinement makes up for what the product with an inverse loses. The diagonal's ones
    are left out of the product with ``a``, so that its rounding errors stay as small as ``b - x``.
    What it is worth is what the residual is: ``carefully`` sums that up in parts, without loss.
    Solves in one direction add up in an order of few errors, and take such care to be matched.
    """
    off = jnp.tril(a, -1) if lower else jnp.triu(a, 1)
    x = matmul(inverse, b) if left else matmul(b, inverse)
    one, other = (off, x) if left else (x, off)
    rest = _residual(b, x, one, other) if carefully else (b - x) - matmul(one, other)
    return x + (matmul(inverse, rest) if left else matmul(rest, inverse))


def _residual(b: jax.Array, x: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    """``b - x - one @ other``, the product in parts of a few terms, and what each sum loses."""
    n = one.shape[-1]
    width = max(1, n // _PARTS)
    rest, lost = _sum(b, -x)
    for start in range(0, n, width):
        left = lax.slice_in_dim(one, start, start + width, axis=-1)
        part = matmul(left, lax.slice_in_dim(other, start, start + width, axis=-2))
        rest, more = _sum(rest, -part)
        lost = lost + more
    return rest + lost


_PARTS = 8
"""Of one product: more would be more exact, and more to do."""


def _sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum as rounded, and exactly what rounding took from it (Knuth's two-sum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def transposed(a: jax.Array) -> jax.Array:
    """The matrices with rows and columns exchanged."""
    return jnp.swapaxes(a, -1, -2)


def _identity(a: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _lower(a: jax.Array) -> jax.Array:
    """Level by level: blocks of one, two, four, … rows.

    With ``X`` the inverses of the blocks so far, on the diagonal, and ``C`` what lies below each
    second of them, ``X - X C X`` has the inverses of blocks twice as large. All products are of
    whole matrices: the zeros among them add nothing, and a matrix unit is no smaller.
    """
    n = a.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (n, n), d) for d in (0, 1))
    x, size = _identity(a), 1
    while size < n:
        below = jnp.where(_level(row, column, size), a, 0)
        x = x - (below if size == 1 else matmul(matmul(x, below), x))
        size *= 2
    return x


def _level(row: jax.Array, column: jax.Array, size: int) -> jax.Array:
    """Where the second of two neighbouring blocks meets the first."""
    together = row // (2 * size) == column // (2 * size)
    return together & (row // size > column // size)
