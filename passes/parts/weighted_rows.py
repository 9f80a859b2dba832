"""Weighted rows of a matrix product, and their way to tokens' choices and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...compat.jaxprs import Atom
from ...matchers.placed_rows import Placed
from ...matchers.spread_rows import Dims, Spread


def scaled(rows: jax.Array, column: jax.Array, dtype: Any) -> jax.Array:
    """``rows``, ``[…, m]``, times ``column``, ``[…, 1]``, rounded once."""
    wide = _wide(rows.dtype)
    return (rows.astype(wide) * column.astype(wide)).astype(dtype)


def rowwise(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """The products of rows of ``a`` with those of ``b``, ``[…, m]`` both."""
    wide = _wide(a.dtype)
    return jnp.sum(a.astype(wide) * b.astype(wide), axis=-1).astype(dtype)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


class Places:
    """Takes what belongs to choices to the rows of a product, and back."""

    def __init__(self, placed: Placed, rows: Sequence[int]) -> None:
        self.placed = placed
        self.rows = tuple(rows)
        """``[rows, d]`` of the product."""
        self.operands: tuple[Atom, ...] = ()
        if placed.gather is not None:
            self.operands += (placed.gather.invars[1],)
        if placed.mask is not None:
            self.operands += (placed.mask,)

    def _route(self, given: Sequence[Any]) -> tuple[Any, Any]:
        """The indices and the mask ``[choices, 1]``, where there are such."""
        indices = given[0] if self.placed.gather is not None else None
        mask = None if self.placed.mask is None else given[-1].reshape(-1, 1)
        return indices, mask

    def there(self, g: Any, weights: Any, given: Sequence[Any]) -> tuple[Any, Any]:
        """Each row's cotangents, ``[rows, d]``, and its weight, ``[rows, 1]``."""
        every = lax.broadcast_in_dim(
            g, (*self.placed.shape, g.shape[-1]), (*range(g.ndim - 1), g.ndim)
        )
        column = weights.reshape(*self.placed.shape, 1)
        return self._at_rows(every, given), self._at_rows(column, given)

    def _at_rows(self, x: Any, given: Sequence[Any]) -> Any:
        indices, mask = self._route(given)
        x = x.reshape(-1, x.shape[-1])
        x = x if mask is None else jnp.where(mask, x, 0)
        if self.placed.scatter is None:
            return x
        params = self.placed.scatter.params
        zeros = lax.full((self.rows[0], x.shape[-1]), 0, x.dtype)
        named = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return lax.scatter_add(zeros, indices, x, **{name: params[name] for name in named})

    def back(self, rows: Any, given: Sequence[Any]) -> Any:
        """Each choice's number from that of its row, ``[rows]``."""
        indices, mask = self._route(given)
        rows = rows[:, None]
        if self.placed.gather is not None:
            eqn = self.placed.gather
            params = {**eqn.params, "slice_sizes": (1, 1)}
            rows = eqn.primitive.bind(rows, indices, **params)
        rows = rows if mask is None else jnp.where(mask, rows, 0)
        return rows.reshape(self.placed.shape)


class Turned:
    """The same for rows that are added up in another order of axes than their product has."""

    operands: tuple[Atom, ...] = ()

    def __init__(self, spread: Spread, result: Dims, rows: Sequence[int]) -> None:
        self.spread = spread
        self.result = result
        self.rows = tuple(rows)
        """``[…, d]`` of the product."""

    def there(self, g: Any, weights: Any, given: Sequence[Any]) -> tuple[Any, Any]:
        """Each row's cotangents, ``[…, d]``, and its weight, ``[…, 1]``."""
        del given
        leading = self.rows[:-1]
        weights = weights.reshape(weights.shape[: len(leading)])
        column = _laid(weights, self.spread.weight_dims, leading)
        return _laid(g, self.spread.cotangent_dims, self.rows), column[..., None]

    def back(self, rows: Any, given: Sequence[Any]) -> Any:
        """Each weight's number from that of its row, ``[…]``."""
        del given
        return lax.transpose(rows, self.result)


def _laid(x: Any, dims: Dims, shape: Sequence[int]) -> Any:
    """``x``, whose axes are ``dims`` of ``shape``, in that order and repeated along the others."""
    order = sorted(range(len(dims)), key=lambda axis: dims[axis])
    return lax.broadcast_in_dim(lax.transpose(x, order), shape, sorted(dims))
