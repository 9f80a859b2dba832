"""Make a plan that breaks a property smaller, as long as it breaks the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from .plan import Plan, smaller

MOST_TRIES = 300


def shrunk(plan: Plan, fails: Callable[[Plan], bool], seconds: float = 60.0) -> tuple[Plan, int]:
    """The smallest plan found for which ``fails``, and how many were tried.

    Args:
      plan: fails.
      fails: whether a plan breaks what the first broke.
      seconds: to spend at most.
    """
    until, tried = time.monotonic() + seconds, 0
    going = True
    while going:
        going = False
        for candidate in smaller(plan):
            if tried >= MOST_TRIES or time.monotonic() > until:
                return plan, tried
            tried += 1
            if fails(candidate):
                plan, going = candidate, True
                break
    return plan, tried


def fewest_passes(
    names: tuple[str, ...], fails: Callable[[tuple[str, ...]], bool]
) -> tuple[str, ...]:
    """The passes without each of which the property holds."""
    left = list(names)
    Random(0).shuffle(left)
    for name in list(left):
        fewer = [n for n in left if n != name]
        if fewer and fails(tuple(sorted(fewer))):
            left = fewer
    return tuple(sorted(left))
