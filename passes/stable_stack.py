"""stable_stack: rows that a Pallas kernel stacks are stacked as whole tiles.

before:  ``stack([row, …])``, each ``f32[1, …, 1, dim]``, to ``f32[tokens, 1, …, 1, dim]``
after:   ``concatenate([row.reshape(dim / 1024, 8, 128), …]).reshape(tokens, 1, …, 1, dim)``

A stack of rows has a second-minor dimension of 1, which a TPU compiler may pad to the 8 sublanes of
a register: each row then takes eight times the registers that it fills. A row of 1024 elements
fills one when it is viewed as ``[8, 128]``, and rows so viewed lie one behind the other whatever
the compiler does. Elements are moved and nothing is computed. Of the kernel only the stack changes:
its name, metadata, grid, reads and writes stay.

Done by hand to the convolutions of a large trainer, it took 1.2 s off a step of 87 s. With today's
compiler, libtpu 0.0.52, it depends on the kernel. For one on bf16[512,4096] that makes four stacks
of 16 rows in a block of 64, the estimate falls from 30,488 TPU7x cycles in 3,712 bundles to 23,644
in 2,858. With one stack in a block of 16, on bf16[256,4096], it rises from 11,903 in 718 to 12,793
in 773; and where that kernel's output keeps the dimension of 1, nothing changes, 10,986 in 697. So
the pass runs only where it is asked for by name: `relower cost` says whether it pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from ..compat.weak_types import weak
from ..matchers.graph import Scope
from ..matchers.in_kernel import in_kernel
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement

TILE = (8, 128)
"""Sublanes and lanes of a float32 register."""

_PARAMS = {"stack": {"axis"}, "concatenate": {"dimension"}}


def _find(scope: Scope, index: int) -> Match | None:
    eqn = scope.eqns[index]
    if set(eqn.params) - _PARAMS[eqn.primitive.name] or len(eqn.invars) < 2:
        return None
    if in_kernel(scope) is not True or any(jaxprs.is_literal(a) for a in eqn.invars):
        return None
    rows = tuple(eqn.invars)
    axis = eqn.params.get("axis")
    if axis is None:
        axis = eqn.params["dimension"]
        expanded = [_expanded(scope, a, axis) for a in rows]
        # Concatenations of another kind are no near miss of a stack.
        if any(a is None for a in expanded):
            return None
        rows = tuple(a for a in expanded if a is not None)
    return Match(scope, index, {"rows": rows, "axis": axis})


def _expanded(scope: Scope, atom: Atom, axis: int) -> Atom | None:
    """The row that an equation gave a new dimension of one, along which it is concatenated."""
    found = scope.definition(atom)
    eqn = None if found is None else scope.eqns[found[0]]
    if eqn is None or eqn.primitive is not primitive("broadcast_in_dim_p"):
        return None
    row, rank = eqn.invars[0], len(atom.aval.shape)
    others = tuple(d for d in range(rank) if d != axis)
    whole = not jaxprs.is_literal(row) and math.prod(row.aval.shape) == math.prod(atom.aval.shape)
    return row if whole and tuple(eqn.params["broadcast_dimensions"]) == others else None


def _row(match: Match) -> Any:
    return match.captures["rows"][0].aval


def _dtype(match: Match) -> Reason | None:
    if _row(match).dtype == np.float32:
        return None
    return Reason("dtype", "a tile of 8 sublanes and 128 lanes is one of 32-bit floats",
                  str(_row(match).dtype), "float32")  # fmt: skip


def _single(match: Match) -> Reason | None:
    shape = _row(match).shape
    if len(shape) >= 1 and all(n == 1 for n in shape[:-1]):
        return None
    return Reason("batched", "what is stacked is no single row", f"rows of shape {shape}",
                  "1 in all dimensions but the last")  # fmt: skip


def _token_major(match: Match) -> Reason | None:
    rank = match.eqn.outvars[0].aval.ndim
    if match.captures["axis"] < rank - 1:
        return None
    return Reason("token-minor", "the rows become the last dimension",
                  "a stack along the last axis", "one along an axis in front")  # fmt: skip


def _padded(match: Match) -> Reason | None:
    shape = match.eqn.outvars[0].aval.shape
    if _single(match) or _token_major(match) or (len(shape) >= 2 and shape[-2] == 1):
        return None  # or said already
    return Reason("dense", "the rows are stacked as sublanes already", f"a result of shape {shape}",
                  "a second dimension from the end of 1")  # fmt: skip


def _width(match: Match) -> Reason | None:
    shape, tile = _row(match).shape, math.prod(TILE)
    if shape and shape[-1] and shape[-1] % tile == 0:
        return None
    return Reason("width", "a row doesn't fill whole tiles", f"rows of {shape[-1:]} elements",
                  f"a multiple of {tile}")  # fmt: skip


def _replace(match: Match) -> Replacement:
    out, rows = match.eqn.outvars[0].aval, match.captures["rows"]

    def dense(*rows: jax.Array) -> Sequence[Any]:
        tiles = [row.reshape(-1, *TILE) for row in rows]
        stacked = lax.concatenate(tiles, 0).reshape(out.shape)
        return [weak(stacked) if out.weak_type else stacked]

    return Replacement(rows, tuple(match.eqn.outvars), dense, out.shape)


def _kernel(stack: Any, x: jax.Array) -> jax.Array:
    def body(x_ref: Any, out_ref: Any) -> None:
        rows = [x_ref[i : i + 1, :] * 2.0 for i in range(x_ref.shape[0])]
        out_ref[...] = stack(rows).reshape(out_ref.shape)

    found: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="doubled",
        interpret=jax.default_backend() != "tpu",
    )(x)
    return found


def before(x: jax.Array) -> jax.Array:
    """``2 x`` by a kernel that stacks the rows, ``f32[tokens, dim]``."""
    return _kernel(jnp.stack, x)


def after(x: jax.Array) -> jax.Array:
    """The same, with whole tiles stacked."""

    def stack(rows: Sequence[jax.Array]) -> jax.Array:
        tiles = jnp.concatenate([row.reshape(-1, 8, 128) for row in rows])
        return tiles.reshape(len(rows), *rows[0].shape)

    return _kernel(stack, x)


PASS = Pass(
    name="stable_stack",
    contract=Contract.BITWISE,
    summary="in a kernel, stack of f32[1, dim] rows → concatenate of their [dim / 1024, 8, 128]",
    measure="stacks with a second-minor dimension of 1",
    suggest="in the kernel, view each row as `row.reshape(dim // 1024, 8, 128)` and "
    "concatenate the views",
    roots=lambda: frozenset({primitive("stack_p"), primitive("concatenate_p")} - {None}),
    find=_find,
    requirements=(
        Requirement("dtype", "The rows are of float32.", _dtype),
        Requirement("batched", "Each is a single row.", _single),
        Requirement("token-minor", "They don't become the last dimension.", _token_major),
        Requirement("dense", "The result's second dimension from the end is 1.", _padded),
        Requirement("width", "A row is a multiple of 1024 long.", _width),
    ),
    profitable=lambda match: None,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (Example((jax.ShapeDtypeStruct((4, 1024), jnp.float32),), "four rows"),),
    by_name=True,
)
