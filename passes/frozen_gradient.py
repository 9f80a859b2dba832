"""frozen_gradient: the gradient of a frozen weight is neither computed, nor reduced, nor summed up.

before:  ``where(False, dw, 0)``, ``dw`` summed over micro-batches and devices
after:   ``0``

It helps where another function will drop the gradient, which neither jax nor a compiler can know
and ``frozen=`` declares (docs/optimize.md): the weight's matrix product, the reduce-scatter of what
it makes and the accumulator that a loop carries are paid for in every micro-batch. It costs
nothing. What flows through a frozen weight into activations stays. A sum over several steps that
the state keeps is read: `optax.MultiSteps` belongs around the optimizer of what is trained, and not
around all.

Compiled for TPU7x by libtpu 0.0.52, of two layers bf16[4096,2048] × f32[2048,2048] with the first
declared frozen, `relower cost` gives at least 260,640 cycles before and 156,384 after for its HBM
bytes and FLOPs, and 50 and 34 MB of temporaries; of four micro-batches in a scan, 1,042,558 and
625,535, 134 and 109 MB. Where the mask is in the same function, on one device, the compiler drops
the product and the accumulator itself: 156,384 before and after behind ``where(False, …)``, 625,535
for a sum in a scan that nothing reads. There the rewrite makes the program smaller, and its report
says what a reader of the gradient would cost. With collectives that has not been measured.

A Pallas kernel that makes a frozen gradient and something else loses that output, with what only
it needs (docs/optimize.md says when it can't). No compiler does that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..matchers.dataflow import Dataflow
from ..matchers.graph import Scope
from ..matchers.value_walk import Place
from ..matchers.weight_gradient import is_transposed, makers
from .base import Contract, Example, Match, Pass, Replacement, Whole
from .frozen import Request
from .parts.frozen_judge import Gradient, judge
from .parts.frozen_site import REQUIREMENTS, describe


def _program(flow: Dataflow, request: Request) -> Whole | None:
    judged = judge(flow, request)
    if judged is None:
        return None
    candidates = tuple(Match(*_root(flow, g), {"gradient": g}) for g in judged.gradients)
    applies = any(g.dropped for g in judged.gradients)
    return Whole(candidates, judged.demand if applies else None, _dispensable, describe)


def _root(flow: Dataflow, gradient: Gradient) -> Place:
    """Where a gradient is made; what computes an output that holds none."""
    if gradient.places:
        return gradient.places[0]
    return flow.root, max(flow.root.live, default=0)


def _dispensable(scope: Scope, index: int) -> bool:
    return scope.eqns[index].primitive in makers() and is_transposed(scope, index)


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
    suggest="read the frozen weight through `jax.lax.stop_gradient`, so that no gradient of "
    "it is made",
    roots=makers,
    find=lambda scope, index: None,
    requirements=REQUIREMENTS,
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
