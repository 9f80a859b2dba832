"""Pieces that are no pattern: what stands between those that are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import jax
import jax.numpy as jnp

from .pool import Array, Made, Pool, barrier, named, piece

Way = Callable[[], Array]


@piece("plain")
def elementwise(r: Random, p: Pool) -> Made:
    """Something element by element."""
    a, b = p.rows(r), p.rows(r)
    ways: tuple[Way, ...] = (
        lambda: a + b, lambda: a * b, lambda: jnp.tanh(a), lambda: jnp.where(a > b, a, -b),
        lambda: a - 2 * b, lambda: jnp.maximum(a, b), lambda: a * jnp.asarray(0.5, a.dtype),
        lambda: jnp.abs(a), lambda: jnp.sin(a), lambda: jax.nn.silu(a),
    )  # fmt: skip
    fn = r.choice(ways)
    return [("rows", named(r, "rows", fn()))]


@piece("plain")
def moved(r: Random, p: Pool) -> Made:
    """Elements in other places."""
    h = p.rows(r)
    ways: tuple[Way, ...] = (
        lambda: h[::-1], lambda: jnp.roll(h, 1, axis=0), lambda: jnp.flip(h, 1),
        lambda: jnp.cumsum(h, axis=0), lambda: h.reshape(-1).reshape(h.shape), lambda: barrier(h),
        lambda: h.T.reshape(h.shape), lambda: h.at[0].set(1),
    )  # fmt: skip
    fn = r.choice(ways)
    return [("rows", fn())]


@piece("plain")
def mixed(r: Random, p: Pool) -> Made:
    """Products and reductions."""
    h = p.rows(r)
    ways: tuple[Way, ...] = (
        lambda: h @ (p.rows(r).T @ p.rows(r)), lambda: jax.nn.softmax(h, axis=-1),
        lambda: h - h.mean(axis=-1, keepdims=True), lambda: h * (h.sum(axis=0) > 0),
        lambda: jnp.einsum("td,te->te", h, p.rows(r)),
    )  # fmt: skip
    fn = r.choice(ways)
    return [("rows", p.alike(fn()))]


@piece("plain")
def integers(r: Random, p: Pool) -> Made:
    """Arithmetic on places."""
    ints = p.pick(r, r.choice(("ints", "order", "bounded")))
    if ints is None:
        return []
    ways: tuple[Way, ...] = (
        lambda: ints + 1, lambda: ints // 2, lambda: ints % 3, lambda: ints[::-1],
        lambda: jnp.cumsum(ints), lambda: jnp.where(ints > 1, ints, 0), lambda: -ints,
    )  # fmt: skip
    fn = r.choice(ways)
    return [("ints", fn())]


@piece("plain")
def observed(r: Random, p: Pool) -> Made:
    """A value that the host looks at."""
    jax.debug.callback(lambda x: None, p.rows(r)[0, 0])
    return []
