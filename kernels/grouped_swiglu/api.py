"""The grouped SwiGLU as a differentiable function: the kernel on TPU, plain jnp elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..one_by_one import one_by_one
from . import reference, tpu
from .problem import Problem, Tiling

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Gemm = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def grouped_swiglu(
    lhs: jax.Array,
    weights: jax.Array | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    gate_first: bool = True,
    transpose_rhs: bool = False,
    gemm_dtype: Any = None,
    out_dtype: Any = None,
    with_gemm: bool = False,
    precision: Any = None,
    tiling: Tiling | None = None,
    activation: Activation | None = None,
    gemm: Gemm | None = None,
) -> tuple[jax.Array, ...]:
    """``silu(x · w_gate) * (x · w_up)`` by groups of rows, activated on the float32 accumulators.

    Differentiated, it also writes gate and up, rounded as the plain GEMM rounds them: derivatives
    are those of the activation at these, and of the grouped GEMM.

    Args:
      lhs: ``[m, k]``, bfloat16 or float32; rows of a group are consecutive.
      weights: ``[groups, k, 2 · n]``, gate and up side by side; or the two apart, ``[groups, k,
        n]`` each. With ``transpose_rhs``, the last two dimensions the other way round.
      group_sizes: int ``[all groups]``, how many rows each has. Rows after the last group's are
        zero in the result.
      group_offset: int32 ``[]``, which of all groups the first of ``weights`` is for. Rows of
        groups without weights are zero in the result.
      gate_first: whether the first half of one array of weights is the gate's.
      transpose_rhs: see ``weights``.
      gemm_dtype: that the plain GEMM would write, default ``lhs.dtype``.
      out_dtype: of the result, default ``gemm_dtype``.
      with_gemm: whether to return gate and up too.
      precision: of the products, as of `lax.dot_general`.
      tiling: of the TPU kernel, default `problem.choose_tiling`'s.
      activation: of gate and up in ``gemm_dtype``, whose derivative is taken; default
        ``silu(gate) * up`` in that type.
      gemm: the plain GEMM, of ``lhs``, one of ``weights``, ``group_sizes`` and ``group_offset``,
        whose transpose is taken; default `lax.ragged_dot`'s. Given one, only reverse mode is known.

    Returns:
      ``(out,)`` or ``(out, gate, up)``, each ``[m, n]``.

    Raises:
      ValueError: shapes that don't fit, or tiles that the kernel can't work in, on any platform.
    """
    fused = not isinstance(weights, tuple)
    parts = (weights,) if fused else weights
    gemm_dtype = jnp.dtype(gemm_dtype or lhs.dtype)
    problem = Problem(
        gemm_dtype=gemm_dtype,
        out_dtype=jnp.dtype(out_dtype or gemm_dtype),
        with_gemm=with_gemm,
        fused=fused,
        gate_first=gate_first,
        transpose_rhs=transpose_rhs,
        precision=precision,
    )
    _check(problem, lhs, parts, group_sizes)
    if gemm is not None:
        function = with_transpose_of(gemm, problem, tiling, activation)
    else:
        function = differentiable(problem, tiling, activation)
    return tuple(function(lhs, parts, group_sizes, group_offset))


def _check(problem: Problem, lhs: Any, weights: Sequence[Any], group_sizes: Any) -> None:
    if lhs.ndim != 2 or any(w.ndim != 3 for w in weights) or group_sizes.ndim != 1:
        ranks = lhs.ndim, *(w.ndim for w in weights), group_sizes.ndim
        raise ValueError(f"found ranks {ranks}; wanted [m, k], [groups, k, n], [all groups]")
    if len({w.shape for w in weights}) > 1:
        raise ValueError(f"found weights {[w.shape for w in weights]}; wanted two of one shape")
    size = weights[0].shape
    k, n = size[:0:-1] if problem.transpose_rhs else size[1:]
    if k != lhs.shape[1] or (problem.fused and n % 2):
        raise ValueError(f"found x {lhs.shape} and weights {size}; wanted {lhs.shape[1]} "
                         "contracted elements, and two halves of one array")  # fmt: skip


def either(problem: Problem, tiling: Tiling | None) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel on TPU and the reference elsewhere; mapped by `jax.vmap`, one after another."""

    def one(*operands: Any) -> tuple[jax.Array, ...]:
        *rest, offset = operands
        outs: tuple[jax.Array, ...] = lax.platform_dependent(
            *rest,
            *(() if offset is None else (offset,)),
            tpu=_from_flat(functools.partial(tpu.grouped_swiglu, problem, tiling=tiling), offset),
            default=_from_flat(functools.partial(reference.grouped_swiglu, problem), offset),
        )
        return outs

    found: Callable[..., tuple[jax.Array, ...]] = one_by_one(one)
    return found


