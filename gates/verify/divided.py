"""A site at smaller shapes, single dimensions divided: which, by how much, and what follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...compat import jaxprs
from ...compat.jaxprs import Eqn, Var
from ...passes.engine.fragments import Cut
from .dimensions import LEAST, SMALLEST, Dimensions, Key, keys, size_of

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
            sizes = self._sizes(eqn)
            params = {k: _replaced(v, sizes) for k, v in params.items()}
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


def assignments(part: Cut, over: float) -> Iterator[ByDimension]:
    """Ways to make a part smaller by ``over`` or more: one dimension first, then several."""
    dims = Dimensions(part)
    roots = dims.roots()[:MOST]
    for count in range(1, len(roots) + 1):
        for chosen in itertools.combinations(roots, count):
            for wanted in (over, 4 * over):
                found = _gentlest(dims, chosen, wanted)
                if found is not None:
                    yield from _both(dims, found)


def _gentlest(dims: Dimensions, chosen: tuple[Key, ...], over: float) -> dict[Key, int] | None:
    """The smallest divisors of some dimensions that suffice, those of the longest the largest."""
    by = dict.fromkeys(chosen, 1)
    while True:
        found = dims.divided({k: n for k, n in by.items() if n > 1}) if max(by.values()) > 1 else {}
        if found is None:
            return None
        if _bytes(dims, {}) >= over * _bytes(dims, found) and min(by.values()) > 1:
            return found
        longest = max(chosen, key=lambda k: size_of(k) // by[k])
        if min(by.values()) == 1:
            longest = next(k for k in chosen if by[k] == 1)
        if size_of(longest) < 2 * by[longest] * SMALLEST:
            return None
        by[longest] *= 2


def _bytes(dims: Dimensions, divisors: Mapping[Key, int]) -> float:
    """Of all values, as far as their types have a size."""
    total = 0.0
    for v in dims.values:
        by = np.prod([divisors.get(dims.root(k), 1) for k in keys(v)], dtype=float)
        total += float(v.aval.size) * getattr(v.aval.dtype, "itemsize", 0) / float(by)
    return total


def _both(dims: Dimensions, divisors: Mapping[Key, int]) -> Iterator[ByDimension]:
    """With numbers that are sizes made smaller, and where that is open, without."""
    one = ByDimension(dims, divisors)
    yield one
    sizes = one.changed()
    every = (k for v in dims.values for k in keys(v))
    if any(size_of(k) in sizes and dims.root(k) not in divisors for k in every):
        yield ByDimension(dims, divisors, numbers=False)
