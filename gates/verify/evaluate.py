"""Evaluate equations one by one, as StableHLO defines each: no compiler sees two of them together.

Calls are entered, so that what stands in them is run one by one too. Loops and kernels are run
whole, and so is what has a derivative of its own while it is differentiated. What differs between
devices is the same here: a value is one device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.bodies import Role
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...compat.primitives import primitive
from ...compat.tracing import Tracer, named_axes
from ...compat.vma import pvary_p
from .gemm_kernel import exact_gemm, interpreted, kernel_gemm

Rule = Callable[[Eqn, Sequence[Any]], Sequence[Any] | None]
"""The results of an equation, or None where it is evaluated as it is."""


class Unrunnable(Exception):
    """An equation can't be evaluated here; the message says which and why, in one line."""


def evaluate(
    eqns: Sequence[Eqn],
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    values: Sequence[Any],
    rule: Rule | None = None,
    literal: Callable[[Any, Any], Any] = lambda value, aval: value,
    differentiated: bool = False,
    watch: Callable[[Var, Any], None] | None = None,
) -> list[Any]:
    """The outputs of equations on values of their inputs.

    Args:
        eqns: in order.
        inputs: what they read and don't make.
        outputs: what to return.
        values: one for each input.
        rule: asked first about every equation that isn't entered.
        literal: what stands for a literal of a type.
        watch: told of every value, with its variable.
        differentiated: whether derivatives are taken: those that a function brings along count.
    """
    whole = _OWN if differentiated else frozenset()
    how = _How(rule, literal, whole, watch)
    return _evaluate(eqns, inputs, outputs, values, how)


@dataclass(frozen=True)
class _How:
    rule: Rule | None
    literal: Callable[[Any, Any], Any]
    whole: frozenset[Any]
    """Calls that aren't entered."""
    watch: Callable[[Var, Any], None] | None = None


def _evaluate(
    eqns: Sequence[Eqn], inputs: Sequence[Var], outputs: Sequence[Atom], values: Any, how: _How
) -> list[Any]:
    env: dict[Var, Any] = dict(zip(inputs, values, strict=True))

    def read(atom: Atom) -> Any:
        return how.literal(atom.val, atom.aval) if jaxprs.is_literal(atom) else env[atom]

    for eqn in eqns:
        results = _results(eqn, [read(a) for a in eqn.invars], how)
        env.update(zip(eqn.outvars, results, strict=True))
    if how.watch is not None:
        for var, value in env.items():
            how.watch(var, value)
    found = [read(a) for a in outputs]
    return [
        jnp.asarray(v, a.aval.dtype) if jaxprs.is_literal(a) and not _is_array(v) else v
        for v, a in zip(found, outputs)
    ]


def _is_array(value: Any) -> bool:
    """Whether a literal has become an array already; as a number it would lose its type."""
    return isinstance(value, jax.Array)


def _results(eqn: Eqn, operands: list[Any], how: _How) -> Sequence[Any]:
    if eqn.primitive is pvary_p and not named_axes():
        return operands
    if how.rule is not None and kernel_gemm(eqn) is not None:
        made = how.rule(eqn, operands)
        if made is not None:
            return made
    branch = _branch(eqn, operands)
    if branch is not None:
        return _body(branch, operands[1:], how)
    entered = compat_bodies.carried(eqn).entered
    if len(entered) == 1 and entered[0].role is Role.CALL and eqn.primitive not in how.whole:
        if eqn.primitive is compat_bodies.shard_map_primitive():
            made = None if how.rule is None else how.rule(eqn, operands)
            if made is None:
                raise Unrunnable("a shard_map inside of the site")
            return made
        return _body(entered[0].body, operands, how)
    found = None if how.rule is None else how.rule(eqn, operands)
    return found if found is not None else bind(eqn, operands)


_OWN = frozenset({primitive("custom_jvp_call_p"), primitive("custom_vjp_call_p")})
"""Calls with derivatives of their own."""


