"""jax's own grouped GEMM kernel, megablox' `gmm`, in a site: made again at other shapes, and exact.

What its kernel does with tiles has no rule for other shapes, and none in higher precision. But the
call is known by what it is (`compat.megablox`), so `gmm` itself makes it again, and what it
computes is a matrix product of each group's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...compat.jaxprs import Eqn
from ...compat.megablox import Megablox, megablox
from ...compat.primitives import primitive

_compiled: dict[int, tuple[Eqn, Any]] = {}
"""By identity, kernels that were run, kept so that no other has it; compiling takes most time."""
_MOST = 64
_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def kernel_gemm(eqn: Eqn) -> Megablox | None:
    """The call of `gmm` that an equation is, itself and not what wraps it."""
    return megablox(eqn) if eqn.primitive is primitive("jit_p") else None


def interpreted(eqn: Eqn, operands: Sequence[Any]) -> list[Any]:
    """A Pallas kernel run by Pallas' own interpreter, as no CPU compiles one for a TPU."""
    if id(eqn) not in _compiled:
        params = eqn.primitive.get_bind_params({**eqn.params, "interpret": True})
        _compiled[id(eqn)] = eqn, jax.jit(lambda *values: eqn.primitive.bind(*values, **params))
        if len(_compiled) > _MOST:
            _compiled.pop(next(iter(_compiled)))
    return list(_compiled[id(eqn)][1](*operands))


def exact_gemm(call: Megablox, operands: Sequence[Any]) -> Any:
    """What a call computes, of operands in float64; rows of no group are zero.

    It says nothing of how relower's own kernels compute it, which are judged by it.
    """
    lhs, rhs, sizes, *offset = operands
    if offset:
        every = jnp.zeros((sizes.shape[0], *rhs.shape[1:]), rhs.dtype)
        rhs = lax.dynamic_update_slice_in_dim(every, rhs, offset[0], 0)
    if call.transpose_rhs:
        return lax.ragged_dot_general(lhs, rhs, sizes, _TRANSPOSED)
    return lax.ragged_dot(lhs, rhs, sizes)
