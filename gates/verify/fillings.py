"""A problem's inputs, filled with a theme's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .inputs import Theme, make
from .problem import Problem

Array = Any


def filled(
    problem: Problem, themes: Sequence[Theme], seeds: int, first: int = 0
) -> Iterator[tuple[Theme, list[Array]]]:
    """Inputs of each theme, so many times; not such as break what the program states of a value."""
    for seed in range(first, first + seeds):
        for theme in themes:
            arrays = fill(problem, theme, seed)
            if not problem.breaks_a_promise(arrays):
                yield theme, arrays


def fill(problem: Problem, theme: Theme, seed: int) -> list[Array]:
    """An array for each input; where devices talk, each device's side by side."""
    if not problem.across:
        return make(theme, problem.inputs, seed)
    from .devices import copies

    counts = copies(problem.region, problem.before)
    parts = [make(theme, problem.inputs, 1000 * seed + i) for i in range(max(counts, default=1))]
    joined = []
    for i, count in enumerate(counts):
        each = [np.atleast_1d(parts[d][i]) for d in range(count)]
        varying = bool(problem.region.fragment(problem.before).inputs[i].varying)
        joined.append(np.concatenate(each) if varying else parts[0][i])
    return joined
