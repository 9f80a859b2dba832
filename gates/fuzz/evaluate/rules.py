"""The table of operations: what computes an equation's results from its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....compat.jaxprs import Eqn
from .mode import Mode

Rule = Callable[[Mode, Eqn, Sequence[Any]], Any]
"""From one device's operands to its result, or to a list of results where there are several."""

RULES: dict[str, Rule] = {}
"""By the primitive's name: jax's own, as the tests hold each against jax."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table."""

    def enter(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return enter
