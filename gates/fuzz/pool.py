"""The values that a random program has made so far, by what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Array = Any
Made = list[tuple[str, Array]]
"""What a piece makes, each with its tag: ``rows`` are floats ``[t, d]``, ``order`` places ``[n]``,
``ids`` columns ``[t, k]``, ``ints`` any integers ``[n]``, ``other`` anything else."""

NAMES = ("order", "ids", "rows", "gate")
"""Names that pieces give their values, and remat policies save."""


@dataclass(frozen=True)
class Pool:
    """Values in scope, and where this is."""

    values: tuple[tuple[str, Array], ...]
    axis: str | None = None
    """The mesh axis over which this part of the program is split, where it stands in shard_map."""
    axis_size: int = 1
    differentiated: bool = False
    """Whether the program will be, so that everything must have a derivative."""
    scalars: tuple[Array, ...] = field(default=())
    """Loop counters in scope."""

    def of(self, tag: str) -> list[Array]:
        """All values of a tag."""
        return [v for t, v in self.values if t == tag]

    def pick(self, r: Random, tag: str) -> Array | None:
        """One value of a tag; the latest are likelier. None where there is none."""
        found = self.of(tag)
        if not found:
            return None
        return found[max(r.randrange(len(found)), r.randrange(len(found)))]

    def rows(self, r: Random) -> Array:
        """Some floats ``[t, d]``; there always are."""
        return self.pick(r, "rows")

    def with_more(self, made: Made) -> Pool:
        """This pool and what a piece has made."""
        return replace(self, values=(*self.values, *made))

    def alike(self, x: Array) -> Array:
        """``x`` as floats of the type and shape of the rows here, whatever it is."""
        rows = self.of("rows")[0]
        x = jnp.asarray(x)
        if x.shape != rows.shape:
            size = x.size
            flat = x.reshape(-1)
            if size == 0:
                return jnp.zeros_like(rows)
            times = -(-rows.size // size)
            x = jnp.concatenate([flat] * times)[: rows.size].reshape(rows.shape)
        return x.astype(rows.dtype)


def sizes(p: Pool) -> tuple[int, int]:
    """Rows and columns of the floats in scope."""
    t, d = p.of("rows")[0].shape
    return t, d


Piece = Callable[[Random, Pool], Made]
PIECES: dict[str, Piece] = {}
GROUPS: dict[str, list[str]] = {}


def piece(group: str) -> Callable[[Piece], Piece]:
    """Enter a piece into the list of those that programs are made of."""

    def enter(fn: Piece) -> Piece:
        name = fn.__name__.strip("_")
        PIECES[name] = fn
        GROUPS.setdefault(group, []).append(name)
        return fn

    return enter


def named(r: Random, name: str, value: Array) -> Array:
    """The value, with a name that remat policies may save, every now and then."""
    return checkpoint_name(value, name) if r.random() < 0.3 else value


def times(x: Array, factor: Sequence[float] = (2.0,)) -> Array:
    """A product with a power of two, which is exact."""
    return x * jnp.asarray(factor[0], x.dtype)


def barrier(x: Array) -> Array:
    """The value behind an optimization barrier."""
    return lax.optimization_barrier(x)


def stop(x: Array) -> Array:
    """The value without a derivative."""
    return jax.lax.stop_gradient(x)