def bind(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation."""
    if eqn.primitive.name == "pallas_call" and eqn.params["interpret"] is False:
        return interpreted(eqn, operands)
    params = eqn.primitive.get_bind_params(_at_home(eqn.params))
    found = eqn.primitive.bind(*operands, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def _at_home(params: dict[str, Any]) -> dict[str, Any]:
    """Params without shardings that say nothing but which mesh the program has."""
    for name in ("sharding", "out_sharding"):
        spec = getattr(params.get(name), "spec", None)
        if spec is not None and all(part is None for part in spec):
            params = {**params, name: None}
    return params


def _body(body: Body, operands: Sequence[Any], how: _How) -> list[Any]:
    jaxpr = jaxprs.opened(body)
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    values = (*jaxprs.consts(body), *operands)
    if len(values) != len(inputs):
        raise Unrunnable("a body takes other operands than its equation")
    return _evaluate(jaxpr.eqns, inputs, jaxpr.outvars, values, how)


def _branch(eqn: Eqn, operands: Sequence[Any]) -> Body | None:
    """The branch of a cond that runs, where that is known."""
    if eqn.primitive is not primitive("cond_p") or isinstance(operands[0], Tracer):
        return None
    branches = eqn.params["branches"]
    index = int(np.clip(int(operands[0]), 0, len(branches) - 1))
    return branches[index]


def is_float(dtype: Any) -> bool:
    """Whether a type is of real floating point numbers."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_complex(dtype: Any) -> bool:
    """Whether a type is of complex floating point numbers."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def wide(value: Any) -> Any:
    """A floating point array in float64; anything else as it is."""
    if hasattr(value, "dtype") and is_float(value.dtype):
        return jnp.asarray(value, jnp.float64)
    return value


def promoted(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """An equation whose floating point operands are float64: no rounding before the end.

    Raises:
        Unrunnable: it depends on how its operands are represented.
    """
    call = kernel_gemm(eqn)
    if call is not None:
        return [exact_gemm(call, operands)]
    outs = [v.aval for v in eqn.outvars]
    floats = any(is_float(getattr(a, "dtype", np.int32)) for a in outs)
    name = eqn.primitive.name
    if name in _REPRESENTED and (floats or any(is_float(a.aval.dtype) for a in eqn.invars)):
        raise Unrunnable(f"{name} has no meaning in higher precision")
    if name == "reduce_precision":
        return [operands[0]]
    if compat_bodies.carried(eqn).entered:
        raise Unrunnable(f"{name} can't be run in higher precision")
    params = dict(eqn.params)
    for key in ("new_dtype", "preferred_element_type", "dtype"):
        if params.get(key) is not None and is_float(params[key]):
            params[key] = np.dtype(np.float64)
    if not floats:
        return _all_alike(eqn, operands, params)
    if name in _SCATTERS:
        return [_scattered(_SCATTERS[name], operands, params)]
    if name == "convert_element_type":
        return [jnp.asarray(operands[0], jnp.float64)]
    if "algorithm" in params:
        params["algorithm"] = None
    if "precision" in params:
        params["precision"] = None
    return _all_alike(eqn, operands, params)


_REPRESENTED = {"bitcast_convert_type", "nextafter", "random_bits", "rng_bit_generator"}


def _all_alike(eqn: Eqn, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return list(found) if eqn.primitive.multiple_results else [found]


_SUMS = {"dot_general", "ragged_dot_general", "reduce_sum", "cumsum", "scatter-add", "scatter_add"}


def summed_once(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """A sum with a single rounding, to its result's type, whatever order a CPU adds in."""
    out = eqn.outvars[0].aval
    summing = eqn.primitive.name in _SUMS or kernel_gemm(eqn) is not None
    if not summing or not is_float(out.dtype):
        return None
    wide_ones = [
        jnp.asarray(v, jnp.float64) if is_float(a.aval.dtype) else v
        for v, a in zip(operands, eqn.invars, strict=True)
    ]
    found = promoted(eqn, wide_ones)
    return None if found is None else [v.astype(out.dtype) for v in found]


_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
    "scatter-sub": lax.scatter_sub,
    "scatter_sub": lax.scatter_sub,
}


def _scattered(scatter: Callable[..., Any], operands: Sequence[Any], params: Any) -> Any:
    """A scatter whose combiner, which is a jaxpr of its operands' type, is made anew."""
    names = ("indices_are_sorted", "unique_indices", "mode")
    options = {n: params[n] for n in names}
    return scatter(*operands, params["dimension_numbers"], **options)


def in_float64(
    eqns: Sequence[Eqn],
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    values: Sequence[Any],
    watch: Callable[[Var, Any], None] | None = None,
) -> list[Any]:
    """The outputs with every floating point value in float64; run it under ``enable_x64``."""

    def literal(value: Any, aval: Any) -> Any:
        if is_float(aval.dtype):
            return jnp.full(aval.shape, np.asarray(value).astype(np.float64), jnp.float64)
        if jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == np.bool_:
            return jnp.asarray(value, aval.dtype)
        return value

    values = [wide(v) for v in values]
    with jax.default_matmul_precision("highest"):
        return evaluate(eqns, inputs, outputs, values, promoted, literal, watch=watch)
