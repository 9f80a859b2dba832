"""Recognise a grouped GEMM: rows of consecutive groups, each times its group's matrix.

That is `lax.ragged_dot`, or a call of jax's own kernel, megablox' `gmm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import lax

from ..compat.jaxprs import Atom, Eqn
from ..compat.megablox import megablox
from ..compat.primitives import primitive

_PARAMS = frozenset({
    "ragged_dot_dimension_numbers", "precision", "preferred_element_type", "group_offset",
    "out_sharding",
})  # fmt: skip


@dataclass(frozen=True)
class GroupedGemm:
    """``out[row] = lhs[row] · rhs[group of row]``."""

    lhs: Atom
    """``[m, k]``."""
    rhs: Atom
    """``[groups, k, n]``, or ``[groups, n, k]`` where transposed."""
    group_sizes: Atom
    transpose_rhs: bool
    dtype: Any
    """Of the result, rounded from a float32 accumulator."""
    precision: Any
    group_offset: Atom | None = None
    """Which group of all the first of ``rhs`` is for; None for the first."""
    is_kernel: bool = False
    """Whether it is a kernel with a derivative of its own."""
    plain: bool = True
    """Whether the dimensions are those above; nothing else is meant by the other fields if not."""

    @property
    def output_axis(self) -> int:
        """The axis of ``rhs`` that the result has too."""
        return 1 if self.transpose_rhs else 2


def grouped_gemms() -> frozenset[Any]:
    """The primitives that may be one."""
    names = ("ragged_dot_general_p", "jit_p", "custom_vjp_call_p")
    return frozenset(primitive(n) for n in names)


def unnamed_param(eqn: Eqn) -> str | None:
    """A param of a `lax.ragged_dot` that this file doesn't know."""
    if eqn.primitive is not primitive("ragged_dot_general_p"):
        return None
    return min(set(eqn.params) - _PARAMS, default=None)


def grouped_gemm(eqn: Eqn) -> GroupedGemm | None:
    """The grouped GEMM that an equation is; None if it is something else."""
    if eqn.primitive is not primitive("ragged_dot_general_p"):
        call = megablox(eqn)
        if call is None:
            return None
        offset = eqn.invars[3] if len(eqn.invars) > 3 else None
        lhs, rhs, sizes = eqn.invars[:3]
        return GroupedGemm(lhs, rhs, sizes, call.transpose_rhs, call.dtype, None, offset, True)
    if unnamed_param(eqn):
        return None
    lhs, rhs, sizes = eqn.invars[:3]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted = tuple(map(tuple, numbers.dot_dimension_numbers[0]))
    plain = (
        len(eqn.invars) == 3
        and lhs.aval.ndim == 2
        and rhs.aval.ndim == 3
        and sizes.aval.ndim == 1
        and eqn.params["group_offset"] is None
        and _is_whole(eqn.params["out_sharding"])
        and tuple(map(tuple, numbers.dot_dimension_numbers[1])) == ((), ())
        and contracted in (((1,), (1,)), ((1,), (2,)))
        and tuple(numbers.lhs_ragged_dimensions) == (0,)
        and tuple(numbers.rhs_group_dimensions) == (0,)
    )
    return GroupedGemm(lhs, rhs, sizes, contracted == ((1,), (2,)), eqn.outvars[0].aval.dtype,
                       eqn.params["precision"], plain=plain)  # fmt: skip


def _is_whole(sharding: Any) -> bool:
    """Whether no axis is split; jax's transposes state even that."""
    return sharding is None or all(part is None for part in sharding.spec)


def default_or_highest(precision: Any) -> bool:
    """Whether a kernel's products can be taken in this precision: the default, or all of float32's.

    A pair states one for each operand.
    """
    known = (None, lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    if isinstance(precision, tuple):
        return len(set(precision)) == 1 and precision[0] in known
    return precision in known
