"""gmm_dswiglu: a SwiGLU's backward moves into the grouped GEMM that makes its cotangent.

before:  ``dh = ragged_dot(g, woᵀ, sizes)``; ``d_gate, d_up`` of ``dh``, gate and up; side by side
after:   one Pallas TPU kernel that reads gate and up tile by tile and writes ``[d_gate | d_up]``

It helps because ``dh`` is neither written nor read again, and of what the forward left only gate
and up are read: the logistic is computed again where it is needed. For 8,192 rows, 4,096
contracted, 1,024 columns and 64 groups in bfloat16, that is 34 MB of HBM traffic and the gradients'
own 55,697 cycles, bound by HBM (libtpu 0.0.52, `benchmarks/grouped_dswiglu_cycles.py`). The GEMMs
themselves can't be compared, as with gmm_swiglu: the compiler's analysis has no figure for either.

``dh`` isn't rounded before it is multiplied, and each gradient once. Gate and up are read where the
forward put them: the halves of what a GEMM wrote, or two arrays, as gmm_swiglu writes them, which
goes first. The result is what the backward of the input's GEMM reads: side by side in the order of
the program, or two arrays where there were two GEMMs.

Which values are the two gradients is seen from what they compute, ``dh · up · silu'(gate)`` and
``dh · gate · logistic(gate)`` as polynomials, and not from how it is spelled; through `jit`, in
bodies of `scan` that read what the forward loop has stacked, and where remat computes gate and up
again. Where the rows' weights' gradient reads ``dh`` too, as router_grad_from_wo_input leaves it,
that pass has the site. As with gmm_swiglu, the GEMM is `lax.ragged_dot` or megablox' `gmm`, and
under a mesh it has to stand in a `shard_map`. Rows that don't fill the last tile are cut off the
result again, which copies it: 128 rows divide most buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..kernels.grouped_dswiglu.api import grouped_dswiglu
from ..kernels.grouped_swiglu.problem import LANES
from ..matchers.dswiglu import DSwiGlu, find_dswiglu
from ..matchers.graph import Scope
from ..matchers.grouped_gemm import GroupedGemm, grouped_gemm, grouped_gemms
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts import grouped_checks
from .parts.dswiglu_site import replacement_of

_DTYPES = (jnp.bfloat16, jnp.float32)


def _find(scope: Scope, index: int) -> Match | None:
    site = find_dswiglu(scope, index)
    return None if site is None else Match(scope, index, {"site": site})


def _site(match: Match) -> tuple[DSwiGlu, GroupedGemm]:
    gemm = grouped_gemm(match.eqn)
    assert gemm is not None
    return match.captures["site"], gemm


def _dimensions(match: Match) -> Reason | None:
    return grouped_checks.dimensions(match, [_site(match)[1]])


def _body(match: Match) -> Reason | None:
    elsewhere = match.captures["site"]
    if not isinstance(elsewhere, str):
        return None
    return Reason("another-body", "the GEMM's result is handed to a body that differentiates there",
                  elsewhere, "both in one body, as where remat takes in the whole MLP")  # fmt: skip


def _at_hand(match: Match) -> Reason | None:
    if _site(match)[0].saved.arrays:
        return None
    return Reason("not-at-hand", "gate or up was computed elsewhere and isn't handed over",
                  "values made of them", "both in the body of the backward")  # fmt: skip


def _dtypes(match: Match) -> Reason | None:
    site, gemm = _site(match)
    saved = {a.aval.dtype for a in site.saved.arrays}
    written = {v.aval.dtype for v in site.parts}
    found = [gemm.lhs.aval.dtype, gemm.rhs.aval.dtype, gemm.dtype, *saved, *written]
    alike = found[0] == found[1] and len(saved) <= 1 and len(written) == 1
    if alike and all(d in _DTYPES for d in found):
        return None
    return Reason("dtype", "the kernel has no such types", ", ".join(map(str, found)),
                  "operands of one type, and all in bfloat16 or float32")  # fmt: skip


def _precision(match: Match) -> Reason | None:
    return grouped_checks.precision(_site(match)[1])


def _casts(match: Match) -> Reason | None:
    found = _site(match)[0].narrowed
    if not found:
        return None
    return Reason("narrowing-cast", "a value between is rounded to a narrower type on purpose",
                  ", ".join(map(str, found)), "rounding of the gradients only")  # fmt: skip


def _weighted(match: Match) -> Reason | None:
    if not _site(match)[0].weighted:
        return None
    return Reason("weighted", "the kernel doesn't weight rows",
                  "a further factor of both gradients", "the GEMM's result as it is")  # fmt: skip


def _readers(match: Match) -> Reason | None:
    return grouped_checks.other_readers(
        match, _site(match)[0].others, "what would no longer be written is read elsewhere, too",
        "the gradients of gate and up only",
    )  # fmt: skip


def _width(match: Match) -> Reason | None:
    return grouped_checks.width(_site(match)[1], match.eqn.outvars[0].aval.shape[-1], "columns")


_CHECKS = (
    ("dimensions", "Rows are grouped, and each group has a matrix.", _dimensions),
    ("not-at-hand", "Gate and up are values of the backward's body.", _at_hand),
    ("dtype", "All types are bfloat16 or float32.", _dtypes),
    ("precision", "The GEMM is of default precision, or HIGHEST.", _precision),
    ("narrowing-cast", "No value between is rounded to a narrower type.", _casts),
    ("weighted", "The cotangent is multiplied by nothing but what SwiGLU's derivative has.",
     _weighted),
    ("other-reader", "Nothing else reads the cotangent, or what is made of it on the way.",
     _readers),
    ("width", f"Widths are multiples of {LANES}.", _width),
    ("mesh", "Every axis of a mesh in scope is manual.", grouped_checks.mesh),
)  # fmt: skip


def _here(check: Callable[[Match], Reason | None]) -> Callable[[Match], Reason | None]:
    """A check of what is found in the GEMM's own body."""
    return lambda match: None if isinstance(match.captures["site"], str) else check(match)


