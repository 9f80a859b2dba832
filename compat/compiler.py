"""From jax's ``Lowered`` to what XLA needs to compile it, and the compilation itself.

`compile_settings` and `module_bytes` run where the user's code was lowered, `compile_module` in
another process, against devices that libtpu only describes. jax's own path ties the two together:
its ``Lowered.compile`` wants real devices in the process that traced.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xc
from jaxlib.mlir import ir as _ir

from .call_places import with_call_places
from .lowered import device_count

# Settings that jax reads when it makes the compiler's options.
_SETTINGS = (
    "jax_use_shardy_partitioner",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_compiler_enable_remat_pass",
)


def module_bytes(lowered: Any, *, locations: bool = True) -> bytes:
    """The StableHLO module of a ``Lowered`` as MLIR bytecode, for a compiler.

    Operations that have no line have that of their function's call. Without ``locations``, two
    modules that are equal but for the lines they come from are equal bytes.
    """
    module = lowered.compiler_ir("stablehlo")
    if locations:
        return _bytecode(with_call_places(module))
    with module.context:
        return _bytecode(_ir.Module.parse(module.operation.get_asm(enable_debug_info=False)))


def _bytecode(module: Any) -> bytes:
    sink = io.BytesIO()
    module.operation.write_bytecode(sink)
    return sink.getvalue()


def compile_settings(lowered: Any, devices: int = 1) -> dict[str, Any]:
    """What jax would tell the compiler beside the module, as plain JSON.

    Args:
        lowered: jax's ``Lowered``.
        devices: of the mesh that it was lowered under. An abstract mesh has none, so that jax
            takes a program for one of a single device where no argument says how it is sharded.
    """
    args = lowered._lowering.compile_args
    inputs, outputs = _pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    values: Mapping[str, Any] = jax.config.values
    options = dict(lowered._lowering._compiler_options_kvs or ())
    return {
        "partitions": max(device_count(lowered), devices),
        "tuple_args": bool(args["tuple_args"]),
        "propagate_inputs": [bool(x) for x in inputs],
        "propagate_outputs": [bool(x) for x in outputs],
        "compiler_options": {name: _plain(value) for name, value in options.items()},
        "config": {name: _plain(values[name]) for name in _SETTINGS if name in values},
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def compile_module(module: bytes, settings: Mapping[str, Any], devices: Sequence[Any]) -> Any:
    """Compiles a module for devices of a topology, and returns the executable.

    Args:
        module: from `module_bytes`.
        settings: from `compile_settings`.
        devices: at least as many of libtpu's described devices as the module has partitions.
    """
    for name, value in settings["config"].items():
        jax.config.update(name, value)
    chosen = list(devices)[: settings["partitions"]]
    backend = chosen[0].client
    options = _compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(chosen),
        device_assignment=np.array([chosen], dtype=object),
        env_options_overrides=dict(settings["compiler_options"]),
        backend=backend,
    )
    options.parameter_is_tupled_arguments = settings["tuple_args"]
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = settings["propagate_inputs"]
    build.allow_spmd_sharding_propagation_to_output = settings["propagate_outputs"]
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        return _compiler.backend_compile_and_load(
            backend, parsed, _xc.DeviceList(tuple(chosen)), options, []
        )


def executable_text(executable: Any) -> str:
    """The optimised HLO of an executable."""
    return "\n\n".join(module.to_string() for module in executable.hlo_modules())


def executable_memory(executable: Any) -> dict[str, int]:
    """Bytes on one device by kind: arguments, outputs, alias, temp, code, peak (0: not said)."""
    stats = executable.get_compiled_memory_stats()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temp": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
        "peak": int(getattr(stats, "peak_memory_in_bytes", 0) or 0),
    }


def executable_cost(executable: Any) -> dict[str, float]:
    """XLA's own counts for the whole program; loops are counted once."""
    found = executable.cost_analysis()
    if isinstance(found, list):
        found = found[0] if found else {}
    wanted = ("flops", "bytes accessed", "transcendentals")
    return {name: float(found[name]) for name in wanted if name in found}
