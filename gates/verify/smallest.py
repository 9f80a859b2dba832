"""A smaller input that still shows a violation: fewer elements that are anything but simple."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...matchers.fact import limits
from ...passes.base import Contract
from .check import PROMISE, Broken, values_differ
from .evaluate import is_float
from .inputs import Input, obeys
from .problem import Problem

TRIES = 160
"""Runs of both sides that may be spent on it."""

Array = Any


def smallest(problem: Problem, contract: Contract, found: Broken) -> Broken:
    """The same violation on simpler inputs, found by halving within `TRIES` runs."""
    of_values = found.of == "values" and not isinstance(found.place, str)
    if problem.across or not (of_values or found.of == PROMISE):
        return found
    search = _Search(problem, contract, found)
    for slot in range(len(problem.inputs)):
        search.simplify(slot)
    return search.best


class _Search:
    def __init__(self, problem: Problem, contract: Contract, found: Broken) -> None:
        self.problem, self.contract, self.best = problem, contract, found
        self.left = TRIES

    def simplify(self, slot: int) -> None:
        """Makes one input as simple as it can be."""
        one, array = self.problem.inputs[slot], self.best.arrays[slot]
        simple = simplest(one, array)
        if simple is None or array.size == 0 or self._tried(slot, simple):
            return
        size = array.size
        chunk = (size + 1) // 2
        while chunk >= 1 and self.left > 0:
            for start in range(0, size, chunk):
                if self.left <= 0:
                    break
                made = self.best.arrays[slot].copy().reshape(-1)
                part = simple.reshape(-1)[start : start + chunk]
                if made[start : start + chunk].tobytes() == part.tobytes():
                    continue
                made[start : start + chunk] = part
                self._tried(slot, made.reshape(array.shape))
            chunk = chunk // 2

    def _tried(self, slot: int, array: Array) -> bool:
        """Whether the violation is there with ``array`` too, which is then taken over."""
        if self.left <= 0 or obeys(array, self.problem.inputs[slot].fact) is not None:
            return False
        self.left -= 1
        arrays = list(self.best.arrays)
        arrays[slot] = array
        try:
            found = values_differ(self.problem, self.contract, self.best.theme, arrays)
        except Exception:
            return False
        if found is None or found.of != self.best.of:
            return False
        self.best = found
        return True


def simplest(one: Input, array: Array) -> Array | None:
    """The simplest array that obeys what is known of an input; None where that is this one only."""
    fact = one.fact
    if fact.constant is not None or fact.affine is not None or one.groups_of is not None:
        return None
    if fact.permutation is not None:
        axis = fact.permutation
        places = np.arange(array.shape[axis]).reshape(
            [-1 if d == axis else 1 for d in range(array.ndim)]
        )
        return np.ascontiguousarray(np.broadcast_to(places, array.shape)).astype(array.dtype)
    if limits(one.dtype) is not None:
        lo, hi = fact.range(one.dtype)
        return np.full(array.shape, min(max(0, lo), hi), array.dtype)
    return np.zeros(array.shape, array.dtype)


def written(array: Array, shown: int = 8) -> str:
    """An array in words: whole where it is short, else what it mostly is and what is different."""
    a = np.asarray(array)
    if is_float(a.dtype):
        a = a.astype(np.float64)
    if a.size <= shown:
        return str(a.tolist())
    words = a.astype(str)
    values, counts = np.unique(words.reshape(-1), return_counts=True)
    most = values[int(np.argmax(counts))]
    others = np.argwhere(words != most)
    if len(others) > shown:
        return f"{len(values):,} different values"
    said = ", ".join(f"{a[tuple(i)]} at {[int(n) for n in i]}" for i in others)
    return f"{most} everywhere" + (f", but {said}" if said else "")
