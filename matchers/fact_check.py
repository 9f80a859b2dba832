"""Facts in words, and as checks on the values of a running program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..compat.claims import Failure
from .fact import Fact, default


def words(fact: Fact | None, aval: Any) -> str:
    """What is known of a value beyond its type; empty where that is nothing."""
    if fact is None or fact == default(aval.dtype):
        return ""
    said = []
    plain = default(aval.dtype)
    if (fact.lo, fact.hi) != (plain.lo, plain.hi):
        lo, hi = ("…" if b is None else str(b) for b in (fact.lo, fact.hi))
        said.append(f"in [{lo}, {hi}]" if fact.constant is None else f"= {fact.constant.value}")
    elif fact.constant is not None:
        said.append(f"= {fact.constant.value}")
    if fact.permutation is not None:
        said.append(f"a permutation along axis {fact.permutation}")
    said += [f"rising along axis {d}" for d in fact.rising]
    if fact.affine is not None and fact.constant is None:
        said.append(f"in steps of {fact.affine.strides}")
    return ", ".join(said)


@dataclass(frozen=True)
class Leaned:
    """A fact that a rewrite leaned on, to be checked where the value is."""

    fact: Fact
    what: str
    """The type and the fact, in words."""
    site: str
    """The pass and the place."""

    def failures(self, value: Any, skip: int) -> list[Failure]:
        """What to test of a value whose first ``skip`` dimensions are batches.

        Args:
            value: an array of the fact's type, with ``skip`` more dimensions before its own.
            skip: their number.

        Returns:
            For each part of the fact whether it fails, and the message.
        """
        if value.size == 0:
            return []
        values = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
        start = f"{self.site} leaned on {self.what}".replace("{", "{{").replace("}", "}}")
        return [(failed, f"{start}: {why}", found)
                for failed, why, found in _parts(self.fact, values, skip)]  # fmt: skip


def _parts(fact: Fact, x: Any, skip: int) -> Iterator[Failure]:
    least, most = jnp.min(x), jnp.max(x)
    if fact.lo is not None:
        yield ~(least >= fact.lo), "found {least}", {"least": least}
    if fact.hi is not None:
        yield ~(most <= fact.hi), "found {most}", {"most": most}
    if fact.constant is not None and fact.lo is None:
        value = fact.constant.value
        yield ~jnp.all(x == value), "found {least} to {most}", {"least": least, "most": most}
    if fact.integers() is not None and jnp.issubdtype(x.dtype, jnp.floating):
        yield ~jnp.all(x == jnp.floor(x)), "found a value that is no integer", {}
    if fact.permutation is not None:
        axis = fact.permutation + skip
        places = lax.broadcasted_iota(x.dtype, x.shape, axis)
        wrong = ~jnp.all(lax.sort(x, dimension=axis) == places)
        yield wrong, "found values missing, or there twice", {}
    for axis in fact.rising:
        before, after = _neighbours(x, axis + skip)
        yield jnp.any(after < before), "found values that fall", {}
    if fact.affine is not None and fact.constant is None:
        yield from _affine(fact, x, skip)


def _affine(fact: Fact, x: Any, skip: int) -> Iterator[Failure]:
    affine = fact.affine
    assert affine is not None
    for axis, stride in enumerate(affine.strides):
        if x.shape[axis + skip] > 1:
            before, after = _neighbours(x, axis + skip)
            lower, upper = (before, after) if stride >= 0 else (after, before)
            # A difference that wrapped around would equal the stride in the wrong order.
            wrong = jnp.any((upper < lower) | (upper - lower != abs(stride)))
            yield wrong, f"found other steps along axis {axis}", {}
    if affine.offset is not None:
        first = x[(slice(None),) * skip + (0,) * (x.ndim - skip)]
        found = jnp.max(jnp.where(first != affine.offset, first, affine.offset))
        yield jnp.any(first != affine.offset), "found {first} first", {"first": found}


def _neighbours(x: Any, axis: int) -> tuple[Any, Any]:
    n = x.shape[axis]
    return lax.slice_in_dim(x, 0, n - 1, axis=axis), lax.slice_in_dim(x, 1, n, axis=axis)
