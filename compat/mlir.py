"""MLIR's Python bindings as jaxlib ships them, and the differences between versions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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


def locations_in_order(
    operation: Any, known: Mapping[Any, int], index_of: Callable[[Any], int]
) -> list[int]:
    """An index for an operation's location and those of all below it, in the order of its text.

    ``known`` maps the attributes of locations that were met before; ``index_of`` is asked for the
    others. This runs for every operation of a program.
    """
    found: list[int] = []
    add, get, onward = found.append, known.get, ir.WalkResult.ADVANCE

    def step(inner: Any) -> Any:
        location = inner.location
        index = get(location.attr)
        add(index_of(location) if index is None else index)
        return onward

    operation.walk(step, ir.WalkOrder.PRE_ORDER)
    return found
