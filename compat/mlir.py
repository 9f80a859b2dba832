"""MLIR's Python bindings as jaxlib ships them, and the differences between versions."""

from __future__ import annotations

import importlib
from typing import Any

from jax._src import tpu_custom_call as _tpu_custom_call
from jax._src.interpreters import mlir as _mlir
from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import stablehlo as _stablehlo
from jaxlib.mlir.passmanager import PassManager as PassManager

_lib: Any = importlib.import_module("jax._src.lib")


NEWEST = "newest"
"""The version of kernel encoding where jax states none: what jaxlib and libtpu agree on."""


def mosaic_context() -> Any:
    """A fresh context that can parse the body of a Mosaic kernel.

    Both settings are needed: without the registered tpu dialect jax 0.10.2's bodies fail to
    parse, and without unregistered dialects the serialised form itself is rejected.
    """
    context = ir.Context()
    context.append_dialect_registry(_mlir.upstream_dialects)
    context.load_all_available_dialects()
    _lib.tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    return context


def mosaic_version(route: str) -> str:
    """The version in which kernels are encoded when lowering by ``route``.

    Without a backend, as on the abstract route, jax encodes in the oldest version it still
    supports; with one, in its newest, which it states nowhere but in the encoded kernel.
    """
    return str(_tpu_custom_call._FWD_COMPAT_VERSION) if route == "abstract" else NEWEST


def parse_stablehlo(data: bytes) -> Any:
    """A module of StableHLO from text, bytecode or a portable artifact, in a context of its own.

    Raises:
        ir.MLIRError, ValueError or RuntimeError: none of these. Damaged bytecode may also kill the
            process.
    """
    context = _mlir.make_ir_context()
    with context, ir.Location.unknown():
        if b"StableHLO_v" in data[:64]:
            return _stablehlo.deserialize_portable_artifact(context, data)
        return ir.Module.parse(data)


def channel_handle(attribute: Any) -> tuple[int, int] | None:
    """Handle and type of a StableHLO channel handle, or None for any other attribute."""
    if not _stablehlo.ChannelHandle.isinstance(attribute):
        return None
    channel = _stablehlo.ChannelHandle(attribute)
    return int(channel.handle), int(channel.channel_type)


def rename_symbols(module: Any, names: dict[str, str]) -> Any:
    """A clone of ``module`` with top-level symbols renamed, wherever attributes mention them."""
    clone = module.operation.clone()
    table = ir.SymbolTable(clone)
    for old, new in names.items():
        ir.SymbolTable.replace_all_symbol_uses(old, new, clone)
        table[old].operation.attributes["sym_name"] = ir.StringAttr.get(new)
    return _Cloned(clone)


class _Cloned:
    """The part of ``ir.Module`` that reading needs, over a cloned module operation."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation.operation
        self.body = operation.operation.regions[0].blocks[0]
        self.context = operation.context


def printed_attribute(op: Any, name: str) -> str | None:
    """The text of an operation's only attribute, read off its printed form; None if it has others.

    For attributes that the bindings can't hand out.
    """
    if [entry for entry in op.attributes if entry != name]:
        return None
    text: str = op.get_asm(print_generic_op_form=True, use_local_scope=True)
    _, found, rest = text.partition(f"<{{{name} = ")
    if not found or "\n" in text.strip():
        return None
    value, found, _ = rest.rpartition("}> : (")
    return value if found else None
