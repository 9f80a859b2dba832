"""Python's cyclic garbage collector, kept out of the way of work that leaves few cycles behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 10_000
_NEVER = 1 << 30
_FEW = 10_000
"""Frozen objects that may be the interpreter's own, which has some hundred from the start."""


@contextlib.contextmanager
def full_collections_postponed() -> Iterator[None]:
    """Without the passes of Python's cyclic garbage collector over older objects, until afterwards.

    A trace, its rewrite, its normal form and a comparison allocate by the hundred thousand and
    leave few cycles behind. Each full pass looks at every object of jax and of the program, and
    would take about as long as the work; young objects are looked at once, 10,000 at a time. What
    is there in the end counts as old from then on, and isn't looked at again before the next full
    pass; where the caller has frozen objects (`gc.freeze`), they stay so and all is looked at.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(max(young, _YOUNG) if young else 0, _NEVER, _NEVER)
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FEW:
            gc.freeze()  # both only hand lists over
            gc.unfreeze()
        gc.set_threshold(young, middle, old)
