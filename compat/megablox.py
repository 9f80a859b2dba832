"""jax's own grouped GEMM kernel, `jax.experimental.pallas.ops.tpu.megablox.gmm`, in a jaxpr.

It is known by what it is, not by its name: `gmm` is traced again on the same types, and the two
bodies must be one program. A copy of it with changes of its own is another kernel.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    tiling: tuple[int, int, int]
    """Rows, contracted elements and columns of a tile."""
    interpret: Any

    def of(self, lhs: Any, rhs: Any, sizes: Any, *offset: Any) -> Any:
        """The call on operands, made by `gmm` itself.

        The package's attribute of this name is the function that wraps the module's.
        """
        library = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
        return library.gmm(
            lhs, rhs, sizes, self.dtype, self.tiling, *offset,
            transpose_rhs=self.transpose_rhs, interpret=self.interpret,
        )  # fmt: skip


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
    """What `gmm` was asked for, in the surroundings of the call.

    Its body states the mesh around it. Whether there were 64-bit types, and which precision was the
    default, an equation doesn't say: as they are here, or else as jax has them by itself.
    """
    here = bool(jax.config.jax_enable_x64), jax.config.jax_default_matmul_precision
    for wide, precision in dict.fromkeys((here, (False, None))):
        with eqn.ctx.manager, jax.enable_x64(wide), jax.default_matmul_precision(precision):
            found = _made_by(eqn)
        if found is not None:
            return found
    return None


def _made_by(eqn: Eqn) -> Megablox | None:
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
        asked = Megablox(transposed, jnp.dtype(dtype), (m, k, n), call.params["interpret"])
        try:
            made = jaxprs.opened(jax.make_jaxpr(asked.of)(*structs)).eqns
        except Exception:  # shapes that gmm doesn't take this way round
            continue
        if len(made) == 1 and same_body(made[0].params["jaxpr"], eqn.params["jaxpr"]):
            return asked
    return None


def at_other_shapes(eqn: Eqn, operands: Sequence[Any]) -> Any:
    """The plain call of `gmm` that an equation is, on operands of other sizes, in tiles that fit.

    Raises:
        ValueError: `gmm` doesn't make the equation's own call as it stands, as under another
            target, or has no tiles for these sizes.
    """
    asked = _recognised(eqn)
    if asked is None:
        raise ValueError("the grouped GEMM's kernel is made otherwise here than in the program")
    (m, k, n), (lhs, rhs, *_) = asked.tiling, operands
    columns = rhs.shape[1 if asked.transpose_rhs else 2]
    tiling = math.gcd(lhs.shape[0], m), min(lhs.shape[1], k), min(columns, n)
    return replace(asked, tiling=tiling).of(*operands)


def _kernels(body: Body) -> Iterator[Eqn]:
    for eqn in jaxprs.opened(body).eqns:
        if eqn.primitive is tracing.primitive("pallas.pallas_call.pallas_call_p"):
            yield eqn
