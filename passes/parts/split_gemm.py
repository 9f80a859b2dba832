"""A GEMM whose result is split, with the derivatives of the GEMMs that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


def added_up_wider(dtype: Any) -> bool:
    """Whether the sums of a GEMM of this type are taken in a wider one, and rounded once."""
    return not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32


def split_gemm(
    gemm: Callable[..., jax.Array], sizes: Sequence[int], axes: tuple[int, int]
) -> Callable[..., Sequence[jax.Array]]:
    """``fn(lhs, whole, *rest)``: the parts of ``gemm(lhs, whole, *rest)``.

    Its derivative by ``lhs`` is that of the GEMMs of the parts: transposed, as many sums as parts,
    each as long as its part is wide, and not one over all of the width, whose error is larger where
    it is added up in the operands' own type. By ``whole`` it is one GEMM, of the same sums.

    Args:
      gemm: the product, linear in its first two operands.
      sizes: of the parts.
      axes: which axis of ``whole`` they lie along, and which of the result.
    """
    axis, result_axis = axes

    def product(lhs: Any, whole: Any, *rest: Any) -> list[jax.Array]:
        return list(lax.split(gemm(lhs, whole, *rest), sizes, result_axis))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (lhs, whole, *rest), (dlhs, dwhole, *_) = primals, tangents
        results = differentiable(*primals)
        terms: list[list[jax.Array]] = []
        if not isinstance(dlhs, SymbolicZero):
            terms.append([gemm(dlhs, part, *rest) for part in lax.split(whole, sizes, axis)])
        if not isinstance(dwhole, SymbolicZero):
            terms.append(product(lhs, dwhole, *rest))
        if not terms:
            return results, [SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results]
        return results, [sum(of[1:], of[0]) for of in zip(*terms, strict=True)]

    differentiable: Any = jax.custom_jvp(product)
    differentiable.defjvp(derivative, symbolic_zeros=True)
    found: Callable[..., Sequence[jax.Array]] = differentiable
    return found
