"""A site at smaller shapes, one size and all its multiples divided, wherever the number stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compat.jaxprs import Eqn, Var
from .dimensions import LEAST


@dataclass(frozen=True)
class Scale:
    """Multiples of ``unit`` are divided by ``by``."""

    unit: int
    by: int

    def size(self, n: int) -> int:
        """A size, or a number that is one."""
        return n // self.by if abs(n) >= LEAST and n % self.unit == 0 else n

    def bound(self, n: int) -> int:
        """A size, or the last place of one."""
        if self.size(n) != n:
            return self.size(n)
        return self.size(n + 1) - 1

    def shape(self, var: Var) -> tuple[int, ...]:
        """The smaller shape of a value."""
        return tuple(map(self.size, var.aval.shape))

    def params(self, eqn: Eqn) -> dict[str, Any]:
        """An equation's params, with the sizes in them."""
        return {k: self._param(v) for k, v in eqn.params.items()}

    def _param(self, value: Any) -> Any:
        if type(value) is int:
            return self.bound(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        return value


SAME = Scale(1, 1)
"""The program's own shapes."""