def _replace(match: Match) -> Replacement:
    return replacement_of(match, *_site(match))


_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def before(g: jax.Array, wo: jax.Array, both: jax.Array, sizes: jax.Array) -> jax.Array:
    """The cotangents of gate and up, ``[m, 2 · n]``, from those of ``h · wo``, ``[m, d]``."""
    gate, up = jnp.split(both, 2, axis=-1)
    _, back = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    dh = lax.ragged_dot_general(g, wo, sizes, _TRANSPOSED)
    return jnp.concatenate(back(dh), axis=-1)


def after(g: jax.Array, wo: jax.Array, both: jax.Array, sizes: jax.Array) -> jax.Array:
    """The same by one kernel."""
    return grouped_dswiglu(g, wo, both, sizes)[0]


PASS = Pass(
    name="gmm_dswiglu",
    contract=Contract.ROUNDING,
    summary="the backward of silu(gate) * up and the grouped GEMM before it → one kernel",
    measure="gradients of a gate that are computed of a grouped GEMM's result",
    suggest="give the layer a `jax.custom_vjp` whose backward calls "
    "`relower.kernels.grouped_dswiglu`",
    roots=grouped_gemms,
    find=_find,
    requirements=(
        Requirement("another-body", "The gradients are computed in the body of the GEMM.", _body),
        *(Requirement(code, sentence, _here(check)) for code, sentence, check in _CHECKS),
    ),
    profitable=grouped_checks.no_rows,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((32, 128), jnp.float32),
                jax.ShapeDtypeStruct((4, 128, 128), jnp.float32),
                jax.ShapeDtypeStruct((32, 256), jnp.float32),
                np.array([5, 0, 20, 3], np.int32),
            ),
            "four groups",
        ),
    ),
    yields_to=("concat_cotangents", "router_grad_from_wo_input", "shared_lhs_dot", "gmm_swiglu"),
)  # fmt: skip