def _from_flat(fn: Callable[..., Any], offset: Any) -> Callable[..., Any]:
    """``fn(lhs, weights, group_sizes, group_offset)`` of flat operands."""

    def flat(lhs: Any, *rest: Any) -> Any:
        *weights, sizes, at = rest if offset is not None else (*rest, None)
        return fn(lhs, tuple(weights), sizes, at)

    return flat


def differentiable(
    problem: Problem, tiling: Tiling | None, activation: Activation | None
) -> Callable[..., Any]:
    """``function(lhs, weights, group_sizes, group_offset)`` with the plain program's derivative."""
    call = either(problem, tiling)
    with_gemm = either(replace(problem, with_gemm=True), tiling)
    activate = activation or functools.partial(_activation, problem)

    def function(lhs: Any, weights: Any, group_sizes: Any, offset: Any) -> Any:
        return call(lhs, *weights, group_sizes, offset)

    def tangents_of(primals: Any, tangents: Any) -> tuple[Any, Any]:
        lhs, weights, group_sizes, offset = primals
        out, gate, up = with_gemm(lhs, *weights, group_sizes, offset)
        dots = _gemm_tangents(problem, primals, tangents[0], tangents[1])
        if all(d is None for d in dots):
            dout: Any = SymbolicZero(jax.typeof(out).to_tangent_aval())
            results = (out, gate, up)[: 3 if problem.with_gemm else 1]
            return results, tuple(SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results)
        filled = [jnp.zeros_like(p) if d is None else d for p, d in zip((gate, up), dots)]
        _, dout = jax.jvp(activate, (gate, up), tuple(filled))
        if not problem.with_gemm:
            return (out,), (dout,)
        return (out, gate, up), (dout, *filled)

    differentiated: Any = jax.custom_jvp(function)
    differentiated.defjvp(tangents_of, symbolic_zeros=True)
    found: Callable[..., Any] = differentiated
    return found


def with_transpose_of(
    gemm: Gemm, problem: Problem, tiling: Tiling | None, activation: Activation | None
) -> Callable[..., Any]:
    """As `differentiable`, backwards only, by the derivative that ``gemm`` has itself."""
    call = either(problem, tiling)
    with_gemm = either(replace(problem, with_gemm=True), tiling)
    activate = activation or functools.partial(_activation, problem)

    def function(lhs: Any, weights: Any, group_sizes: Any, offset: Any) -> Any:
        return call(lhs, *weights, group_sizes, offset)

    def forward(lhs: Any, weights: Any, group_sizes: Any, offset: Any) -> Any:
        out, gate, up = with_gemm(lhs, *weights, group_sizes, offset)
        return (out, gate, up)[: 3 if problem.with_gemm else 1], (
            lhs, weights, group_sizes, offset, gate, up
        )  # fmt: skip

    def backward(kept: Any, cotangents: Any) -> Any:
        lhs, weights, group_sizes, offset, gate, up = kept
        parts = jax.vjp(activate, gate, up)[1](cotangents[0])
        parts = [p + c for p, c in zip(parts, cotangents[1:])] or parts

        def plain(lhs: Any, weights: Any) -> Any:
            found = [gemm(lhs, w, group_sizes, offset) for w in weights]
            return reference.halves(problem, found[0]) if problem.fused else tuple(found)

        return *jax.vjp(plain, lhs, weights)[1](tuple(parts)), None, None

    differentiated: Any = jax.custom_vjp(function)
    differentiated.defvjp(forward, backward)
    found: Callable[..., Any] = differentiated
    return found


def _activation(problem: Problem, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate) * up).astype(problem.out_dtype)


def _gemm_tangents(
    problem: Problem, primals: Any, dlhs: Any, dweights: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Tangents of gate and up; None where there is none."""
    lhs, weights, group_sizes, offset = primals
    outs: list[jax.Array | None] = []
    for weight, dweight in zip(weights, dweights, strict=True):
        terms = [
            reference.gemm(problem, a, b, group_sizes, offset, problem.gemm_dtype)
            for a, b in ((dlhs, weight), (lhs, dweight))
            if not isinstance(a, SymbolicZero) and not isinstance(b, SymbolicZero)
        ]
        outs.append(sum(terms[1:], terms[0]) if terms else None)
    if not problem.fused:
        return outs[0], outs[1]
    return (None, None) if outs[0] is None else reference.halves(problem, outs[0])
