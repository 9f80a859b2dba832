"""Mutants of Pallas kernels: of their calls, and of their decoded bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...compat.mlir import ir
from .draft import Draft, Kernel, config_of, set_config, walk
from .mutant import Edit, Mutant

# What is done to a body: given the kernel, every place where it can be done.
Places = Callable[[Kernel], list[Any]]


def _in_bodies(places: Places) -> Callable[[Draft], list[Any]]:
    """One site for each call of a kernel that has such a place: the last of them."""

    def sites(draft: Draft) -> list[Any]:
        found = []
        for call in draft.kernels():
            kernel = Kernel(call)
            with kernel.context:
                here = places(kernel)
                if here:
                    found.append((kernel, here[-1]))
        return found

    return sites


def _body(edit: Callable[[Kernel, Any], None]) -> Edit:
    def make(draft: Draft, site: Any) -> None:
        kernel, place = site
        with kernel.context, ir.Location.unknown():
            edit(kernel, place)
        kernel.store()

    return make


def _named(name: str) -> Places:
    return lambda kernel: [op for op in walk(kernel.main) if op.name == name]


def _become(name: str) -> Callable[[Kernel, Any], None]:
    def edit(kernel: Kernel, op: Any) -> None:
        attributes = {key: op.attributes[key] for key in op.attributes}
        with ir.InsertionPoint(op):
            types = [value.type for value in op.results]
            new = ir.Operation.create(name, types, list(op.operands), attributes)
        op.results[0].replace_all_uses_with(new.results[0])
        op.erase()

    return edit


def _another_bound(kernel: Kernel, loop: Any) -> None:
    bound = loop.operands[1]
    with ir.InsertionPoint(loop):
        attributes = {"value": ir.IntegerAttr.get(bound.type, 5)}
        new = ir.Operation.create("arith.constant", [bound.type], [], attributes)
    loop.operands[1] = new.results[0]


def _with_semantics(kernel: Kernel) -> list[Any]:
    main, name = kernel.main, "dimension_semantics"
    return [main] if name in main.attributes and list(main.attributes[name]) else []


def _turn_semantics(kernel: Kernel, main: Any) -> None:
    old = [str(item) for item in main.attributes["dimension_semantics"]]
    last = old[-1]
    swap = ("arbitrary", "parallel") if "arbitrary" in last else ("parallel", "arbitrary")
    new = [ir.Attribute.parse(text) for text in (*old[:-1], last.replace(*swap))]
    main.attributes["dimension_semantics"] = ir.ArrayAttr.get(new)


def _index_maps(kernel: Kernel) -> list[Any]:
    """Returns of index maps that give two different values of one type."""
    found = []
    for function in kernel.functions[1:]:
        last = list(function.regions[0].blocks[0].operations)[-1].operation
        values = list(last.operands)
        for i in range(len(values)):
            for j in range(i + 1, len(values)):
                if values[i] != values[j] and values[i].type == values[j].type:
                    found.append((last, i, j))
    return found


def _turn_index_map(kernel: Kernel, place: Any) -> None:
    last, i, j = place
    first, second = last.operands[i], last.operands[j]
    last.operands[i], last.operands[j] = second, first


def _scratch(kernel: Kernel) -> list[Any]:
    """Positions of the scratch buffers that have dimensions."""
    main = kernel.main
    if "scratch_operands" not in main.attributes:
        return []
    count = main.attributes["scratch_operands"].value
    types = [str(t) for t in main.attributes["function_type"].value.inputs]
    return [i for i in range(len(types) - count, len(types)) if _first_extent(types[i])]


def _first_extent(text: str) -> str:
    head = text.removeprefix("memref<").partition("x")[0]
    return head if text.startswith("memref<") and head.isdigit() else ""


def _retype(kernel: Kernel, index: int, text: str) -> None:
    """Gives an argument of the kernel another type; nothing verifies its uses."""
    main = kernel.main
    kind = ir.Type.parse(text)
    main.regions[0].blocks[0].arguments[index].set_type(kind)
    function = main.attributes["function_type"].value
    inputs = [kind if i == index else t for i, t in enumerate(function.inputs)]
    new = ir.FunctionType.get(inputs, list(function.results))
    main.attributes["function_type"] = ir.TypeAttr.get(new)


def _double_scratch(kernel: Kernel, index: int) -> None:
    text = str(kernel.main.attributes["function_type"].value.inputs[index])
    extent = _first_extent(text)
    _retype(kernel, index, text.replace(extent, str(2 * int(extent)), 1))


def _movable_buffers(draft: Draft) -> list[Any]:
    """Buffers in VMEM that could as well be in another memory: their users accept both."""
    found = []
    for call in draft.kernels():
        count = len(Kernel(call).main.attributes["function_type"].value.inputs)
        for index in range(count):
            kernel = Kernel(call)
            with kernel.context, ir.Location.unknown():
                kind = str(kernel.main.attributes["function_type"].value.inputs[index])
                if "memory_space<vmem>" in kind:
                    _to_hbm(kernel, index)
                    if _verifies(kernel):
                        found.append((Kernel(call), index))
                        break
    return found


def _verifies(kernel: Kernel) -> bool:
    try:
        return bool(kernel.module.operation.verify())
    except ir.MLIRError:
        return False


def _to_hbm(kernel: Kernel, index: int) -> None:
    text = str(kernel.main.attributes["function_type"].value.inputs[index])
    _retype(kernel, index, text.replace("memory_space<vmem>", "memory_space<hbm>"))


def _loads(kernel: Kernel) -> list[Any]:
    """A load, and a later store to the same memory in its block that doesn't need it."""
    found = []
    for op in walk(kernel.main):
        if op.name != "vector.load":
            continue
        ops = [view.operation for view in op.block.operations]
        for later in ops[ops.index(op) + 1 :]:
            used = any(value in list(op.results) for value in later.operands)
            if used:
                break
            if later.name == "tpu.vector_store" and op.operands[0] in list(later.operands):
                found.append((op, later))
                break
    return found


