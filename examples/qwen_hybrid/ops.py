"""Operations that a layer is made of, as one writes them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

TAPS = 4
"""Tokens that one output of the convolution sees: itself and the three before it."""

FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` greatest of the last axis, and where they stand."""
    best: tuple[jax.Array, jax.Array] = lax.top_k(scores, k)
    return best


def sort_by_group(ids: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """The order that brings the rows of a group together, and its inverse.

    Args:
        ids: int32[rows], each from 0 to ``groups``.
        groups: how many there are; the rows of id ``groups`` have none, and come last.
    """
    del groups
    order = jnp.argsort(ids)
    return order, jnp.argsort(order)


def take_out(x: jax.Array, order: jax.Array, inverse: jax.Array, k: int) -> jax.Array:
    """The rows of ``x``, of which each token has ``k``, in an order: ``x[order // k]``."""
    del inverse
    return x[order // k]


def put_back(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows that were put in an order, back where they came from: ``rows[inverse]``."""
    del order
    return rows[inverse]


def group_sizes(ids: jax.Array, groups: int) -> jax.Array:
    """How many of ``ids`` are 0, 1, …, ``groups - 1``."""
    return jnp.bincount(ids, length=groups)


def exchange(arrays: Sequence[jax.Array], axis_name: str, axis: int = 0) -> tuple[jax.Array, ...]:
    """Arrays whole, of which each device along an axis of the mesh holds a part along ``axis``."""
    return tuple(lax.all_gather(a, axis_name, axis=axis, tiled=True) for a in arrays)


def ring(
    chunks: Sequence[Sequence[jax.Array]], axis_name: str
) -> Callable[[int], tuple[jax.Array, ...]]:
    """What sends each chunk's arrays to all devices along an axis of the mesh."""
    return lambda i: exchange(chunks[i], axis_name)


@jax.custom_vjp
def fake_quantise(w: jax.Array) -> jax.Array:
    """``w``, ``[experts, in, out]``, as float8 holds it with a scale for each column.

    The rows are spread over "fsdp", so that a column's largest is that of all devices.
    """
    largest = lax.pmax(jnp.max(jnp.abs(w), axis=1, keepdims=True), "fsdp")
    scale = jnp.where(largest == 0, jnp.ones_like(largest), largest / LARGEST)
    return (w / scale).astype(FLOAT8).astype(w.dtype) * scale


# Rounding has a gradient of zero almost everywhere; it is taken as the identity.
fake_quantise.defvjp(lambda w: (fake_quantise(w), None), lambda _, g: (g,))


def gathered_wi(wi: jax.Array) -> jax.Array:
    """The experts' input weights, ``[gate | up]``: rounded half by half, gathered, and joined."""
    halves = jnp.split(wi, 2, axis=-1)
    halves = [lax.optimization_barrier(fake_quantise(half)) for half in halves]
    halves = [lax.all_gather(half, "fsdp", axis=1, tiled=True) for half in halves]
    return jnp.concatenate(halves, axis=-1)


def activated(rows: jax.Array, wi: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group's rows through their expert's input weights and SwiGLU.

    Args:
        rows: [rows, hidden], sorted by group.
        wi: [groups, hidden, 2 · width].
        sizes: int32[groups].

    Returns:
        [rows, width].
    """
    gate, up = jnp.split(lax.ragged_dot(rows, wi, sizes), 2, axis=-1)
    return jax.nn.silu(gate) * up


def causal_conv(qkv: jax.Array, state: jax.Array, taps: jax.Array) -> jax.Array:
    """SiLU of a causal depthwise convolution over the tokens of ``[state | qkv]``, in float32.

    Args:
        qkv: [batch, tokens, channels].
        state: [batch, TAPS - 1, channels], the tokens before.
        taps: float32[TAPS, channels]; the last is for the token itself.

    Returns:
        Shape and dtype of ``qkv``.
    """
    x = jnp.concatenate([state, qkv], axis=1).astype(jnp.float32)
    tokens = qkv.shape[1]
    y = x[:, :tokens] * taps[0]
    for i in range(1, TAPS):
        y = y + x[:, i : i + tokens] * taps[i]
    return jax.nn.silu(y).astype(qkv.dtype)


def triangular_inverse(lower: jax.Array) -> jax.Array:
    """``(I + lower)⁻¹`` of strictly lower triangular matrices ``[..., n, n]``."""
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    solve = partial(jax.scipy.linalg.solve_triangular, lower=True, unit_diagonal=True)
    inverse: jax.Array = solve(eye + lower, eye)
    return inverse


@dataclass(frozen=True)
class Ops:
    """The form of each operation."""

    top_k: Callable[..., tuple[jax.Array, jax.Array]] = top_k
    sort_by_group: Callable[..., tuple[jax.Array, jax.Array]] = sort_by_group
    take_out: Callable[..., jax.Array] = take_out
    put_back: Callable[..., jax.Array] = put_back
    group_sizes: Callable[..., jax.Array] = group_sizes
    exchange: Callable[..., tuple[jax.Array, ...]] = exchange
    ring: Callable[..., Callable[[int], tuple[jax.Array, ...]]] = ring
    gathered_wi: Callable[..., jax.Array] = gathered_wi
    activated: Callable[..., jax.Array] = activated
    causal_conv: Callable[..., jax.Array] = causal_conv
    triangular_inverse: Callable[..., jax.Array] = triangular_inverse


PLAIN = Ops()
