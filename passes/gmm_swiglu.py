"""gmm_swiglu: a grouped GEMM and the SwiGLU of its halves become one kernel.

before:  ``gate, up = split(ragged_dot(x, w, sizes), 2, -1); silu(gate) * up``, or two GEMMs of x
after:   one Pallas TPU kernel that activates the float32 accumulators and writes the product

It helps because what the GEMM made, twice as wide as the product, is neither written nor read
again. For 8,192 rows, 4,096 contracted, 2 · 1,024 columns and 64 groups in bfloat16, that is 67 MB
of HBM traffic, 33.6 MB of temporaries (none are left) and the activation's own 23,870 cycles,
bound by HBM (libtpu 0.0.52, `benchmarks/grouped_swiglu_cycles.py`). The GEMMs themselves can't be
compared: the compiler's analysis aborts on a `ragged_dot`, doesn't know how often the kernel's grid
runs, and puts it below what its FLOPs take; `relower cost` counts the weights twice, as the kernel
takes the halves of one array as two operands.

Where a backward, or anything else, reads gate and up, the kernel writes these too, rounded exactly
as the GEMM rounds them: the backward stays what it was. Derivatives of a rewritten forward are
those of the plain program at these values. Off TPU the same is computed in plain jnp. Tracing the
kernel takes some 0.1 s a site.

The GEMM is `lax.ragged_dot`, or megablox' `gmm` as jax ships it, with its group offset: a call is
known by its kernel's body, and a copy with changes of its own is left alone. ``silu(gate)`` is
`jax.nn.silu`, ``gate * sigmoid(gate)``, or written out, ``gate / (1 + exp(-gate))`` or ``gate``
times the reciprocal of that sum; its derivative stays that of the program. Its factors in another
order, with a further one among them, a logistic of a multiple of the gate, and silu of both halves
are reported as declined; a backward of silu that is written out is not looked for by gmm_dswiglu. A
product of differentiated code is rewritten in the forward and where remat computes it again. What
isn't looked for: an activation in a `jit` of its own apart from the GEMM; and a dense ``silu(x ·
wg) * (x · wu)``, which is left to XLA, whose GEMMs take elementwise operations in. A Mosaic kernel
isn't partitioned: under a mesh it has to stand in a `shard_map`. Arrays that are split over devices
without a mesh in scope can't be seen here; there, jax refuses the kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compat.source import source_line
from ..kernels.grouped_swiglu.api import grouped_swiglu
from ..kernels.grouped_swiglu.problem import LANES
from ..matchers.graph import Scope
from ..matchers.grouped_gemm import grouped_gemms, unnamed_param
from ..matchers.near_swiglu import near_swiglu
from ..matchers.pattern import Mismatch
from ..matchers.swiglu import SwiGlu, alike, find_swiglu, narrower
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts import grouped_checks
from .parts.swiglu_site import gemms, needs_of, replacement_of

_DTYPES = (jnp.bfloat16, jnp.float32)


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    name = unnamed_param(scope.eqns[index])
    if name is not None:
        found = repr(scope.eqns[index].params[name])
        return Mismatch(("ragged_dot_general", f"param {name}"), found, "no such param")
    site = find_swiglu(scope, index)
    return near_swiglu(scope, index) if site is None else Match(scope, index, {"site": site})


def _site(match: Match) -> SwiGlu:
    found: SwiGlu = match.captures["site"]
    return found


def _halves(match: Match) -> Reason | None:
    site = _site(match)
    assert site.up is not None
    if alike(match.scope, site.gate, site.up):
        return None
    said = [f"{_part(t.half)} of the GEMM at {source_line(match.scope.eqns[t.gemm])}"
            for t in (site.gate, site.up)]  # fmt: skip
    return Reason("not-halves", "gate and up are not made of the same rows in the same way",
                  ", ".join(said),
                  "the halves of one GEMM, or two GEMMs of the same rows")  # fmt: skip


def _part(half: int | None) -> str:
    return "all" if half is None else ("the first half", "the second half")[half]


def _dimensions(match: Match) -> Reason | None:
    return grouped_checks.dimensions(match, gemms(match.scope, _site(match)))


def _dtypes(match: Match) -> Reason | None:
    site = _site(match)
    one = gemms(match.scope, site)[0]
    out = match.scope.eqns[site.result].outvars[0].aval.dtype
    found = [one.lhs.aval.dtype, one.rhs.aval.dtype, one.dtype, out]
    if found[0] == found[1] and all(d in _DTYPES for d in found):
        return None
    return Reason("dtype", "the kernel has no such types", ", ".join(map(str, found)),
                  "operands of one type, and all in bfloat16 or float32")  # fmt: skip


def _precision(match: Match) -> Reason | None:
    return grouped_checks.precision(gemms(match.scope, _site(match))[0])


def _casts(match: Match) -> Reason | None:
    site = _site(match)
    assert site.up is not None
    kept = gemms(match.scope, site)[0].dtype
    between = (*site.gate.casts, *site.up.casts, *site.casts, site.silu_dtype)
    found = [str(d) for d in between if narrower(d, kept)]
    if not found:
        return None
    return Reason("narrowing-cast", "a value between is rounded to a narrower type on purpose",
                  ", ".join(found), f"{kept}, which the GEMM writes, or wider")  # fmt: skip


def _readers(match: Match) -> Reason | None:
    return grouped_checks.other_readers(
        match, needs_of(match.scope, _site(match)).others,
        "what the GEMM made is read as a whole, too", "readers of its halves only",
    )  # fmt: skip


def _names(match: Match) -> Reason | None:
    gone = needs_of(match.scope, _site(match)).vanishing
    if not gone:
        return None
    found = [repr(match.scope.eqns[i].params["name"]) for i in gone]
    return Reason("named", "a remat policy may save a value that would no longer exist",
                  f"the name {', '.join(found)}",
                  "no name, or one that something reads")  # fmt: skip


def _width(match: Match) -> Reason | None:
    site = _site(match)
    columns = match.scope.eqns[site.product].outvars[0].aval.shape[-1]
    return grouped_checks.width(gemms(match.scope, site)[0], columns, "of each half")


def _replace(match: Match) -> Replacement:
    return replacement_of(match.scope, _site(match))


def before(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows ``[m, k]`` of groups of these sizes, weights ``[groups, k, 2 · n]``."""
    gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, axis=-1)
    return jax.nn.silu(gate) * up


