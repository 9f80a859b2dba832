"""A site at smaller shapes, single dimensions divided: which, by how much, and what follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...compat import jaxprs
from ...compat.jaxprs import Eqn, Var
from ...passes.engine.fragments import Cut
from .dimensions import LEAST, Dimensions, Key, keys, size_of

MOST = 5
"""Dimensions that are divided together, or one by one, at most."""


@dataclass(frozen=True)
class ByDimension:
    """A part's dimensions with the number that each is divided by."""

    dims: Dimensions
    divisors: Mapping[Key, int]
    numbers: bool = True
    """Whether numbers in the program that are a size become the smaller one."""

    def shape(self, var: Var) -> tuple[int, ...]:
        """The smaller shape of a value."""
        return tuple(size_of(k) // self._by(k) for k in keys(var))

    def _by(self, key: Key) -> int:
        return self.divisors.get(self.dims.root(key), 1)

    def changed(self) -> dict[int, int]:
        """Sizes that become smaller, by what they were; where one does in two ways, either."""
        found = [k for v in self.dims.values for k in keys(v) if self._by(k) > 1]
        return {size_of(k): size_of(k) // self._by(k) for k in found}

    def bound(self, n: int) -> int:
        """A number that is a size, or the last place of one."""
        sizes = self.changed() if self.numbers else {}
        return sizes.get(n, sizes[n + 1] - 1 if n + 1 in sizes else n)

    def params(self, eqn: Eqn) -> dict[str, Any]:
        """An equation's params at the smaller shapes."""
        params, name = dict(eqn.params), eqn.primitive.name
        if name in _SHAPED:
            return {**params, _SHAPED[name]: self.shape(eqn.outvars[0])}
        source = eqn.invars[0] if eqn.invars else None
        if source is None or jaxprs.is_literal(source):
            return params
        by = [self._by(k) for k in keys(source)]
        if name == "slice":
            for key in ("start_indices", "limit_indices"):
                params[key] = tuple(n // b for n, b in zip(params[key], by, strict=True))
        elif name == "dynamic_slice":
            sizes = zip(params["slice_sizes"], by, strict=True)
            params["slice_sizes"] = tuple(n // b for n, b in sizes)
        elif name == "pad":
            config = zip(params["padding_config"], by, strict=True)
            params["padding_config"] = tuple((lo // b, hi // b, i) for (lo, hi, i), b in config)
        elif name == "split":
            params["sizes"] = tuple(n // by[params["axis"]] for n in params["sizes"])
        else:
            smaller = self._sizes(eqn)
            params = {k: _replaced(v, smaller) for k, v in params.items()}
        return params

    def _sizes(self, eqn: Eqn) -> dict[int, int]:
        """What becomes of a size in an equation whose params say it as a number."""
        values = [a for a in (*eqn.invars, *eqn.outvars) if not jaxprs.is_literal(a)]
        found = sorted((k for v in values for k in keys(v)), key=self._by)
        return {size_of(k): size_of(k) // self._by(k) for k in found if size_of(k) >= LEAST}


_SHAPED = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape"}


def _replaced(value: Any, sizes: Mapping[int, int]) -> Any:
    if type(value) is int:
        return sizes.get(value, value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(v, sizes) for v in value)
    return value


def assignments(
    part: Cut, size: float, work: float, floors: Sequence[int]
) -> Iterator[ByDimension]:
    """Ways to make a part smaller by as much or more; one dimension alone before several.

    Args:
        part: the equations.
        size: how often its values' bytes should fit what they do now.
        work: how often that of its matrix products should.
        floors: what no dimension becomes smaller than, one after the other: a rewrite that tiles
            doesn't apply to small sizes.
    """
    dims = Dimensions(part)
    roots = dims.roots()[:MOST]
    for floor in floors:
        for count in range(1, len(roots) + 1):
            for chosen in itertools.combinations(roots, count):
                found = _gentlest(dims, chosen, size, work, floor)
                if found is not None:
                    yield from _both(dims, found)


def _gentlest(
    dims: Dimensions, chosen: tuple[Key, ...], size: float, work: float, floor: int
) -> dict[Key, int] | None:
    """The smallest divisors of some dimensions that suffice, those of the longest the largest."""
    by = dict.fromkeys(chosen, 1)
    found: dict[Key, int] | None = {}
    most = _bytes(dims, {}) / size, _work(dims, {}) / work

    def is_enough(found: dict[Key, int]) -> bool:
        small = _bytes(dims, found) <= most[0] and _work(dims, found) <= most[1]
        return min(by.values()) > 1 and small

    while found is not None and not is_enough(found):
        longest = next((k for k in chosen if by[k] == 1), None)
        longest = longest or max(chosen, key=lambda k: size_of(k) // by[k])
        if size_of(longest) < 2 * by[longest] * floor:
            return None
        by[longest] *= 2
        found = dims.divided({k: n for k, n in by.items() if n > 1})
    return found


def _bytes(dims: Dimensions, divisors: Mapping[Key, int]) -> float:
    """Of all values, as far as their types have a size, and of what a CPU makes beside them."""
    total = 0.0
    for v in dims.values:
        by = np.prod([divisors.get(dims.root(k), 1) for k in keys(v)], dtype=float)
        total += float(v.aval.size) * getattr(v.aval.dtype, "itemsize", 0) / float(by)
    for more, found in dims.expanded:
        total += more / float(np.prod([divisors.get(dims.root(k), 1) for k in found], dtype=float))
    return total


def _work(dims: Dimensions, divisors: Mapping[Key, int]) -> float:
    """Of all matrix products: each dimension of one is in two of the three arrays, or nearly so."""
    total = 0.0
    for work, found in dims.work:
        by = np.prod([divisors.get(dims.root(k), 1) for k in found], dtype=float)
        total += work / float(np.sqrt(by))
    return total


def _both(dims: Dimensions, divisors: Mapping[Key, int]) -> Iterator[ByDimension]:
    """With numbers that are sizes made smaller, and where that is open, without."""
    one = ByDimension(dims, divisors)
    yield one
    sizes = one.changed()
    every = (k for v in dims.values for k in keys(v))
    if any(size_of(k) in sizes and dims.root(k) not in divisors for k in every):
        yield ByDimension(dims, divisors, numbers=False)
