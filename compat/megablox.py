"""jax's own grouped GEMM kernel, `jax.experimental.pallas.ops.tpu.megablox.gmm`, in a jaxpr.

It is known by what it is, not by its name: `gmm` is traced again on the same types, and the two
bodies must be one program. A copy of it with changes of its own is another kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import jaxprs, tracing
from .jaxprs import Body, Eqn
from .primitives import primitive
from .same_body import same_body

_known: dict[int, tuple[Body, Megablox | None]] = {}
"""What the bodies looked at so far are, by identity; they are kept so that no other has it."""


@dataclass(frozen=True)
class Megablox:
    """What a call of `gmm` was asked for, besides its operands."""

    transpose_rhs: bool
    dtype: Any
    """Of the result."""


def megablox(eqn: Eqn) -> Megablox | None:
    """The call that an equation is: differentiable as written, or plain as `grad` leaves it.

    Operands are ``lhs, rhs, group_sizes`` and, maybe, ``group_offset``.
    """
    if eqn.primitive is primitive("custom_vjp_call_p"):
        body = jaxprs.opened(eqn.params["call_jaxpr"])
        if len(body.eqns) != 1 or body.eqns[0].primitive is not primitive("jit_p"):
            return None
        (inner,) = body.eqns
        handed_on = list(inner.invars) == list(body.invars) and inner.outvars == body.outvars
        return megablox(inner) if handed_on else None
    if eqn.primitive is not primitive("jit_p") or eqn.params["name"] != "gmm":
        return None  # cheap to say; the name proves nothing
    if len(eqn.outvars) != 1 or len(eqn.invars) not in (3, 4):
        return None
    body = eqn.params["jaxpr"]
    if id(body) not in _known:
        _known[id(body)] = body, _recognised(eqn)
        if len(_known) > 256:
            _known.pop(next(iter(_known)))
    return _known[id(body)][1]


def _recognised(eqn: Eqn) -> Megablox | None:
    # The package's attribute of this name is the function that wraps the module's.
    library = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    call = next(_kernels(eqn.params["jaxpr"]), None)
    avals = [a.aval for a in eqn.invars]
    if call is None or [a.ndim for a in avals] != [2, 3, 1, 0][: len(avals)]:
        return None
    blocks = call.params["grid_mapping"].block_mappings
    try:
        m, k = (b.block_size for b in blocks[0].block_shape)
        _, n = (b.block_size for b in blocks[-1].block_shape)
    except (AttributeError, ValueError):
        return None
    dtype = eqn.outvars[0].aval.dtype
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    for transposed in (False, True):

        def again(
            lhs: Any, rhs: Any, sizes: Any, *offset: Any, transposed: bool = transposed
        ) -> Any:
            return library.gmm(
                lhs, rhs, sizes, dtype, (m, k, n), *offset,
                transpose_rhs=transposed, interpret=call.params["interpret"],
            )  # fmt: skip

        try:
            made = jaxprs.opened(jax.make_jaxpr(again)(*structs)).eqns
        except Exception:  # shapes that gmm doesn't take this way round
            continue
        if len(made) == 1 and same_body(made[0].params["jaxpr"], eqn.params["jaxpr"]):
            return Megablox(transposed, jnp.dtype(dtype))
    return None


def _kernels(body: Body) -> Iterator[Eqn]:
    for eqn in jaxprs.opened(body).eqns:
        if eqn.primitive is tracing.primitive("pallas.pallas_call.pallas_call_p"):
            yield eqn
