"""One collective that does the work of several, on their operands side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ...matchers.side_by_side import Layout, Shape


@dataclass(frozen=True)
class Joined:
    """A collective that several arrays go through at once."""

    collective: Callable[[jax.Array, int], jax.Array]
    """Takes an operand, and the dimension to work on."""
    layout_of: Callable[[Sequence[Shape]], Layout]
    """How operands of given shapes, one or more, lie side by side."""
    moves: bool
    """Whether it only moves elements, as an all_gather does; it adds them otherwise."""

    def __call__(self, xs: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """The collective of each of ``xs``; ``shapes`` are those of the results.

        Elements that are added must be of one dtype. Gradients are those of a collective of each.
        """
        alike = len({x.dtype for x in xs}) == 1 and xs[0].dtype != jnp.bfloat16
        if alike or not self.moves:
            return self.together(xs, shapes)
        return self._with_tangents(xs, shapes) if any(map(_inexact, xs)) else self.bits(xs, shapes)

    def together(self, xs: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Arrays of one dtype, as they are; differentiable."""
        layout = self.layout_of([x.shape for x in xs])
        views = [x if x.shape == v else lax.reshape(x, v) for x, v in zip(xs, layout.views)]
        joined = self.collective(lax.concatenate(views, layout.axis), layout.dimension)
        # split, and not slices: its transpose joins, those of slices add zeros to every part.
        parts = lax.split(joined, layout.sizes, layout.split)
        return [
            p if p.shape == s else lax.reshape(p, s) for p, s in zip(parts, shapes, strict=True)
        ]

    def bits(self, xs: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Arrays of any dtypes, as unsigned integers as wide as the widest where they differ."""
        if len({x.dtype for x in xs}) == 1:
            return self.together(xs, shapes)
        word = np.dtype(f"uint{8 * max(x.dtype.itemsize for x in xs)}")
        parts = self.together([to_bits(x, word) for x in xs], shapes)
        return [from_bits(part, x.dtype) for part, x in zip(parts, xs, strict=True)]

    def _with_tangents(self, xs: Sequence[jax.Array], shapes: Sequence[Shape]) -> list[jax.Array]:
        """Bits have no derivative: that of the results is the collective of the tangents."""

        def moved(*xs: jax.Array) -> list[jax.Array]:
            return self.bits(xs, shapes)

        def tangents_moved(primals: Any, tangents: Any) -> tuple[Any, Any]:
            results = differentiable(*primals)
            out: list[Any] = [SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results]
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
            for those in _by_dtype(moving, tangents):
                done = self.together([tangents[i] for i in those], [shapes[i] for i in those])
                for i, t in zip(those, done, strict=True):
                    out[i] = t
            return results, out

        differentiable = jax.custom_jvp(moved)
        differentiable.defjvp(tangents_moved, symbolic_zeros=True)
        return list(differentiable(*xs))


def _by_dtype(positions: Sequence[int], arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Positions of arrays of one dtype together, of bfloat16 each alone.

    Transposed they are sums, and `packed_all_gather` says why sums of bfloat16 stay alone.
    """
    groups: dict[Any, list[int]] = {}
    for i in positions:
        dtype = arrays[i].dtype
        groups.setdefault((dtype, i if dtype == jnp.bfloat16 else None), []).append(i)
    return list(groups.values())


def _inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


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
