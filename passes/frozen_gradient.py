"""frozen_gradient: the gradient of a frozen weight is neither computed, nor reduced, nor summed up.

before:  ``where(False, dw, 0)``, ``dw`` summed over micro-batches and devices
after:   ``0``

It helps wherever weights are frozen by a mask on gradients or updates, which jax can't see through
a loop: the weight's matrix product, the reduce-scatter of what it makes and the accumulator that a
loop carries are paid for in every micro-batch. It costs nothing. What flows through a frozen weight
into activations stays. The compiler removes an unread result, and in a loop what it carries only
for itself; it never knows what a caller will ignore, which ``frozen=`` declares: docs/optimize.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..matchers.graph import Dataflow, Scope
from ..matchers.value_walk import Place
from ..matchers.weight_gradient import is_transposed, makers
from .base import (
    Contract,
    Example,
    FrozenLeaf,
    Match,
    Pass,
    Reason,
    Replacement,
    Requirement,
    Site,
    Whole,
)
from .frozen import Request
from .parts.frozen_judge import READERS_SHOWN, Gradient, judge


def _program(flow: Dataflow, request: Request) -> Whole | None:
    judged = judge(flow, request)
    if judged is None:
        return None
    candidates = tuple(Match(*_root(flow, g), {"gradient": g}) for g in judged.gradients)
    applies = any(g.dropped for g in judged.gradients)
    return Whole(candidates, judged.demand if applies else None, _dispensable, _describe)


def _root(flow: Dataflow, gradient: Gradient) -> Place:
    """Where a gradient is made; what computes an output that holds none."""
    if gradient.places:
        return gradient.places[0]
    return flow.root, max(flow.root.live, default=0)


def _dispensable(scope: Scope, index: int) -> bool:
    return scope.eqns[index].primitive in makers() and is_transposed(scope, index)


def _describe(match: Match, site: Site) -> FrozenLeaf:
    gradient: Gradient = match.captures["gradient"]
    cost = gradient.cost
    return FrozenLeaf(
        path=gradient.path,
        type=site.shape,
        way="declared" if gradient.declared else "recognised",
        status=site.status,
        source=site.source,
        flops=cost.flops,
        collective_bytes=cost.collective_bytes,
        accumulator_bytes=cost.accumulator_bytes,
        operations=cost.operations,
        readers=gradient.readers,
        reasons=site.reasons,
    )


def _holds_a_gradient(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if not gradient.found:
        return None
    return Reason("no-gradient", f"no gradient of {gradient.path} comes out there", gradient.found,
                  "what a backward pass makes")  # fmt: skip


def _read_first(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if not gradient.readers:
        return None
    more = len(gradient.readers) - READERS_SHOWN
    found = ", ".join(gradient.readers[:READERS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    cost = gradient.cost
    kept = (
        f"{cost.flops:,} FLOPs, {cost.collective_bytes:,} bytes of collectives and "
        f"{cost.accumulator_bytes:,} bytes of accumulators are kept for it"
    )
    return Reason("read-first", f"the gradient is read before it is dropped; {kept}", found,
                  "no reader: take norms over the trainable leaves only")  # fmt: skip


def _finite(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if gradient.times_zero is None:
        return None
    return Reason("maybe-not-finite", "inf or NaN times zero is NaN, so the product is needed",
                  f"a multiplication by zero at {gradient.times_zero}",
                  "a select, or assume='finite_grads'")  # fmt: skip


def _separable(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    said = gradient.dropped or gradient.readers or gradient.found or gradient.times_zero
    if said:
        return None
    return Reason("inseparable", "what makes the gradient makes something else too",
                  f"{match.eqn.primitive.name}, of which another result is read",
                  "an equation of the gradient's own")  # fmt: skip


def _no_replacement(match: Match) -> Replacement:
    raise NotImplementedError("frozen_gradient takes equations out: it puts none in their place")


def _loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum((x @ weights[0]) @ weights[1])


def before(frozen: jax.Array, trained: jax.Array, xs: jax.Array) -> tuple[jax.Array, ...]:
    """Loss and gradients of two layers, summed over ``xs``, ``f32[steps, n, d]``; one is masked."""

    def step(sums: Any, x: jax.Array) -> tuple[Any, None]:
        made = jax.value_and_grad(_loss)((frozen, trained), x)
        return jax.tree.map(jnp.add, sums, made), None

    zeros = jnp.zeros(()), (jnp.zeros_like(frozen), jnp.zeros_like(trained))
    (loss, (first, second)), _ = lax.scan(step, zeros, xs)
    return loss, lax.select_n(False, jnp.zeros_like(frozen), first), second


def after(frozen: jax.Array, trained: jax.Array, xs: jax.Array) -> tuple[jax.Array, ...]:
    """The gradient of the second layer only."""

    def step(sums: Any, x: jax.Array) -> tuple[Any, None]:
        made = jax.value_and_grad(lambda trained: _loss((frozen, trained), x))(trained)
        return jax.tree.map(jnp.add, sums, made), None

    (loss, second), _ = lax.scan(step, (jnp.zeros(()), jnp.zeros_like(trained)), xs)
    return loss, jnp.zeros_like(frozen), second


PASS = Pass(
    name="frozen_gradient",
    contract=Contract.BITWISE,
    summary="a weight gradient that is masked or never read → nothing",
    measure="products that make a weight's gradient",
    roots=makers,
    find=lambda scope, index: None,
    requirements=(
        Requirement(
            "no-gradient",
            "An output declared frozen holds a gradient, and not a parameter or its update.",
            _holds_a_gradient,
        ),
        Requirement("read-first", "Nothing reads the gradient before it is masked.", _read_first),
        Requirement(
            "maybe-not-finite",
            "The gradient isn't masked by a multiplication by zero, or is assumed to be finite.",
            _finite,
        ),
        Requirement(
            "inseparable", "What makes the gradient makes nothing else that is read.", _separable
        ),
    ),
    profitable=lambda match: None,
    replace=_no_replacement,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((64, 64), jnp.float32),
                jax.ShapeDtypeStruct((64, 32), jnp.float32),
                jax.ShapeDtypeStruct((4, 16, 64), jnp.float32),
            ),
            "two layers, four micro-batches",
        ),
    ),
    program=_program,
)
