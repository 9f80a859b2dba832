"""`cost`: what a function or a case costs on a TPU, estimated on a CPU host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..case import Case, case
from ..compile import stage_module
from ..errors import InputError
from ..process import Limits
from .cache import user_cache
from .ladder import measure
from .model import Cost

DEFAULT_TARGET = "TPU7x:2x2x1"


def cost(
    case_or_fn: Case | Callable[..., Any],
    /,
    *args: Any,
    target: str = DEFAULT_TARGET,
    limit: float | None = 600.0,
    memory_limit: int | None = 16 * 2**30,
    bundles: bool = False,
    analysis: bool = True,
    cache: bool = True,
    **kwargs: Any,
) -> Cost:
    """Compiles a case, or a function with its arguments, for a TPU and says what it costs.

    The program is lowered in this process; libtpu compiles it in another one. No TPU is needed.

    Args:
        case_or_fn: a `Case`, or a function; one that isn't jitted yet is jitted here.
        *args: the function's arguments: arrays, ``jax.ShapeDtypeStruct``s or pytrees of them.
        target: kind and topology; figures are for one device of it.
        limit: seconds for each compilation; None waits for ever.
        memory_limit: bytes of host memory for each compilation; None sets none.
        bundles: count the final schedule's bundles although there are cycles.
        analysis: run the compiler's static analysis. Without, a program that it would die on, or
            take too long for, is compiled once, and has counts and memory.
        cache: look for what the compiler said of the same program before, and keep what it says.
        **kwargs: the function's keyword arguments.

    Returns:
        The figures, each with the rung of the ladder that it stands on.

    Raises:
        InputError: the function can't be lowered, libtpu isn't installed, or the compiler
            rejects the program, dies on it without its analysis, or exceeds a limit.
    """
    if isinstance(case_or_fn, Case):
        if args or kwargs:
            raise InputError("cost: a case has its own arguments; found more beside it")
        chosen = case_or_fn
    else:
        plain = case(case_or_fn, *args)
        chosen = Case(plain.fn, plain.args, kwargs)
    staged = stage_module(chosen, target)
    limits = Limits(limit, memory_limit)
    kept = user_cache() if cache else None
    return measure(staged, limits=limits, bundles=bundles, analysis=analysis, cache=kept)
