"""`assume_range`: the program tells the matchers what they can't prove."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ..compat.assume_range import assume_range_p, register_where_loaded
from .fact import limits

_finfo: Any = jnp.finfo


def assume_range(x: Shaped[Array, "*dims"], lo: float, hi: float) -> Shaped[Array, "*dims"]:
    """States that every element of ``x`` lies in ``[lo, hi]``; returns ``x``.

    A rewrite may rely on it, so a wrong statement can change results. The call is an identity
    under every transform, also inside Pallas kernels, and lowers to nothing. To test the
    statement, run the program under `jax.experimental.checkify`: a value outside (or NaN) fails a
    user check that names it.

    One limit: where a loop or a call returns a value that it was merely passed, jax takes it from
    outside; it doesn't see through a statement about such a value, as it doesn't through a
    ``checkpoint_name``. State ranges where values are made or used.

    Where `relower` can prove that a statement is wrong, it uses what it proved, and lists the
    contradiction in its report: the code in question may be one that never runs.

    Args:
        x: Array of any integer or real floating point dtype, of any shape.
        lo: The least value, inclusive. A whole number if ``x`` holds integers.
        hi: The greatest value, inclusive. Bounds on floating point values are only checked: no
            rewrite uses them yet.

    Raises:
        ValueError: ``lo > hi``, a bound that the dtype can't hold, or a dtype without order.
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    convert = _bound_type(x.dtype)
    low, high = convert("lo", lo), convert("hi", hi)
    if low > high:
        raise ValueError(f"assume_range: found lo={low} > hi={high}; wanted lo <= hi")
    register_where_loaded()
    result: Array = assume_range_p.bind(x, lo=low, hi=high)
    return result


def _bound_type(dtype: Any) -> Any:
    limit = limits(dtype)
    if limit is not None and dtype != jnp.bool_:
        return lambda name, bound: _whole(name, bound, dtype, limit)
    if limit is None and jnp.issubdtype(dtype, jnp.floating):
        return lambda name, bound: _real(name, bound, dtype)
    raise ValueError(
        f"assume_range: found an array of dtype {dtype}; wanted an integer or real floating dtype"
    )


def _whole(name: str, bound: Any, dtype: Any, limit: tuple[int, int]) -> int:
    try:
        value = operator.index(bound)
    except TypeError as error:
        raise ValueError(
            f"assume_range: found {name}={bound!r}; wanted a Python int for an array of {dtype}"
        ) from error
    if not limit[0] <= value <= limit[1]:
        raise ValueError(
            f"assume_range: found {name}={value}; wanted a bound that {dtype} can hold, "
            f"in [{limit[0]}, {limit[1]}]"
        )
    return value


def _real(name: str, bound: Any, dtype: Any) -> float:
    try:
        value = float(bound)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"assume_range: found {name}={bound!r}; wanted a Python float for an array of {dtype}"
        ) from error
    greatest = float(_finfo(dtype).max)
    if math.isnan(value) or (math.isfinite(value) and abs(value) > greatest):
        raise ValueError(
            f"assume_range: found {name}={value}; wanted a bound that {dtype} can hold, "
            f"in [{-greatest}, {greatest}] or infinite"
        )
    return value
