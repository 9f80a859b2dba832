"""Mutants of how a program is called and placed: arguments, results, the module, metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ...compat.mlir import ir
from .draft import Draft
from .mutant import Edit, Mutant, itself

_DONATIONS = ("jax.buffer_donor", "tf.aliasing_output")
_DIMENSIONS = re.compile(r"\[((?:\{[^{}]*\}(?:, )?)*)\]")
_FRONTEND = "mhlo.frontend_attributes"


def _entries(draft: Draft, which: str = "arg_attrs") -> list[dict[str, Any]]:
    """The attributes of each argument, or result, of main."""
    main = draft.main
    kind = main.attributes["function_type"].value
    count = len(kind.inputs if which == "arg_attrs" else kind.results)
    if which not in main.attributes:
        return [{} for _ in range(count)]
    return [{item.name: item.attr for item in entry} for entry in main.attributes[which]]


def _put(draft: Draft, index: int, change: dict[str, Any | None], which: str = "arg_attrs") -> None:
    entries = _entries(draft, which)
    for name, value in change.items():
        entries[index].pop(name, None)
        if value is not None:
            entries[index][name] = value
    draft.main.attributes[which] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])


def _arguments(is_wanted: Callable[[dict[str, Any], Any], bool]) -> Callable[[Draft], list[Any]]:
    def sites(draft: Draft) -> list[Any]:
        types = draft.main.attributes["function_type"].value.inputs
        entries = zip(_entries(draft), types, strict=True)
        return [i for i, (entry, kind) in enumerate(entries) if is_wanted(entry, kind)]

    return sites


def _is_donated(entry: dict[str, Any]) -> bool:
    return any(name in entry for name in _DONATIONS)


def _drop_donation(draft: Draft, index: int) -> None:
    _put(draft, index, dict.fromkeys(_DONATIONS))


def _add_donation(draft: Draft, index: int) -> None:
    _put(draft, index, {"jax.buffer_donor": ir.BoolAttr.get(True)})


def _turned_sharding(text: str) -> str:
    """The sharding with its dimensions moved round by one; the same text if all are alike."""
    match = _DIMENSIONS.search(text)
    if match is None:
        return text
    dims = re.findall(r"\{[^{}]*\}", match[1])
    turned = ", ".join(dims[-1:] + dims[:-1])
    return text[: match.start(1)] + turned + text[match.end(1) :]


def _is_sharded(entry: dict[str, Any], kind: Any) -> bool:
    text = str(entry.get("sdy.sharding", ""))
    return bool(text) and _turned_sharding(text) != text


def _turn_sharding(draft: Draft, index: int) -> None:
    text = str(_entries(draft)[index]["sdy.sharding"])
    _put(draft, index, {"sdy.sharding": ir.Attribute.parse(_turned_sharding(text))})


def _results(draft: Draft) -> list[Any]:
    kind = draft.main.attributes["function_type"].value
    ranked = [i for i, t in enumerate(kind.results) if "x" in str(t)]
    return ranked if _axes(draft) else []


def _shard_result(draft: Draft, index: int) -> None:
    if "sdy.sharding" in _entries(draft, "res_attrs")[index]:
        _put(draft, index, {"sdy.sharding": None}, "res_attrs")
        return
    rank = str(draft.main.attributes["function_type"].value.results[index]).count("x")
    mesh = next(v.operation for v in draft.body.operations if v.operation.name == "sdy.mesh")
    name = mesh.attributes["sym_name"].value
    dims = ", ".join(["{}"] * rank)
    sharding = ir.Attribute.parse(f"#sdy.sharding<@{name}, [{dims}]>")
    _put(draft, index, {"sdy.sharding": sharding}, "res_attrs")


def _set_entry(name: str, value: str) -> Edit:
    return lambda draft, index: _put(draft, index, {name: ir.StringAttr.get(value)})


def _twin_arguments(draft: Draft) -> list[Any]:
    """Pairs of arguments of one type, and with one set of attributes, that are both read."""
    entry = draft.main.regions[0].blocks[0]
    attrs = [str(sorted((k, str(v)) for k, v in e.items())) for e in _entries(draft)]
    args = list(entry.arguments)
    return [
        (i, j)
        for i in range(len(args))
        for j in range(i + 1, len(args))
        if args[i].type == args[j].type and attrs[i] == attrs[j]
        and list(args[i].uses) and list(args[j].uses)
    ]  # fmt: skip


def _permute_arguments(draft: Draft, pair: Any) -> None:
    args = draft.main.regions[0].blocks[0].arguments
    uses = [[(u.owner.operation, u.operand_number) for u in args[i].uses] for i in pair]
    for found, other in zip(uses, reversed(pair), strict=True):
        for user, index in found:
            user.operands[index] = args[other]


def _returned(draft: Draft) -> Any:
    return list(draft.main.regions[0].blocks[0].operations)[-1].operation


def _twin_results(draft: Draft) -> list[Any]:
    values = list(_returned(draft).operands)
    return [
        (i, j)
        for i in range(len(values))
        for j in range(i + 1, len(values))
        if values[i].type == values[j].type and values[i] != values[j]
    ]


def _permute_results(draft: Draft, pair: Any) -> None:
    last = _returned(draft)
    i, j = pair
    first, second = last.operands[i], last.operands[j]
    last.operands[i], last.operands[j] = second, first


# The module


def _module_number(name: str) -> Callable[[Draft], list[Any]]:
    return lambda draft: [name] if name in draft.operation.attributes else []


def _double(draft: Draft, name: str) -> None:
    attribute = draft.operation.attributes[name]
    draft.operation.attributes[name] = ir.IntegerAttr.get(attribute.type, attribute.value * 2)


def _axes(draft: Draft) -> list[Any]:
    found: dict[str, None] = {}
    for view in draft.body.operations:
        if view.operation.name == "sdy.mesh":
            found.update(dict.fromkeys(re.findall(r'"(\w+)"=', str(view.operation))))
    return list(found)


def _rename_axis(draft: Draft, axis: str) -> None:
    draft.reparsed(lambda text: text.replace(f'"{axis}"', '"another_axis"'))


# Metadata for the compiler


def _tagged(draft: Draft) -> list[Any]:
    return [op for op in draft.ops() if _FRONTEND in op.attributes]


def _retag(draft: Draft, op: Any) -> None:
    entries = {item.name: item.attr for item in op.attributes[_FRONTEND]}
    first = sorted(entries)[0]
    entries[first] = ir.StringAttr.get(f"{entries[first].value} changed")
    op.attributes[_FRONTEND] = ir.DictAttr.get(entries)


def _untag(draft: Draft, op: Any) -> None:
    del op.attributes[_FRONTEND]


def _calling(name: str) -> Callable[[Draft], list[Any]]:
    return lambda draft: [name] if name in draft.calling else []


def _recall(draft: Draft, name: str) -> None:
    draft.calling[name] += ", 99"


def _mutants() -> Iterator[Mutant]:
    ranked = _arguments(lambda entry, kind: "x" in str(kind) and "mhlo.layout_mode" not in entry)
    donated = _arguments(lambda entry, kind: _is_donated(entry))
    kept = _arguments(lambda entry, kind: not _is_donated(entry))
    yield Mutant("donation dropped", "a donated argument", donated, _drop_donation)
    yield Mutant("donation added", "an argument that isn't donated", kept, _add_donation)
    yield Mutant(
        "a donation that nothing uses", "a calling convention", _calling("call.donated"), _recall
    )
    yield Mutant(
        "sharding of one argument", "a sharded argument", _arguments(_is_sharded), _turn_sharding
    )
    yield Mutant("sharding of one result", "a mesh, and a ranked result", _results, _shard_result)
    yield Mutant(
        "layout mode", "a ranked argument", ranked, _set_entry("mhlo.layout_mode", "{0,1}")
    )
    yield Mutant(
        "memory kind of one argument",
        "a ranked argument",
        ranked,
        _set_entry("mhlo.memory_kind", "pinned_host"),
    )
    yield Mutant(
        "two equal-typed entry parameters permuted",
        "two arguments of one type",
        _twin_arguments,
        _permute_arguments,
    )
    yield Mutant(
        "two equal-typed results permuted", "two results of one type", _twin_results,
        _permute_results,
    )  # fmt: skip
    yield Mutant(
        "num_partitions", "a number of partitions", _module_number("mhlo.num_partitions"), _double
    )
    yield Mutant("mesh axis name", "a mesh", _axes, _rename_axis)
    yield Mutant(
        "frontend attribute changed", "a frontend attribute", _tagged, _retag, lives=itself
    )
    yield Mutant(
        "frontend attribute dropped", "a frontend attribute", _tagged, _untag, lives=itself
    )


MUTANTS: tuple[Mutant, ...] = tuple(_mutants())
