"""Whether the derivatives of a site's two sides keep its contract."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...passes.base import Contract
from .check import Broken, Limits, Tally, first_line, rounded
from .compare import Apart, difference
from .derivative import Derivative, derivative
from .evaluate import Unrunnable
from .fillings import filled
from .problem import Problem
from .themes import MODERATE, REAL, SUMMED
from .wide import far

Array = Any
REAL_SEEDS = 4
"""Fillings at which derivatives are taken of what is no integer."""


def derivatives_differ(
    problem: Problem, contract: Contract, tally: Tally, limits: Limits, end: float
) -> Broken | None:
    """Whether the derivatives break the contract, where there are any; also away from one."""
    found = derivative(problem)
    if isinstance(found, str):
        tally.notes += (found,)
        return None
    broken = _near_one(problem, found, contract, tally, limits, end)
    return broken or _away(problem, found, tally, limits, end)


def _away(
    problem: Problem, found: Derivative, tally: Tally, limits: Limits, end: float
) -> Broken | None:
    """The first input of moderate exponents at which the rewrite's derivative is far off."""
    for theme, arrays in filled(problem, [MODERATE], limits.seeds):
        if time.monotonic() > end:
            return None
        before, after = found.both(arrays)
        tally.derivatives += 1
        if isinstance(after, str):
            return Broken(after, theme.name, tuple(arrays), "derivative")
        if all(Apart().plus(b, a).close for b, a in zip(before, after, strict=True)):
            continue
        try:
            place = far(before, after, found.exactly(arrays))
        except Exception:
            continue  # what it should be can't be had: sums may cancel, or leave the range
        if place is not None:
            return Broken(place, theme.name, tuple(arrays), "derivative")
    return None


def _near_one(
    problem: Problem,
    found: Derivative,
    contract: Contract,
    tally: Tally,
    limits: Limits,
    end: float,
) -> Broken | None:
    """Whether the derivatives break the contract at small integers, or at normal numbers.

    Sums of cotangents are compared on small integers, on which they are exact in any order, and
    then on what is no integer, where they may be added up in another order.
    """
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
