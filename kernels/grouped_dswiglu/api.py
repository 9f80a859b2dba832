"""The backward of a grouped SwiGLU as a function: the kernel on TPU, plain jnp elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..grouped_swiglu.problem import Tiling
from ..one_by_one import one_by_one
from . import reference, tpu
from .problem import Problem

Gemm = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
Function = Callable[..., tuple[jax.Array, ...]]


def grouped_dswiglu(
    lhs: jax.Array,
    rhs: jax.Array,
    saved: jax.Array | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    gate_first: bool = True,
    together: bool = True,
    transpose_rhs: bool = True,
    gemm_dtype: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
    tiling: Tiling | None = None,
    gemm: Gemm | None = None,
) -> tuple[jax.Array, ...]:
    """The gradients of gate and up, where ``silu(gate) * up`` goes into a grouped GEMM.

    With ``dh = lhs · rhsᵀ`` by groups of rows, kept in float32, ``d_gate = dh * up * silu'(gate)``
    and ``d_up = dh * silu(gate)``, each rounded once.

    Args:
      lhs: ``[m, k]``, bfloat16 or float32, the cotangents of the GEMM's result; rows of a group
        are consecutive.
      rhs: ``[groups, n, k]``, the GEMM's weights; without ``transpose_rhs``, ``[groups, k, n]``.
      saved: gate and up side by side, ``[m, 2 · n]``, or the two apart, ``[m, n]`` each, as
        `grouped_swiglu` writes them.
      group_sizes: int ``[all groups]``, how many rows each has. Rows after the last group's are
        zero in the result.
      group_offset: int32 ``[]``, which of all groups the first of ``rhs`` is for. Rows of groups
        without weights are zero in the result.
      gate_first: whether the first half of arrays that hold both is the gate's.
      together: whether to write the gradients side by side, as the input's GEMM reads them.
      transpose_rhs: see ``rhs``.
      gemm_dtype: that the plain GEMM would write, default ``lhs.dtype``; for derivatives.
      out_dtype: of the result, default ``gemm_dtype``.
      precision: of the products, as of `lax.dot_general`.
      tiling: of the TPU kernel, default `problem.choose_tiling`'s.
      gemm: the plain GEMM, of ``lhs``, ``rhs``, ``group_sizes`` and ``group_offset``, whose
        derivative is taken; default `lax.ragged_dot`'s. Given one, only reverse mode is known.

    Returns:
      ``(both,)``, ``[m, 2 · n]``, or ``(d_gate, d_up)``, ``[m, n]`` each.

    Raises:
      ValueError: shapes that don't fit, or tiles that the kernel can't work in, on any platform.
    """
    gemm_dtype = jnp.dtype(gemm_dtype or lhs.dtype)
    parts = saved if isinstance(saved, tuple) else (saved,)
    problem = Problem(
        out_dtype=jnp.dtype(out_dtype or gemm_dtype),
        together=not isinstance(saved, tuple),
        out_together=together,
        gate_first=gate_first,
        transpose_rhs=transpose_rhs,
        precision=precision,
    )
    _check(problem, lhs, rhs, parts, group_sizes)
    call = either(problem, tiling)

    def function(lhs: Any, rhs: Any, saved: Any, sizes: Any, offset: Any) -> Any:
        return call(lhs, rhs, *saved, sizes, offset)

    plain = functools.partial(_plain, problem, gemm_dtype, gemm)
    differentiated = _by_jvp(function, plain) if gemm is None else _by_vjp(function, plain)
    return tuple(differentiated(lhs, rhs, parts, group_sizes, group_offset))


def _check(problem: Problem, lhs: Any, rhs: Any, saved: Sequence[Any], sizes: Any) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or sizes.ndim != 1:
        raise ValueError(f"found ranks {(lhs.ndim, rhs.ndim, sizes.ndim)}; wanted [m, k], "
                         "[groups, n, k], [all groups]")  # fmt: skip
    n, k = rhs.shape[1:] if problem.transpose_rhs else rhs.shape[:0:-1]
    wanted = (lhs.shape[0], 2 * n if problem.together else n)
    if k != lhs.shape[1] or any(s.shape != wanted for s in saved):
        raise ValueError(f"found cotangents {lhs.shape}, weights {rhs.shape} and saved "
                         f"{[s.shape for s in saved]}; wanted {lhs.shape[1]} contracted elements, "
                         f"and saved {list(wanted)}")  # fmt: skip
    if len({s.dtype for s in saved}) > 1:
        raise ValueError(f"found saved {[str(s.dtype) for s in saved]}; wanted one type")


def either(problem: Problem, tiling: Tiling | None) -> Function:
    """The kernel on TPU and the reference elsewhere; mapped by `jax.vmap`, one after another."""

    def one(*operands: Any) -> tuple[jax.Array, ...]:
        *rest, offset = operands
        outs: tuple[jax.Array, ...] = lax.platform_dependent(
            *rest,
            *(() if offset is None else (offset,)),
            tpu=_from_flat(functools.partial(tpu.grouped_dswiglu, problem, tiling=tiling), offset),
            default=_from_flat(functools.partial(reference.grouped_dswiglu, problem), offset),
        )
        return outs

    found: Function = one_by_one(one)
    return found


def _from_flat(fn: Callable[..., Any], offset: Any) -> Callable[..., Any]:
    """``fn(lhs, rhs, saved, group_sizes, group_offset)`` of flat operands."""

    def flat(lhs: Any, rhs: Any, *rest: Any) -> Any:
        *saved, sizes, at = rest if offset is not None else (*rest, None)
        return fn(lhs, rhs, tuple(saved), sizes, at)

    return flat


def _plain(
    problem: Problem,
    dtype: Any,
    gemm: Gemm | None,
    lhs: Any,
    rhs: Any,
    saved: Any,
    sizes: Any,
    offset: Any,
) -> tuple[jax.Array, ...]:
    """What derivatives are taken of: the program as it was, of this type of the GEMM."""
    if gemm is None:
        dh = reference.multiplied(problem, lhs, rhs, sizes, offset, dtype)
    else:
        dh = gemm(lhs, rhs, sizes, offset)
    wide = jnp.promote_types(dtype, saved[0].dtype)
    parts = reference.dswiglu(dh.astype(wide), *(
        p.astype(wide) for p in reference.parts_of(problem, saved)
    ))  # fmt: skip
    return reference.laid_out(problem, *(d.astype(problem.out_dtype) for d in parts))


def _by_jvp(function: Function, plain: Function) -> Function:
    differentiated: Any = jax.custom_jvp(function)

    def rule(primals: Any, tangents: Any) -> Any:
        return function(*primals), jax.jvp(plain, primals, tangents)[1]

    differentiated.defjvp(rule)
    found: Function = differentiated
    return found


def _by_vjp(function: Function, plain: Function) -> Function:
    differentiated: Any = jax.custom_vjp(function)

    def forward(*operands: Any) -> Any:
        return function(*operands), operands

    def backward(operands: Any, cotangents: Any) -> Any:
        *floats, sizes, offset = operands
        found = jax.vjp(lambda *f: plain(*f, sizes, offset), *floats)[1](tuple(cotangents))
        return *found, None, None

    differentiated.defvjp(forward, backward)
    found: Function = differentiated
    return found
