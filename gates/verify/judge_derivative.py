"""Whether the derivatives of a site's two sides keep its contract."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...passes.base import Contract
from .check import Broken, Limits, Tally, filled, first_line, rounded
from .compare import Apart, difference
from .derivative import Derivative, derivative
from .evaluate import Unrunnable
from .problem import Problem
from .themes import REAL, SUMMED

Array = Any
REAL_SEEDS = 4
"""Fillings at which derivatives are taken of what is no integer."""


def derivatives_differ(
    problem: Problem, contract: Contract, tally: Tally, limits: Limits, end: float
) -> Broken | None:
    """Whether the derivatives break the contract, where there are any.

    Sums of cotangents are compared on small integers, on which they are exact in any order, and
    then on what is no integer, where they may be added up in another order.
    """
    found = derivative(problem)
    if isinstance(found, str):
        tally.notes += (found,)
        return None
    exact = Contract.VALUE if contract is Contract.ROUNDING else contract
    if contract is not Contract.ROUNDING or not problem.arithmetic:
        for theme, arrays in filled(problem, SUMMED, max(1, limits.seeds // 2)):
            broken = _differs(found, exact, theme.name, arrays)
            tally.derivatives += 1
            if broken is not None:
                return broken
            if time.monotonic() > end:
                return None
    if contract is not Contract.ROUNDING:
        return _real(problem, replace(found, real=True), contract, tally, end)
    try:
        broken, ratios = rounded(problem, "derivative", tally, end)
    except Unrunnable as error:
        tally.notes += (f"derivatives were not compared: {error}",)
        return None
    if ratios is not None:
        tally.ratios = ratios if tally.ratios is None else (
            max(tally.ratios[0], ratios[0]), max(tally.ratios[1], ratios[1]))  # fmt: skip
    return broken


def _differs(
    found: Derivative, contract: Contract, theme: str, arrays: Sequence[Array]
) -> Broken | None:
    """Whether the derivatives at one input differ beyond the contract."""
    before, after = found.both(arrays)
    if isinstance(after, str):
        return Broken(after, theme, tuple(arrays), "derivative")
    place = difference(before, after, contract, True)
    return None if place is None else Broken(place, theme, tuple(arrays), "derivative")


def _real(
    problem: Problem, found: Derivative, contract: Contract, tally: Tally, end: float
) -> Broken | None:
    """Whether derivatives at what is no integer differ by more than the order of a sum can do.

    What isn't equal is close, or is judged by its errors, as a rounding is.
    """
    broken: Broken | None = None
    apart: dict[int, Apart] = {}
    for theme, arrays in filled(problem, [REAL], REAL_SEEDS):
        before, after = found.both(arrays)
        tally.derivatives += 1
        if isinstance(after, str):
            return Broken(after, theme.name, tuple(arrays), "derivative")
        place = difference(before, after, contract, True)
        if place is not None:
            broken = broken or Broken(place, theme.name, tuple(arrays), "derivative")
            if place.what:
                return broken  # another type
        for i, (b, a) in enumerate(zip(before, after, strict=True)):
            apart[i] = apart.get(i, Apart()).plus(b, a)
        if time.monotonic() > end:
            break
    if broken is None or all(one.close for one in apart.values()):
        return None
    try:
        worse, _ = rounded(problem, "derivative", tally, end, (REAL,))
    except Unrunnable:
        return broken
    except Exception as error:
        tally.notes += (f"derivatives could not be had in float64: {first_line(error)}",)
        return broken
    return None if worse is None else broken
