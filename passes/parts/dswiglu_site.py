"""The kernel's call in place of a SwiGLU's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ...compat.tracing import call_again
from ...kernels.grouped_dswiglu.api import grouped_dswiglu
from ...matchers.dswiglu import DSwiGlu
from ...matchers.grouped_gemm import GroupedGemm
from ..base import Match, Replacement
from .grouped_checks import one_precision


def replacement_of(match: Match, site: DSwiGlu, gemm: GroupedGemm) -> Replacement:
    """The kernel's call at the GEMM, in place of the gradients as they are read."""
    root, saved, parts = match.eqn, site.saved.arrays, site.parts
    results = tuple(v for i in (match.index, *site.results) for v in match.scope.eqns[i].outvars)
    places = [parts.index(v) if v in parts else None for v in results]
    types = [(v.aval.shape, v.aval.dtype) for v in results]
    together = len(parts) == 1
    gate_first = site.gate_first if together else site.saved.gate_first

    def plain(*operands: Any) -> Any:
        (found,) = call_again(root, [o for o in operands if o is not None])
        return found

    def run(lhs: Any, rhs: Any, sizes: Any, *rest: Any) -> Sequence[Any]:
        given, offset = rest[: len(saved)], rest[len(saved) :]
        done = grouped_dswiglu(
            lhs, rhs, given[0] if len(given) == 1 else (given[0], given[1]), sizes,
            group_offset=offset[0] if offset else None, gate_first=gate_first, together=together,
            transpose_rhs=gemm.transpose_rhs, gemm_dtype=gemm.dtype, out_dtype=parts[0].aval.dtype,
            precision=one_precision(gemm), gemm=plain if gemm.is_kernel else None,
        )  # fmt: skip
        # What has no place nobody reads: it goes with what read it.
        return [
            lax.full(shape, 0, dtype) if at is None else done[at]
            for at, (shape, dtype) in zip(places, types, strict=True)
        ]

    offset = () if gemm.group_offset is None else (gemm.group_offset,)
    operands = (gemm.lhs, gemm.rhs, gemm.group_sizes, *saved, *offset)
    key = (gate_first, len(saved), tuple(places))
    return Replacement(operands, results, run, key, also=site.results)
