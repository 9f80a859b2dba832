"""router_grad_from_wo_input: weights' gradients from what goes into a product, not what comes out.

before:  of ``y = h @ wo`` weighted row by row: ``dw = (g * y).sum(-1)``, ``d = w * g``,
         ``dh = d @ wo.T``, ``dwo = h.T @ d``
after:   ``u = g @ wo.T``, ``dw = (u * h).sum(-1)``, ``dh = w * u``, ``dwo = (w * h).T @ g``

This is the backward of a mixture of experts' routed rows. ``y`` is as large as all of them, so that
it is computed again in a rematerialised backward, and for nothing but the weights' gradient; as
``⟨g, h · wo⟩ = ⟨g · woᵀ, h⟩`` that needs a product which the backward computes anyway. One matrix
product of three is gone, of ``lax.ragged_dot`` or of ``dot_general``, batched or not.

The compiler doesn't know of it. For bf16 rows [16384, 1024] and d = 4,096 on TPU7x (libtpu 0.0.52):
products 412 → 275 GFLOP, HBM traffic 780 → 512 MB, temporary memory 134 → 67 MB; with
``lax.ragged_dot`` in 8 groups 1,108 → 604 MB and 135 → 34 MB. (The analysis of cycles dies on the
rewritten programs; the batched form before takes 943,076.) Done by hand to a large
mixture-of-experts trainer, it took 0.257 s off a micro-batch of 10 s on 128 TPUs v7x.

The cotangents are rounded without the weights in them, and ``dh`` and the rows that ``dwo`` is
made of with them; the rows' products are added up in float32.

``dw`` is a sum over ``d`` and then over the width ``m`` of ``h``, where it was one over ``m`` and
then over ``d``. Against float64 on a CPU its error was 0.5 to 1.06 times the original's for
``d <= m`` and up to 2.0 times for ``d = 4 m``, in float32 and in bfloat16: more than the contract
allows. What a TPU's accumulators make of it wasn't measured, so that it has to be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from ..matchers.graph import Scope
from ..matchers.weighted_rows import Backward, backwards, products
from .base import Contract, Example, Match, Pass, Reason, Replacement
from .parts.told import told
from .parts.weighted_rows import Places, rowwise, scaled

_REQUIREMENTS = {
    "saved": ("the rows were saved and are not computed again",
              "The rows come out of a matrix product of the same body, under no name."),
    "read-elsewhere": ("the rows are read elsewhere, so they would be computed all the same",
                       "Nothing but the weights' gradient reads the rows."),
    "layout": ("the product isn't of rows with matrices",
               "The product is of rows with one matrix, or one for each group or batch."),
    "places": ("the rows' places aren't known to be one for each choice",
               "Rows taken to tokens' choices are gathered by a permutation, and their cotangents "
               "scattered by the same."),
    "other-reader": ("the weighted cotangents have another reader",
                     "Nothing but the gradients of the product's operands reads the weighted "
                     "cotangents."),
}  # fmt: skip


def _find(scope: Scope, index: int) -> Match | None:
    found = backwards(scope).get(index)
    return None if found is None else Match(scope, index, {"backward": found})


def _profitable(match: Match) -> Reason | None:
    if match.captures["backward"].input_gradient is not None:
        return None
    return Reason("no-input-gradient", "the product that would be used isn't computed",
                  "no gradient of h", "a product of the weighted cotangents with wo")  # fmt: skip


def _replace(match: Match) -> Replacement:
    found: Backward = match.captures["backward"]
    eqns = match.scope.eqns
    members = found.members
    h: Atom = eqns[found.product].invars[0]
    others = {a: None for i in members[:] if i != found.weight_gradient for a in eqns[i].invars}
    given = [a for a in others if a is not found.weighted and a is not h]
    narrow, placed = found.weighted.aval.dtype, found.placed
    places = Places(placed, found.weighted.aval.shape) if placed is not None else None
    routes = () if places is None else places.operands

    def rewritten(g: Any, column: Any, h: Any, *rest: Any) -> Sequence[Any]:
        route, rest = rest[: len(routes)], rest[len(routes) :]
        known = dict(zip(given, rest, strict=True))
        g = lax.convert_element_type(g, narrow)
        if places is not None:
            g, column = places.there(g, column, route)
        column = column.reshape(*h.shape[:-1], 1)
        known[found.weighted] = g
        inputs: Any = _product(eqns[found.input_gradient], known)  # type: ignore[index]
        known[eqns[found.product].invars[0]] = scaled(h, column, h.dtype)
        results = []
        for i in members:
            out = eqns[i].outvars[0].aval
            if i == found.weight_gradient:
                rows = rowwise(inputs, h, out.dtype)
                results.append(rows if places is None else places.back(rows, route))
            elif i == found.input_gradient:
                results.append(scaled(inputs, column, out.dtype))
            else:
                results.append(_product(eqns[i], known))
        return results

    outs = tuple(eqns[i].outvars[0] for i in members)
    operands = (found.cotangents, found.column, h, *routes, *given)
    done = tuple(eqns[i] for i in (*members, found.product))  # as objects, with their operands
    key = (*done, placed.gather, placed.scatter, placed.mask) if placed is not None else done
    return Replacement(operands, outs, rewritten, key, also=members[1:])


def _product(eqn: Eqn, known: dict[Any, Any]) -> Any:
    return eqn.primitive.bind(*(known[a] for a in eqn.invars), **eqn.params)


def _sizes(rows: int, groups: int) -> jax.Array:
    return jnp.full(groups, rows // groups, jnp.int32)


def before(
    h: jax.Array, wo: jax.Array, weights: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of ``h``, ``wo`` and ``weights``, ``[rows]``, from ``g``, ``[rows, d]``."""
    sizes = _sizes(h.shape[0], wo.shape[0])
    weighted = lambda h, wo, w: lax.ragged_dot(h, wo, sizes) * w[:, None]
    gradients: tuple[jax.Array, jax.Array, jax.Array] = jax.vjp(weighted, h, wo, weights)[1](g)
    return gradients


def after(
    h: jax.Array, wo: jax.Array, weights: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same by the two products' gradients at the weighted rows."""
    sizes = _sizes(h.shape[0], wo.shape[0])
    column = weights[:, None]
    (u,) = jax.linear_transpose(lambda h: lax.ragged_dot(h, wo, sizes), h)(g)
    weighted = h * column
    dw = jnp.sum(u * h, axis=-1)
    (dwo,) = jax.linear_transpose(lambda wo: lax.ragged_dot(weighted, wo, sizes), wo)(g)
    dh = u * column
    return dh, dwo, dw.reshape(-1, 1).sum(axis=1)


PASS = Pass(
    name="router_grad_from_wo_input",
    contract=Contract.ROUNDING,
    summary="the gradient of rows' weights, ⟨g, h · wo⟩ → ⟨g · woᵀ, h⟩, which is at hand",
    measure="matrix products",
    suggest="give the weighted product a `jax.custom_vjp` that takes the weights' gradient "
    "from the rows that go into it",
    roots=lambda: products() | {primitive("reduce_sum_p")},
    find=_find,
    requirements=told(_REQUIREMENTS, lambda m: m.captures["backward"].differences),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((32, 16), jnp.float32),
                jax.ShapeDtypeStruct((4, 16, 24), jnp.float32),
                jax.ShapeDtypeStruct((32,), jnp.float32),
                jax.ShapeDtypeStruct((32, 24), jnp.float32),
            ),
            "routed rows",
        ),
    ),
    by_name=True,
)