def after(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """The same by one kernel."""
    return grouped_swiglu(x, w, sizes)[0]


PASS = Pass(
    name="gmm_swiglu",
    contract=Contract.ROUNDING,
    summary="silu(gate) * up of a grouped GEMM's halves → one kernel",
    measure="products of an activated gate with what the same rows' GEMM made",
    suggest="call `relower.kernels.grouped_swiglu` where the GEMM and `silu(gate) * up` stand",
    roots=grouped_gemms,
    find=_find,
    requirements=(
        Requirement("not-halves", "Gate and up are the two halves of one GEMM, or two GEMMs of the "
                    "same rows, alike in everything but their weights.", _halves),
        Requirement("dimensions", "Rows are grouped, and each group has a matrix.", _dimensions),
        Requirement("dtype", "All types are bfloat16 or float32.", _dtypes),
        Requirement("precision", "The GEMM is of default precision, or HIGHEST.", _precision),
        Requirement("narrowing-cast", "No value between is narrower than what the GEMM writes.",
                    _casts),
        Requirement("other-reader", "Nothing reads the two halves together.", _readers),
        Requirement("named", "No value that has a name vanishes.", _names),
        Requirement("width", f"Widths are multiples of {LANES}.", _width),
        Requirement("mesh", "Every axis of a mesh in scope is manual.", grouped_checks.mesh),
    ),
    profitable=grouped_checks.no_rows,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((32, 128), jnp.float32),
                jax.ShapeDtypeStruct((4, 128, 256), jnp.float32),
                np.array([5, 0, 20, 3], np.int32),
            ),
            "four groups",
        ),
    ),
)  # fmt: skip
