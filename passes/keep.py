"""`keep`: a region that no pass may touch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from ..compat.source import KEPT

F = TypeVar("F", bound=Callable[..., Any])


def keep(fn: F) -> F:
    """``fn``, no operation of which `optimize` replaces, moves or removes.

    The region is marked by a name scope, ``relower.keep``, which stays with its operations under
    every transform: what differentiation, batching, a scan or a remat makes of them is kept too.
    Nothing else of the program is changed, and a site that would reach into the region is declined
    with the reason ``kept``.

    Args:
      fn: any function of arrays; usable as a decorator.

    Raises:
      TypeError: ``fn`` can't be called.
    """
    if not callable(fn):
        raise TypeError(f"keep: found {fn!r} of type {type(fn).__name__}, wanted a function")

    @functools.wraps(fn)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEPT):
            return fn(*args, **kwargs)

    return cast(F, kept)
