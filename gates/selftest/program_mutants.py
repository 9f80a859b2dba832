"""Mutants of the operations and attributes of a program outside its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...compat.mlir import ir
from .draft import Draft
from .liveness import is_effect
from .mutant import Edit, Mutant, Sites, both, itself

_TURNED = {"LT": "LE", "LE": "LT", "GT": "GE", "GE": "GT", "EQ": "NE", "NE": "EQ"}
_PURE = (
    "stablehlo.add",
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.multiply",
    "stablehlo.reshape",
    "stablehlo.subtract",
    "stablehlo.transpose",
)


def named(*names: str) -> Sites:
    """Operations of these names."""
    return lambda draft: draft.ops(*names)


def having(sites: Sites, attribute: str) -> Sites:
    """Those of ``sites`` with an attribute."""
    return lambda draft: [op for op in sites(draft) if attribute in op.attributes]


def rewrite(attribute: str, change: Callable[[str], str]) -> Edit:
    """Changes an attribute by its text."""

    def edit(draft: Draft, op: Any) -> None:
        text = str(op.attributes[attribute])
        assert change(text) != text, text
        op.attributes[attribute] = ir.Attribute.parse(change(text))

    return edit


# Operations


def _swappable(draft: Draft) -> list[Any]:
    return [op for op in named("stablehlo.subtract")(draft) if op.operands[0] != op.operands[1]]


def _swap_operands(draft: Draft, op: Any) -> None:
    first, second = op.operands
    op.operands[0], op.operands[1] = second, first


def _turn_comparison(text: str) -> str:
    return re.sub(r"direction (\w+)>", lambda m: f"direction {_TURNED[m[1]]}>", text)


def _other_precision(text: str) -> str:
    return text.replace("DEFAULT", "HIGHEST") if "DEFAULT" in text else text.replace(
        "HIGHEST", "DEFAULT"
    )  # fmt: skip


def _mixed_dots(draft: Draft) -> list[Any]:
    return [
        op
        for op in named("stablehlo.dot_general")(draft)
        if "xbf16>" in str(op.operands[0].type) and "xf32>" in str(op.results[0].type)
    ]


def _narrow_accumulation(draft: Draft, op: Any) -> None:
    old = op.results[0]
    narrow = ir.Type.parse(str(old.type).replace("xf32>", "xbf16>"))
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op), op.location:
        dot = ir.Operation.create(op.name, [narrow], list(op.operands), attributes)
        wide = ir.Operation.create("stablehlo.convert", [old.type], [dot.results[0]])
    old.replace_all_uses_with(wide.results[0])
    op.erase()


def _remove_barrier(draft: Draft, op: Any) -> None:
    for result, operand in zip(op.results, list(op.operands), strict=True):
        result.replace_all_uses_with(operand)
    op.erase()


# Constants


def _constants(draft: Draft, is_wanted: Callable[[Any, str], bool]) -> list[Any]:
    found = []
    for op in draft.ops("stablehlo.constant"):
        value = op.attributes["value"]
        if type(value).__name__.startswith("Dense") and is_wanted(value, str(op.results[0].type)):
            found.append(op)
    return found


def _is_finite_float(value: Any, text: str) -> bool:
    return text.endswith(("f32>", "xf32>")) and bool(np.all(np.isfinite(np.array(value))))


def _scalar(value: Any, text: str) -> bool:
    return text == "tensor<f32>" and _is_finite_float(value, text)


def _splat(value: Any, text: str) -> bool:
    return "x" in text and value.is_splat and _is_finite_float(value, text)


def _dense(value: Any, text: str) -> bool:
    return not value.is_splat and _is_finite_float(value, text)


def _integer(value: Any, text: str) -> bool:
    return text == "tensor<i32>"


def _next_float(draft: Draft, op: Any) -> None:
    """The last element becomes the float after it: one unit in the last place."""
    value = op.attributes["value"]
    array = np.array(value)
    if value.is_splat:
        array = np.nextafter(array.reshape(-1)[:1], np.float32(np.inf))
        element = ir.FloatAttr.get(ir.F32Type.get(), float(array[0]))
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, element)
        return
    array = array.copy()
    array.reshape(-1)[-1] = np.nextafter(array.reshape(-1)[-1], np.float32(np.inf))
    op.attributes["value"] = ir.DenseElementsAttr.get(array, type=value.type)


def _next_integer(draft: Draft, op: Any) -> None:
    value = op.attributes["value"]
    number = int(np.array(value).reshape(-1)[0])
    element = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number ^ 1)
    op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, element)


# Order and calls


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


# Collectives


def _sharing_channels(draft: Draft) -> list[Any]:
    found = draft.ops("stablehlo.all_reduce")
    return [op for op in found if "channel_handle" in op.attributes][1:]


def _other_channels(draft: Draft) -> None:
    """A channel of its own for every collective."""
    for number, op in enumerate(draft.ops("stablehlo.all_reduce"), 10):
        _set_channel(op, number)


def _set_channel(op: Any, number: int) -> None:
    text = str(op.attributes["channel_handle"])
    op.attributes["channel_handle"] = ir.Attribute.parse(
        re.sub(r"handle = \d+", f"handle = {number}", text)
    )


def _merge_channel(draft: Draft, op: Any) -> None:
    other = next(o for o in draft.ops("stablehlo.all_reduce") if o != op)
    op.attributes["channel_handle"] = other.attributes["channel_handle"]


def _split_channel(draft: Draft, op: Any) -> None:
    _set_channel(op, 77)


def _regroup(draft: Draft, op: Any) -> None:
    devices = int(str(draft.operation.attributes["mhlo.num_partitions"]).split(" ")[0])
    groups = np.arange(devices, dtype=np.int64).reshape(2, -1)
    wanted = ir.DenseElementsAttr.get(groups)
    if str(op.attributes["replica_groups"]) == str(wanted):
        wanted = ir.DenseElementsAttr.get(groups.reshape(-1, 2).T.copy())
    op.attributes["replica_groups"] = wanted


def _reducers(draft: Draft) -> list[Any]:
    inner = []
    for op in draft.ops("stablehlo.all_reduce"):
        inner += [v.operation for v in op.regions[0].blocks[0].operations]
    return [op for op in inner if op.name == "stablehlo.add"]


def rename(name: str) -> Edit:
    """Puts an operation of another name, and the same types, in place of one."""

    def edit(draft: Draft, op: Any) -> None:
        attributes = {key: op.attributes[key] for key in op.attributes}
        with ir.InsertionPoint(op), op.location:
            types = [value.type for value in op.results]
            new = ir.Operation.create(name, types, list(op.operands), attributes)
        for old, value in zip(op.results, new.results, strict=True):
            old.replace_all_uses_with(value)
        op.erase()

    return edit


def _pairs(*changes: tuple[str, str]) -> Callable[[str], str]:
    """Replaces the first of the texts that is there by its partner."""

    def change(text: str) -> str:
        for old, new in changes:
            if old in text:
                return text.replace(old, new)
        return text

    return change


_swap_pair: Edit = _put_second_first
_SUBTRACT = "stablehlo.subtract"
_ORDER_LEVELS: Any = ("exact", "inlined")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "operands of a subtract swapped",
        "a subtraction of two values",
        _swappable,
        _swap_operands,
        _SUBTRACT,
        lives=itself,
    ),
    Mutant(
        "compare direction",
        "a comparison",
        named("stablehlo.compare"),
        rewrite("comparison_direction", _turn_comparison),
        "stablehlo.compare",
        lives=itself,
    ),
    Mutant(
        "precision",
        "a dot with a precision",
        having(named("stablehlo.dot_general"), "precision_config"),
        rewrite("precision_config", _other_precision),
        "stablehlo.dot_general",
        lives=itself,
    ),
    Mutant(
        "accumulation dtype",
        "a dot of bf16 that accumulates in f32",
        _mixed_dots,
        _narrow_accumulation,
        "stablehlo.dot_general",
        lives=itself,
    ),
    Mutant(
        "float constant, scalar",
        "a scalar f32 constant",
        partial(_constants, is_wanted=_scalar),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "float constant, splat",
        "an f32 constant of one value",
        partial(_constants, is_wanted=_splat),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "float constant, dense",
        "an f32 constant of several values",
        partial(_constants, is_wanted=_dense),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "integer constant",
        "a scalar i32 constant",
        partial(_constants, is_wanted=_integer),
        _next_integer,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "optimization_barrier removed",
        "an optimization_barrier",
        lambda draft: draft.ops("stablehlo.optimization_barrier"),
        _remove_barrier,
        "stablehlo.optimization_barrier",
    ),
    Mutant(
        "rng algorithm",
        "an rng_bit_generator",
        named("stablehlo.rng_bit_generator"),
        rewrite("rng_algorithm", _pairs(("DEFAULT", "THREE_FRY"), ("THREE_FRY", "PHILOX"))),
        "stablehlo.rng_bit_generator",
        lives=itself,
    ),
    Mutant(
        "two effects swapped",
        "two effects in a row that don't depend on each other",
        _effect_pairs,
        _swap_pair,
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
        _swap_pair,
        levels=_ORDER_LEVELS,
        lives=both,
    ),
    Mutant(
        "function duplicated",
        "a function called twice",
        _shared_functions,
        _duplicate_function,
        levels=("exact",),
    ),
    Mutant(
        "replica_groups",
        "a collective with groups",
        having(named("stablehlo.all_reduce"), "replica_groups"),
        _regroup,
        "stablehlo.all_reduce",
    ),
    Mutant(
        "channels merged",
        "two collectives with channels",
        _sharing_channels,
        _merge_channel,
        "stablehlo.all_reduce",
        prepare=_other_channels,
    ),
    Mutant(
        "channels parted",
        "two collectives with one channel",
        _sharing_channels,
        _split_channel,
        "stablehlo.all_reduce",
    ),
    Mutant(
        "a collective's reducer, add to maximum",
        "an all_reduce that adds",
        _reducers,
        rename("stablehlo.maximum"),
    ),
)
