"""Deliberately broken copies of rewrites, for `relower verify --mutants` to catch.

Of results and operands it breaks many by itself: shifted, reversed, rounded, shrunk, in each
other's place. What a pass declares is what only it can do wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..base import Match, Replacement

Mutant = Callable[[Match, Replacement], Replacement | None]


def changed(
    name: str, change: Callable[[Match, Callable[..., Sequence[Any]], list[Any]], Sequence[Any]]
) -> dict[str, Mutant]:
    """A mutant whose results are ``change(match, the rewrite, operands)``."""

    def mutate(match: Match, way: Replacement) -> Replacement:
        fn = way.fn or (lambda *operands: operands)
        broken = lambda *operands: list(change(match, fn, list(operands)))
        return replace(way, fn=broken, key=(way.key, name))

    return {name: mutate}


def reversed_ties(order_of: Callable[[Match], tuple[int, int]]) -> dict[str, Mutant]:
    """Of equal keys the last comes first; nothing where the positions aren't read.

    Args:
        order_of: which result holds the positions, as does an operand there, and the axis sorted.
    """

    def change(match: Match, fn: Callable[..., Sequence[Any]], operands: list[Any]) -> list[Any]:
        order, axis = order_of(match)
        turned = [jnp.flip(x, axis) if i != order else x for i, x in enumerate(operands)]
        results = list(fn(*turned))
        last = operands[0].shape[axis] - 1
        results[order] = (last - results[order]).astype(results[order].dtype)
        return results

    (mutate,) = changed("reversed ties", change).values()

    def where_read(match: Match, way: Replacement) -> Replacement | None:
        positions = match.eqn.outvars[order_of(match)[0]]
        return mutate(match, way) if match.scope.readers(positions) else None

    return {"reversed ties": where_read}
