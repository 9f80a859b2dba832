"""Whether what an operation computes can reach a result of the program or an effect.

A mutant of a dead operation is one that level ``dataflow`` rightly doesn't see, so sites are chosen
among those that live. Written over MLIR itself: it shares nothing with the code under test.
"""

from __future__ import annotations

from typing import Any

_EFFECTS = frozenset(
    {
        "stablehlo.custom_call",
        "stablehlo.all_reduce",
        "stablehlo.all_gather",
        "stablehlo.all_to_all",
        "stablehlo.reduce_scatter",
        "stablehlo.collective_permute",
        "stablehlo.collective_broadcast",
        "stablehlo.rng_bit_generator",
    }
)


def is_effect(op: Any) -> bool:
    """Whether the operation communicates, draws random bits, or runs a kernel."""
    return op.name in _EFFECTS


class Liveness:
    """Follows values forward, through calls, loops, branches and manual computations."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self._calls: dict[str, list[Any]] = {}
        for function in functions.values():
            for op in _below(function):
                if op.name == "func.call":
                    self._calls.setdefault(op.attributes["callee"].value, []).append(op)

    def lives(self, op: Any) -> bool:
        """Whether a result of ``op`` reaches a result of main, or an operand of an effect."""
        seen: set[Any] = set()
        pending = list(op.results)
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            for use in value.uses:
                reached = self._through(use.owner.operation, use.operand_number)
                if reached is None:
                    return True
                pending.extend(reached)
        return False

    def _through(self, user: Any, index: int) -> list[Any] | None:
        """What operand ``index`` of ``user`` flows into; None: out of the program."""
        name = user.name
        if is_effect(user):
            return None
        if name == "func.return":
            key = user.parent.attributes["sym_name"].value
            if key == "main":
                return None
            return [call.results[index] for call in self._calls.get(key, [])]
        if name == "func.call":
            callee = self._functions[user.attributes["callee"].value]
            return [callee.regions[0].blocks[0].arguments[index]]
        if name in ("stablehlo.return", "sdy.return"):
            return self._out_of(user, index)
        if name == "stablehlo.while":
            blocks = [region.blocks[0] for region in user.regions]
            return [user.results[index], *(block.arguments[index] for block in blocks)]
        if name == "sdy.manual_computation":
            return [user.regions[0].blocks[0].arguments[index]]
        if name == "stablehlo.optimization_barrier":
            return [user.results[index]]
        return list(user.results)

    def _out_of(self, terminator: Any, index: int) -> list[Any] | None:
        owner = terminator.parent
        owner = getattr(owner, "operation", owner)
        if is_effect(owner):
            return None
        if owner.name == "stablehlo.while":
            if terminator.block == owner.regions[0].blocks[0]:
                return list(owner.results)
            return [owner.results[index], owner.regions[1].blocks[0].arguments[index]]
        if owner.name in ("stablehlo.case", "stablehlo.if", "sdy.manual_computation"):
            return [owner.results[index]]
        return list(owner.results)


def _below(root: Any) -> Any:
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from _below(view.operation)
