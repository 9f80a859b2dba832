"""Versions and settings that decide what jax lowers a program to."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

import jax
from jaxlib import version as jaxlib_version

# Settings that reach the lowered program, beside those with a field of their own.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_use_simplified_jaxpr_constants",
    "jax_dynamic_shapes",
    "jax_remat_opt_barrier",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_exec_time_optimization_effort",
    "jax_pallas_use_mosaic_gpu",
    "jax_mosaic_allow_hlo",
    "jax_vjp3",
    "jax_xla_metadata_on_all_ops",
)


def versions() -> dict[str, str]:
    """Jax and jaxlib."""
    return {"jax": jax.__version__, "jaxlib": jaxlib_version.__version__}


def libtpu_version() -> str:
    """The version of the installed libtpu, or ``none``."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def settings() -> dict[str, str]:
    """The settings that tracing and lowering read, as text."""
    values: Mapping[str, object] = jax.config.values
    flags = {name.removeprefix("jax_"): values[name] for name in _SETTINGS if name in values}
    return {
        "x64": str(values.get("jax_enable_x64")),
        "prng": str(values.get("jax_default_prng_impl")),
        "partitioner": "shardy" if values.get("jax_use_shardy_partitioner") else "gspmd",
        "flags": ", ".join(f"{name}={value}" for name, value in sorted(flags.items())),
    }
