"""Variations of a module that carry no meaning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ...compat.mlir import ir
from .collective_mutants import set_channel
from .draft import Draft, Kernel, config_of, set_config
from .mutant import Variation


def _without_locations(draft: Draft) -> bool:
    draft.reparsed(lambda text: text)
    return True


def _renamed_functions(draft: Draft) -> bool:
    private = [name for name in draft.functions if name != "main"]
    for number, name in enumerate(private):
        new = f"renamed_{len(private) - number}"
        ir.SymbolTable.replace_all_symbol_uses(name, new, draft.operation)
        draft.functions[name].attributes["sym_name"] = ir.StringAttr.get(new)
    draft.__dict__.pop("functions", None)
    return bool(private)


def _functions_in_another_order(draft: Draft) -> bool:
    private = [op for name, op in draft.functions.items() if name != "main"]
    for function in private[1:]:
        function.move_before(private[0])
        private[0] = function
    return len(private) > 1


def _renamed_meshes(draft: Draft) -> bool:
    meshes = [v.operation for v in draft.body.operations if v.operation.name == "sdy.mesh"]
    for number, mesh in enumerate(meshes):
        name = mesh.attributes["sym_name"].value
        ir.SymbolTable.replace_all_symbol_uses(name, f"grid_{number}", draft.operation)
        mesh.attributes["sym_name"] = ir.StringAttr.get(f"grid_{number}")
    return bool(meshes)


def _renamed_module(draft: Draft) -> bool:
    draft.operation.attributes["sym_name"] = ir.StringAttr.get("another_module")
    return True


def _renumbered_channels(draft: Draft) -> bool:
    found = [op for op in draft.ops() if "channel_handle" in op.attributes]
    for op in found:
        number = int(re.findall(r"handle = (\d+)", str(op.attributes["channel_handle"]))[0])
        set_channel(op, 100 - number)
    return bool(found)


def _renumbered_collectives(draft: Draft) -> bool:
    found = [c for c in draft.kernels() if "collective_id" in config_of(c)["custom_call_config"]]
    for call in found:
        config = config_of(call)
        config["custom_call_config"]["collective_id"] = (
            40 - config["custom_call_config"]["collective_id"]
        )
        set_config(call, config)
    return bool(found)


def _turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(list(value))}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def _json_key_order(draft: Draft) -> bool:
    calls = draft.kernels()
    for call in calls:
        set_config(call, _turned(config_of(call)), separators=(",", ":"), indent=1)
    return bool(calls)


def _renamed_kernels(draft: Draft) -> bool:
    calls = draft.kernels()
    for call in calls:
        call.attributes["kernel_name"] = ir.StringAttr.get("another_name")
        kernel = Kernel(call)
        with kernel.context:
            kernel.module.operation.attributes["sym_name"] = ir.StringAttr.get("another_kernel")
            for number, function in enumerate(kernel.functions):
                name, new = function.attributes["sym_name"].value, f"renamed_{number}"
                ir.SymbolTable.replace_all_symbol_uses(name, new, kernel.module.operation)
                function.attributes["sym_name"] = ir.StringAttr.get(new)
        kernel.store()
    return bool(calls)


def _other_mosaic_version(draft: Draft) -> bool:
    calls = draft.kernels()
    version = 0
    for call in calls:
        kernel = Kernel(call)
        version = kernel.version - 1
        kernel.store(version)
    draft.mosaic_version = str(version)
    return bool(calls)


def _renamed_results(draft: Draft) -> bool:
    if "res_attrs" not in draft.main.attributes:
        return False
    entries = []
    for number, entry in enumerate(draft.main.attributes["res_attrs"]):
        found = {item.name: item.attr for item in entry}
        found["jax.result_info"] = ir.StringAttr.get(f"result.renamed[{number}]")
        entries.append(ir.DictAttr.get(found))
    draft.main.attributes["res_attrs"] = ir.ArrayAttr.get(entries)
    return True


def _variation(name: str, needs: str, edit: Callable[[Draft], bool]) -> Variation:
    return Variation(name, needs, edit)


VARIATIONS: tuple[Variation, ...] = (
    _variation("debug locations dropped", "", _without_locations),
    _variation("private functions renamed", "a private function", _renamed_functions),
    _variation("private functions in another order", "two functions", _functions_in_another_order),
    _variation("mesh symbols renamed", "a mesh", _renamed_meshes),
    _variation("module renamed", "", _renamed_module),
    _variation("results renamed", "a result with a path", _renamed_results),
    _variation("channel ids renumbered", "a channel", _renumbered_channels),
    _variation("collective ids renumbered", "kernels that communicate", _renumbered_collectives),
    _variation("JSON key order and spaces", "a kernel", _json_key_order),
    _variation("kernels and their functions renamed", "a kernel", _renamed_kernels),
    _variation("kernels in another Mosaic version", "a kernel", _other_mosaic_version),
)
