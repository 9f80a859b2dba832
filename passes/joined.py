"""One collective that does the work of several, on their operands side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..matchers.side_by_side import Layout

Collective = Callable[[jax.Array, int], jax.Array]
"""Takes an operand, and the dimension to work on."""
LayoutOf = Callable[[Sequence[tuple[int, ...]]], Layout]


def together(xs: Sequence[jax.Array], collective: Collective, layout_of: LayoutOf,
             shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:  # fmt: skip
    """What ``collective`` makes of each of several arrays of one dtype, done at once.

    Args:
      xs: the operands.
      collective: works on all of an array's elements alike.
      layout_of: how operands of given shapes, one or more, lie side by side.
      shapes: of the results.
    """
    layout = layout_of([x.shape for x in xs])
    views = [lax.reshape(x, v) if x.shape != v else x for x, v in zip(xs, layout.views)]
    joined = collective(lax.concatenate(views, layout.axis), layout.dimension)
    # split, and not slices: its transpose joins, where those of slices add zeros to every part.
    parts = lax.split(joined, layout.sizes, layout.split)
    return [lax.reshape(p, s) if p.shape != s else p for p, s in zip(parts, shapes, strict=True)]


def bits_together(xs: Sequence[jax.Array], collective: Collective, layout_of: LayoutOf,
                  shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:  # fmt: skip
    """The same of arrays of any dtypes, for a collective that only moves elements.

    The bits travel as unsigned integers as wide as the widest. Bits have no derivative: that of
    the results is the collective of the tangents, each dtype's together.
    """

    def moved(*xs: jax.Array) -> list[jax.Array]:
        word = np.dtype(f"uint{8 * max(x.dtype.itemsize for x in xs)}")
        parts = together([to_bits(x, word) for x in xs], collective, layout_of, shapes)
        return [from_bits(part, x.dtype) for part, x in zip(parts, xs, strict=True)]

    def tangents_moved(primals: Any, tangents: Any) -> tuple[Any, Any]:
        results = differentiable(*primals)
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        out: list[Any] = [SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results]
        for dtype in dict.fromkeys(tangents[i].dtype for i in moving):
            those = [i for i in moving if tangents[i].dtype == dtype]
            done = together([tangents[i] for i in those], collective, layout_of,
                            [shapes[i] for i in those])  # fmt: skip
            for i, t in zip(those, done, strict=True):
                out[i] = t
        return results, out

    differentiable = jax.custom_jvp(moved)
    differentiable.defjvp(tangents_moved, symbolic_zeros=True)
    inexact = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in xs)
    return list(differentiable(*xs) if inexact else moved(*xs))


def to_bits(x: jax.Array, word: Any) -> jax.Array:
    """The bits of each element in an unsigned integer of type ``word``, zeros above them."""
    if x.dtype == np.bool_:
        return x.astype(word)
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(word)


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The elements of type ``dtype`` that `to_bits` took the bits of."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return bits != 0
    return lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)
