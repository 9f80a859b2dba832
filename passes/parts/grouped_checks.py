"""What a kernel in place of a grouped GEMM requires, whatever its epilogue computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...compat.primitives import axes_not_manual
from ...kernels.grouped_swiglu.problem import LANES
from ...matchers.graph import OUTPUT
from ...matchers.grouped_gemm import GroupedGemm, default_or_highest
from ..base import Match, Reason


def dimensions(match: Match, gemms: Sequence[GroupedGemm]) -> Reason | None:
    """Rows are grouped, and each group has a matrix."""
    if all(g.plain for g in gemms):
        return None
    found = match.eqn.params.get("ragged_dot_dimension_numbers")
    return Reason("dimensions", "the GEMM is of another layout", str(found),
                  "[m, k] · [groups, k, n], or [groups, n, k]")  # fmt: skip


def precision(gemm: GroupedGemm) -> Reason | None:
    """The GEMM is of default precision, or HIGHEST."""
    if default_or_highest(gemm.precision):
        return None
    return Reason("precision", "the kernel can't multiply in this precision", str(gemm.precision),
                  "the default, or HIGHEST")  # fmt: skip


def one_precision(gemm: GroupedGemm) -> Any:
    """The precision of both operands, where a pair states one for each."""
    return gemm.precision[0] if isinstance(gemm.precision, tuple) else gemm.precision


def width(gemm: GroupedGemm, columns: int, what: str) -> Reason | None:
    """Widths are multiples of `LANES`."""
    contracted = gemm.lhs.aval.shape[-1]
    if not gemm.plain or (columns % LANES == 0 and contracted % LANES == 0):
        return None
    return Reason("width", "tiles would not divide the matrices", f"{contracted} contracted, "
                  f"{columns} {what}", f"multiples of {LANES}")  # fmt: skip


def other_readers(match: Match, others: Sequence[int], sentence: str, wanted: str) -> Reason | None:
    """Nothing else reads what would no longer be there."""
    if not others:
        return None
    found = ["an output" if i == OUTPUT else match.scope.eqns[i].primitive.name for i in others]
    return Reason("other-reader", sentence, ", ".join(found), wanted)


def mesh(match: Match) -> Reason | None:
    """Every axis of a mesh in scope is manual."""
    found = axes_not_manual(match.eqn)
    if not found:
        return None
    axes = ", ".join(f"{n}={s}" for n, s in found.items())
    return Reason("mesh", "a Mosaic kernel isn't partitioned by the compiler", axes,
                  "a shard_map over all axes of the mesh")  # fmt: skip


def no_rows(match: Match) -> Reason | None:
    """There is something to compute."""
    if match.eqn.invars[0].aval.shape[0]:
        return None
    return Reason("no-rows", "there is nothing to compute", "0 rows", "at least one")
