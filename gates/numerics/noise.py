"""Legal noise: the same computation with its roundings moved.

A compiler, a device layout or a rewrite may put another of the neighbouring numbers where an
operation rounds. `noisy` does so everywhere at once: each finite result of an operation that
rounds goes a unit in the last place (of its own dtype) up, down, or stays. Which, is a hash of the
bits and a seed: the same value computed twice, as by a rematerialised backward pass, moves alike.
Small integers stay, for they are counts, masks and one-hot rows, which no legal reordering changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import jaxprs
from ...compat.primitives import primitive
from ...compat.tracing import pallas_call
from ...matchers.graph import OUTPUT, Scope
from ...passes.base import Contract, Match, Pass, Replacement
from ...passes.optimize import optimize

_ROUNDING = (
    "add", "add_jaxvals", "sub", "mul", "div", "dot_general", "ragged_dot_general",
    "conv_general_dilated", "reduce_sum", "reduce_prod", "cumsum", "cumlogsumexp", "cumprod", "exp",
    "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan", "erf", "erf_inv",
    "erfc", "sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "square", "psum", "reduce_scatter",
    "scatter_add", "triangular_solve", "cholesky",
)  # fmt: skip
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _roots() -> frozenset[Any]:
    found = [primitive(f"{name}_p") for name in _ROUNDING]
    return frozenset(p for p in (*found, pallas_call()) if p is not None)


def noisy(fn: Callable[..., Any], seed: int = 1) -> Callable[..., Any]:
    """``fn`` with its roundings moved; the same for the same seed and arguments."""
    return optimize(fn, passes=[_pass(seed)])


def shaken(x: jax.Array, seed: int) -> jax.Array:
    """``x`` with each element moved by a unit in the last place, or left where it is."""
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    return _moved(bits, x.dtype, seed)


def _moved(bits: jax.Array, dtype: Any, seed: int) -> jax.Array:
    info = jnp.finfo(dtype)
    value = lax.bitcast_convert_type(bits, dtype)
    size = jnp.abs(value)
    whole = (lax.round(value) == value) & (size <= 2.0 ** max(info.nmant - 2, 0))
    # A step beyond the largest finite number is infinite, one below the smallest normal is zero.
    inside = (size > info.smallest_normal) & (size < info.max)
    word = bits.astype(jnp.uint32) if info.bits < 64 else (bits ^ (bits >> 32)).astype(jnp.uint32)
    choice = _hash(word, seed) & np.uint32(3)
    step = (choice == 1).astype(bits.dtype) - (choice == 2).astype(bits.dtype)
    return lax.bitcast_convert_type(jnp.where(inside & ~whole, bits + step, bits), dtype)


def _hash(word: jax.Array, seed: int) -> jax.Array:
    """A word of which each bit depends on all of ``word`` and the seed."""
    word = word ^ np.uint32((seed * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return word ^ (word >> 16)


def _pass(seed: int) -> Pass:
    return Pass(
        name=f"rounding_noise_{seed}",
        contract=Contract.ROUNDING,
        summary="a result that was rounded → one of its neighbours",
        measure="roundings that were not moved",
        roots=_roots,
        find=_find,
        requirements=(),
        profitable=lambda match: None,
        replace=functools.partial(_replace, seed),
        before=lambda x: x,
        after=lambda x: x,
        examples=lambda: (),
    )


def _find(scope: Scope, index: int) -> Match | None:
    eqn = scope.eqns[index]
    if not any(_is_float(v) for v in eqn.outvars) or _in_kernel(scope):
        return None
    return None if _is_done(scope, eqn) else Match(scope, index, {})


def _is_done(scope: Scope, eqn: Any) -> bool:
    """Whether all that reads its floats are casts to bits, as `shaken` makes them."""
    bitcast = primitive("bitcast_convert_type_p")
    for var in eqn.outvars:
        if jaxprs.is_dropped(var) or not _is_float(var):
            continue
        readers = scope.readers(var)
        if any(r == OUTPUT or scope.eqns[r].primitive is not bitcast for r in readers):
            return False
    return True


def _in_kernel(scope: Scope) -> bool:
    kernel = pallas_call()
    return kernel is not None and any(
        c.scope.eqns[c.index].primitive is kernel for c in scope.path()
    )


def _is_float(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _replace(seed: int, match: Match) -> Replacement:
    eqn = match.eqn

    def fn(*operands: Any) -> list[Any]:
        params = eqn.primitive.get_bind_params(eqn.params)
        made = eqn.primitive.bind(*operands, **params)
        results = list(made) if eqn.primitive.multiple_results else [made]
        return [shaken(r, seed) if jnp.issubdtype(r.dtype, jnp.floating) else r for r in results]

    key = ("noise", seed, eqn.primitive)
    return Replacement(tuple(eqn.invars), tuple(eqn.outvars), fn, key)
