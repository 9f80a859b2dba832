"""What jax's staging objects hold beside their public interface."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import jax
import numpy as np
from jax._src import config as _config
from jax.sharding import Mesh


def kernel_locations() -> AbstractContextManager[Any]:
    """A context in which kernels are lowered with their locations in the body.

    From 0.12 on jax moves them to a field beside it, as a list that Python can't read; earlier
    versions know no other place than the body.
    """
    setting = getattr(_config, "jax_mosaic_unzip_debug_locations", None)
    return nullcontext() if setting is None else cast(AbstractContextManager[Any], setting(False))


def calling_convention(lowered: Any) -> dict[str, str]:
    """What jit keeps beside the module and a caller depends on, as text by name.

    jit drops arguments that nothing reads, so the module's argument 1 may be any of the caller's.
    A donation that nothing can use leaves no trace in the module, compiler options never do.
    """
    args = jax.tree.leaves(lowered.args_info)
    hoisted = len(getattr(lowered._lowering, "const_args", None) or ())
    kept = sorted(i - hoisted for i in lowered._lowering.compile_args["kept_var_idx"])
    donated = [i for i, arg in enumerate(args) if arg.donated]
    options = sorted(lowered._lowering._compiler_options_kvs or ())
    return {
        "call.arguments": str(len(args)),
        "call.read": _numbers([i for i in kept if i >= 0]),
        "call.donated": _numbers(donated),
        "call.compiler_options": ", ".join(f"{k} = {v!r}" for k, v in options) or "none",
    }


def _numbers(numbers: list[int]) -> str:
    """``0-3, 5``: runs of numbers in order."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def hoisted_constants(lowered: Any) -> tuple[str, ...]:
    """Digests of the constants that a lowered program takes as leading arguments, in order.

    With ``jax_use_simplified_jaxpr_constants`` jax leaves large constants out of the module, which
    then says nothing about their values.
    """
    found = getattr(lowered._lowering, "const_args", None) or ()
    return tuple(_digest(np.asarray(value)) for value in found)


def _digest(value: np.ndarray[Any, Any]) -> str:
    head = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()


def device_count(lowered: Any) -> int:
    """How many devices a lowered program is partitioned over."""
    return int(lowered._lowering.compile_args["num_devices"])


def own_meshes(lowered: Any) -> list[Mesh]:
    """The meshes of concrete devices that a lowered program's shardings are on."""
    args = lowered._lowering.compile_args
    found: list[Mesh] = []
    for key in ("in_shardings", "out_shardings", "intermediate_shardings"):
        for sharding in args.get(key, ()):
            mesh = getattr(sharding, "mesh", None)
            if isinstance(mesh, Mesh) and mesh.size and mesh not in found:
                found.append(mesh)
    return found
