"""Loops at level ``dataflow``: whether one visibly ends, and what settles in its body."""

from __future__ import annotations

from .ir import Op
from .schedule import Node, Region


def ends(
    cond: Region, step: Region, depth: int, levels: list[int], makers: list[Node | None]
) -> bool:
    """Whether a counter goes up by one until it meets a bound from outside the loop."""
    test = makers[cond.roots[0]] if len(cond.roots) == 1 else None
    if test is None or test.op.name != "stablehlo.compare" or test.level != depth:
        return False
    if "comparison_direction LT>" not in test.op.attrs.get("comparison_direction", ""):
        return False
    counter, bound = test.operands
    if counter not in cond.args or levels[bound] >= depth:
        return False
    update = makers[step.roots[cond.args.index(counter)]]
    if update is None or update.op.name != "stablehlo.add" or counter not in update.operands:
        return False
    steps = [makers[value] for value in update.operands if value != counter]
    if len(steps) != 1 or steps[0] is None or steps[0].op.name != "stablehlo.constant":
        return False
    return steps[0].op.attrs.get("value", "").startswith("dense<1> : tensor<i")


def inside(op: Op) -> list[Op]:
    """The operations in the regions of ``op`` but for their terminators."""
    return [o for region in op.regions for block in region for o in block.ops[:-1]]


class Waits:
    """How many operands of each operation are still to be settled."""

    def __init__(self, ops: list[Op], inside: list[int]) -> None:
        self.inside = frozenset(inside)
        self.free: list[Op] = []
        """Operations that wait for nothing."""
        self._counts: dict[int, int] = {}
        self._readers: dict[int, list[Op]] = {}
        for op in ops:
            awaited = [value for value in op.operands if value in self.inside]
            self._counts[id(op)] = len(awaited)
            for value in awaited:
                self._readers.setdefault(value, []).append(op)
            if not awaited:
                self.free.append(op)

    def settle(self, value: int) -> list[Op]:
        """The operations that waited for nothing else."""
        found: list[Op] = []
        for op in self._readers.get(value, ()):
            self._counts[id(op)] -= 1
            if self._counts[id(op)] == 0:
                found.append(op)
        return found
