"""router_grad_from_wo_input: weights' gradients from what goes into a product, not what comes out.

before:  of ``y = h @ wo`` weighted row by row: ``dw = (g * y).sum(-1)``, ``d = w * g``,
         ``dh = d @ wo.T``, ``dwo = h.T @ d``
after:   ``u = g @ wo.T``, ``dw = (u * h).sum(-1)``, ``dh = w * u``, ``dwo = (w * h).T @ g``

This is the backward of a mixture of experts' routed rows. ``y`` is as large as all of them, so that
it is computed again in a rematerialised backward, and for nothing but the weights' gradient; as
``⟨g, h · wo⟩ = ⟨g · woᵀ, h⟩`` that needs a product which the backward computes anyway. One matrix
product of three is gone, of ``lax.ragged_dot`` or of ``dot_general``, batched or not.

Where every expert works on every token, ``y`` may be combined by ``einsum("etd,te->td", y, w)``, or
by a sum of ``y * w[..., None]`` in another order of axes than the product's. The product itself has
to be one of rows with matrices.

The compiler doesn't know of it. For bf16 rows [16384, 1024] and d = 4,096 the products are
275 GFLOP, and were 412; with ``lax.ragged_dot`` in 8 groups, compiled for TPU7x (libtpu 0.0.52),
temporary memory is 101 MB, and was 135. (The analysis of cycles dies on the rewritten programs.)
Done by hand to a large mixture-of-experts trainer, it took 0.257 s off a micro-batch of 10 s on 128
TPUs v7x.

Errors. ``g @ wo.T`` is kept as it is added up, in float32, for the sum over each row and for
``dh``: where the rows were rounded to bfloat16 before they were multiplied with ``g``, nothing is
rounded there now, so that against float64 ``dw`` is exact to float32 and ``dh`` has 0.71 times the
error. ``dwo`` has the same, one rounding of ``w * h`` for one of ``w * g``. Cotangents that
bfloat16 doesn't hold are rounded without the weights in them, instead of with them; ``dwo`` is then
left as it was, and the errors of the others are 1.0 times the original's. Where the rows were not
rounded, as in float32 throughout, ``dw`` adds up ``d`` products and then ``m``, where it was the
other way round, and its error grows with the first number: 0.75 to 1.02 times the original's for
``d <= 3/4 m`` (m of 128 to 1,024), to 1.11 for ``d = m``, to 1.37 for more. The first is asked for.
At default precision a TPU's products of float32 round their operands, as many before as after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from ..matchers.graph import Scope
from ..matchers.held import is_held
from ..matchers.swiglu import narrower
from ..matchers.weighted_rows import Backward, backwards, products
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts.told import told
from .parts.weighted_rows import Places, Turned, rowwise, scaled

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


def _sums(match: Match) -> Reason | None:
    """Whether what was one rounding or sum is no worse a one now."""
    found: Backward = match.captures["backward"]
    product = match.scope.eqns[found.product]
    said = "layout" in found.differences
    if said or found.product < 0 or product.primitive not in products():
        return None  # said already
    rows, h = product.outvars[0].aval, product.invars[0].aval
    if narrower(rows.dtype, jnp.float32):
        return None
    if narrower(found.weighted.aval.dtype, rows.dtype):
        return Reason("rounded-cotangents", "the cotangents would be rounded, as the rows aren't",
                      str(found.weighted.aval.dtype), str(rows.dtype))  # fmt: skip
    d, m = rows.shape[-1], h.shape[-1]
    if 4 * d <= 3 * m:
        return None
    return Reason("longer-sum", "the sums would be longer than those of the rows, and less exact",
                  f"{d} terms in {rows.dtype}",
                  f"at most three for four of m = {m}, or rows of fewer bits")  # fmt: skip


def _only(code: str) -> Callable[[Match], Reason | None]:
    def check(match: Match) -> Reason | None:
        found = _sums(match)
        return found if found is not None and found.code == code else None

    return check


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
    narrow = found.weighted.aval.dtype
    # Otherwise they would be rounded, and the weighted rows too.
    held = is_held(match.scope, found.cotangents, narrow)
    members = tuple(i for i in found.members if held or i not in found.wo_gradients)
    h: Atom = eqns[found.product].invars[0]
    others = {a: None for i in members[:] if i != found.weight_gradient for a in eqns[i].invars}
    given = [a for a in others if a is not found.weighted and a is not h]
    placed, spread = found.placed, found.spread
    places: Places | Turned | None = None
    if placed is not None:
        places = Places(placed, found.weighted.aval.shape)
    elif spread is not None:
        places = Turned(spread, found.result_dims, found.weighted.aval.shape)
    routes = () if places is None else places.operands

    def rewritten(g: Any, column: Any, h: Any, *rest: Any) -> Sequence[Any]:
        route, rest = rest[: len(routes)], rest[len(routes) :]
        known = dict(zip(given, rest, strict=True))
        g = lax.convert_element_type(g, narrow)
        if places is not None:
            g, column = places.there(g, column, route)
        column = column.reshape(*h.shape[:-1], 1)
        known[found.weighted] = g
        inputs: Any = _product(eqns[found.input_gradient], known, wide=True)  # type: ignore[index]
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
    done = (*done, held, found.result_dims)
    key = (*done, placed.gather, placed.scatter, placed.mask) if placed is not None else done
    return Replacement(operands, outs, rewritten, key, also=members[1:])


def _product(eqn: Eqn, known: dict[Any, Any], wide: bool = False) -> Any:
    """The product of other operands; if ``wide``, as it is added up, in float32 at least."""
    params = dict(eqn.params)
    if wide and narrower(eqn.outvars[0].aval.dtype, jnp.float32):
        params["preferred_element_type"] = jnp.dtype(jnp.float32)
    return eqn.primitive.bind(*(known[a] for a in eqn.invars), **params)


def _sizes(rows: int, groups: int) -> jax.Array:
    return jnp.full(groups, rows // groups, jnp.int32)


_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


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
    u = lax.ragged_dot_general(g, wo, sizes, _TRANSPOSED, preferred_element_type=jnp.float32)
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
    requirements=(
        *told(_REQUIREMENTS, lambda m: m.captures["backward"].differences),
        Requirement(
            "rounded-cotangents",
            "Where the rows aren't rounded, the weighted cotangents aren't either.",
            _only("rounded-cotangents"),
        ),
        Requirement(
            "longer-sum",
            "The rows are rounded to fewer bits than float32, or no wider than h.",
            _only("longer-sum"),
        ),
    ),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((32, 24), jnp.float32),
                jax.ShapeDtypeStruct((4, 24, 16), jnp.float32),
                jax.ShapeDtypeStruct((32,), jnp.float32),
                jax.ShapeDtypeStruct((32, 16), jnp.float32),
            ),
            "routed rows",
        ),
    ),
)
