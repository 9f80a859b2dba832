"""Primitives as objects, by the name of the variable that holds them.

Most are public in `jax.extend.core.primitives`; the others are looked up where jax defines them.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax.extend.core.primitives as public
from jax.sharding import AxisType

_PRIVATE = {
    "add_jaxvals_p": "jax._src.ad_util",
    "all_gather_invariant_p": "jax._src.lax.parallel",
    "approx_top_k_p": "jax._src.lax.ann",
    "call_hi_primitive_p": "jax._src.hijax",
    "ragged_dot_general_p": "jax._src.lax.lax",
    "reduce_scatter_p": "jax._src.lax.parallel",
    "layout_constraint_p": "jax._src.pjit",
    "name_p": "jax._src.ad_checkpoint",
    "optimization_barrier_p": "jax._src.lax.lax",
    "psum_invariant_p": "jax._src.lax.parallel",
    "pvary_p": "jax._src.core",
    "reduced_vary_cast_p": "jax._src.core",
    "reshard_p": "jax._src.pjit",
    "scatter_sub_p": "jax._src.lax.slicing",
    "split_p": "jax._src.lax.lax",
    "stack_p": "jax._src.lax.lax",
    "tie_p": "jax._src.lax.lax",
    "tile_p": "jax._src.lax.lax",
    "unstack_p": "jax._src.lax.lax",
    "zeros_like_p": "jax._src.ad_util",
}


@functools.cache
def primitive(name: str) -> Any | None:
    """The primitive held by the variable ``name``, such as ``"add_p"``; None if jax has none."""
    found = getattr(public, name, None)
    if found is None and name in _PRIVATE:
        found = getattr(importlib.import_module(_PRIVATE[name]), name, None)
    return found


def host_array(value: object) -> Any | None:
    """``value`` as a numpy array if its elements are already in the host's memory.

    A ``jax.Array`` isn't: to read one would wait for a device, and a program's facts would come to
    depend on the device that it is traced for.
    """
    import numpy as np

    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return np.asarray(value)
    return None


def axes_not_manual(eqn: Any) -> dict[Any, int]:
    """Sizes, over one, of the mesh axes in scope that a partitioner may split arrays over."""
    mesh = getattr(getattr(eqn, "ctx", None), "cur_abstract_mesh", None)
    if mesh is None or mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {n: mesh.shape[n] for n, kind in kinds
            if kind != AxisType.Manual and mesh.shape[n] > 1}  # fmt: skip


def axis_sizes(eqn: Any) -> dict[Any, int]:
    """Sizes of the mesh axes that are in scope where ``eqn`` was traced, by name."""
    mesh = getattr(getattr(eqn, "ctx", None), "cur_abstract_mesh", None)
    return {} if mesh is None or mesh.empty else dict(mesh.shape)