def _load_after(kernel: Kernel, place: Any) -> None:
    load, store = place
    load.move_after(store)


# The call


def _calls(is_wanted: Callable[[dict[str, Any]], bool]) -> Callable[[Draft], list[Any]]:
    return lambda draft: [call for call in draft.kernels() if is_wanted(config_of(call))]


def _configured(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(draft: Draft, call: Any) -> None:
        config = config_of(call)
        change(config)
        set_config(call, config)

    return edit


def _more_vmem(config: dict[str, Any]) -> None:
    for entry in config.setdefault("scoped_memory_configs", []):
        entry["size"] += 1 << 20
        return
    config["scoped_memory_configs"].append({"memory_space": 1, "offset": 0, "size": 48 << 20})


def _fuse_inputs(config: dict[str, Any]) -> None:
    inner = config["custom_call_config"]
    inner["allow_input_fusion"] = [not x for x in inner.get("allow_input_fusion", [False])]


def _collective_id(call: Any) -> int | None:
    found: int | None = config_of(call)["custom_call_config"].get("collective_id")
    return found


def _communicating(draft: Draft) -> list[Any]:
    """Kernels with a collective id other than that of the first that has one."""
    found = [call for call in draft.kernels() if _collective_id(call) is not None]
    return [call for call in found if _collective_id(call) != _collective_id(found[0])]


def _share_collective(draft: Draft, call: Any) -> None:
    ids = [_collective_id(other) for other in draft.kernels()]
    config = config_of(call)
    config["custom_call_config"]["collective_id"] = next(n for n in ids if n is not None)
    set_config(call, config)


def _turn_side_effect(draft: Draft, call: Any) -> None:
    old = "has_side_effect" in call.attributes and call.attributes["has_side_effect"].value
    call.attributes["has_side_effect"] = ir.BoolAttr.get(not old)


def _ranked_operand(draft: Draft) -> list[Any]:
    return [call for call in draft.kernels() if _ranked(call) is not None]


def _ranked(call: Any) -> int | None:
    kinds = [str(value.type) for value in call.operands]
    return next((i for i, kind in enumerate(kinds) if "x" in kind), None)


def _widen_operand(draft: Draft, call: Any) -> None:
    """The kernel is handed an operand of twice the rows; its body and config stay."""
    index = _ranked(call)
    assert index is not None
    value = call.operands[index]
    shape = list(value.type.shape)
    wide = ir.RankedTensorType.get([shape[0] * 2, *shape[1:]], value.type.element_type)
    attributes = {"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)}
    with ir.InsertionPoint(call), call.location:
        twice = ir.Operation.create("stablehlo.concatenate", [wide], [value, value], attributes)
    call.operands[index] = twice.results[0]


def _turn_layout(draft: Draft, call: Any) -> None:
    layouts = list(call.attributes["operand_layouts"])
    index = _ranked_by_two(call)
    old = str(layouts[index])
    inside = old[old.index("[") + 1 : old.index("]")].split(", ")
    new = old.replace(", ".join(inside), ", ".join(reversed(inside)))
    layouts[index] = ir.Attribute.parse(new)
    call.attributes["operand_layouts"] = ir.ArrayAttr.get(layouts)


def _ranked_by_two(call: Any) -> int:
    if "operand_layouts" not in call.attributes:
        return -1
    texts = [str(item) for item in call.attributes["operand_layouts"]]
    return next((i for i, text in enumerate(texts) if ", " in text), -1)


def _mutants() -> Iterator[Mutant]:
    def inside(
        name: str, needs: str, places: Places, edit: Callable[[Kernel, Any], None]
    ) -> Mutant:
        return Mutant(name, needs, _in_bodies(places), _body(edit), "kernel")

    def outside(name: str, needs: str, sites: Callable[[Draft], list[Any]], edit: Edit) -> Mutant:
        return Mutant(name, needs, sites, edit, "stablehlo.custom_call")

    every = _calls(lambda config: True)
    yield inside("a kernel's op, add to mul", "a float addition in a kernel", _named("arith.addf"),
                 _become("arith.mulf"))  # fmt: skip
    yield inside("a kernel's loop bound", "a loop in a kernel", _named("scf.for"), _another_bound)
    yield inside("dimension_semantics", "a kernel with a grid", _with_semantics, _turn_semantics)
    yield inside("index map", "an index map of two dimensions", _index_maps, _turn_index_map)
    yield inside("scratch shape", "a scratch buffer", _scratch, _double_scratch)
    yield Mutant(
        "memory space", "a buffer in VMEM that could be in HBM", _movable_buffers, _body(_to_hbm),
        "kernel",
    )  # fmt: skip
    yield inside(
        "a load moved across a store", "a load and a later store of one buffer", _loads, _load_after
    )
    yield outside("vmem limit", "a kernel", every, _configured(_more_vmem))
    yield outside("input fusion", "a kernel", every, _configured(_fuse_inputs))
    yield outside(
        "two kernels sharing one collective id",
        "two kernels that communicate",
        _communicating,
        _share_collective,
    )
    yield outside("has_side_effect", "a kernel", every, _turn_side_effect)
    yield outside(
        "operand shape with the same body", "a kernel with an operand", _ranked_operand,
        _widen_operand,
    )  # fmt: skip
    yield outside(
        "layout of a kernel's operand",
        "a kernel with an operand of two dimensions",
        lambda draft: [call for call in draft.kernels() if _ranked_by_two(call) >= 0],
        _turn_layout,
    )


MUTANTS: tuple[Mutant, ...] = tuple(_mutants())
