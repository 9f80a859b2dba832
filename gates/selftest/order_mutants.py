"""Mutants of the order of operations, and of the functions that they stand in."""

from __future__ import annotations

from typing import Any

from ...compat.mlir import ir
from .draft import Draft
from .liveness import is_effect
from .mutant import Mutant, both, itself

_PURE = (
    "stablehlo.add",
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.multiply",
    "stablehlo.reshape",
    "stablehlo.subtract",
    "stablehlo.transpose",
)


def _effect_pairs(draft: Draft) -> list[Any]:
    """Two effects of one block, the second of which could as well come first."""
    found = []
    for op in draft.ops():
        if not is_effect(op) or str(op.operands[0].type) == "":
            continue
        earlier = _effect_before(op)
        if earlier is None or not _free_of(op, earlier):
            continue
        if [*op.operands] != [*earlier.operands] or op.name != earlier.name:
            found.append((earlier, op))
    return found


def _effect_before(op: Any) -> Any:
    found = None
    for view in op.block.operations:
        if view.operation == op:
            return found
        if is_effect(view.operation):
            found = view.operation
    return None


def _free_of(op: Any, earlier: Any) -> bool:
    """Whether every operand of ``op`` is there before ``earlier``."""
    before = set()
    for view in op.block.operations:
        if view.operation == earlier:
            break
        before.update(view.operation.results)
    own = [view.operation for view in op.block.operations]
    for operand in op.operands:
        owner = operand.owner
        owner = getattr(owner, "operation", owner)
        if owner in own and operand not in before:
            return False
    return True


def _put_second_first(draft: Draft, pair: Any) -> None:
    earlier, later = pair
    later.move_before(earlier)


def _unread_effects(draft: Draft) -> list[Any]:
    """Collectives and kernels whose result has the type of an operand, and a reader."""
    return [
        op
        for op in draft.ops()
        if is_effect(op)
        and len(op.results) == 1
        and op.results[0].type == op.operands[0].type
        and any(use.owner.operation.name.startswith("stablehlo.") for use in op.results[0].uses)
    ]


def _read_before(draft: Draft, op: Any) -> None:
    use = next(u for u in op.results[0].uses if u.owner.operation.name.startswith("stablehlo."))
    use.owner.operation.operands[use.operand_number] = op.operands[0]


def _pure_pairs(draft: Draft) -> list[Any]:
    """Neighbours that compute something, the second of which doesn't read the first."""
    found = []
    for first in draft.ops(*_PURE):
        ops = [view.operation for view in first.block.operations]
        second = ops[ops.index(first) + 1]
        reads = any(value in list(first.results) for value in second.operands)
        if second.name in _PURE and second.name != first.name and not reads:
            found.append((first, second))
    return found


def _shared_functions(draft: Draft) -> list[Any]:
    calls: dict[str, list[Any]] = {}
    for call in draft.ops("func.call"):
        calls.setdefault(call.attributes["callee"].value, []).append(call)
    return [found[-1] for found in calls.values() if len(found) > 1]


def _duplicate_function(draft: Draft, call: Any) -> None:
    name = call.attributes["callee"].value
    copy = draft.functions[name].clone(ip=ir.InsertionPoint(draft.body))
    copy.operation.attributes["sym_name"] = ir.StringAttr.get("copied_for_one_call")
    call.attributes["callee"] = ir.FlatSymbolRefAttr.get("copied_for_one_call")


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "two effects swapped",
        "two effects in a row that don't depend on each other",
        _effect_pairs,
        _put_second_first,
    ),
    Mutant(
        "value moved across an effect it reads",
        "an effect whose result has the type of its operand",
        _unread_effects,
        _read_before,
        lives=itself,
    ),
    Mutant(
        "two pure operations swapped",
        "two neighbours that don't read each other",
        _pure_pairs,
        _put_second_first,
        levels=("exact", "inlined"),
        lives=both,
    ),
    Mutant(
        "function duplicated",
        "a function called twice",
        _shared_functions,
        _duplicate_function,
        levels=("exact",),
    ),
)
