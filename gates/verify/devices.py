"""Run a site in which devices talk: on several devices of this host, by `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...compat.jaxprs import Eqn
from ...lowering.fragment import by_hand_on
from ...passes.engine.fragments import Cut, Region
from .evaluate import Unrunnable

Array = Any


def devices_of(region: Region) -> tuple[Mesh, int]:
    """A mesh of this host's devices like the site's, and how many it has.

    Raises:
        Unrunnable: the host shows fewer devices.
    """
    mesh = region.mesh
    if mesh is None:
        raise Unrunnable("it names axes of a mesh, and stands in none")
    return like(mesh), int(mesh.size)


def like(mesh: Any) -> Mesh:
    """A mesh of this host's devices like another.

    Raises:
        Unrunnable: the host shows fewer devices.
    """
    count = int(mesh.size)
    if count > jax.device_count():
        raise Unrunnable(
            f"its mesh has {count} devices, this host shows {jax.device_count()} "
            f"(XLA_FLAGS=--xla_force_host_platform_device_count={count})"
        )
    grid = np.array(jax.devices()[:count]).reshape(tuple(mesh.shape.values()))
    types = (AxisType.Auto,) * grid.ndim
    return Mesh(grid, tuple(mesh.shape), axis_types=types)


def mapped(eqn: Eqn, operands: Sequence[Any], run: Callable[..., Sequence[Any]]) -> list[Any]:
    """A `jax.shard_map` of a program on devices of this host, by operations and not compiled whole.

    Args:
        eqn: the equation.
        operands: whole arrays.
        run: evaluates its body on one device's parts.

    Raises:
        Unrunnable: the host shows fewer devices, or an axis is not the program's to split by hand.
    """
    params = eqn.params
    mesh = like(params["mesh"])
    manual = set(params["newly_manual_axes"])
    if manual != set(mesh.axis_names):
        others = ", ".join(sorted(set(mesh.axis_names) - manual))
        raise Unrunnable(f"a shard_map that leaves the mesh axis {others} to the compiler")
    fn = jax.shard_map(
        lambda *parts: tuple(run(*parts)),
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
    )
    return [jax.device_put(v, jax.devices()[0]) for v in fn(*operands)]


def copies(region: Region, part: Cut) -> list[int]:
    """For each input, how many devices hold one of its own."""
    extents = dict(region.mesh.shape)
    ports = region.fragment(part).inputs
    return [int(np.prod([extents[a] for a in p.varying], dtype=int)) for p in ports]


def joined(
    region: Region, part: Cut, run: Callable[..., Sequence[Any]] | None = None
) -> Callable[..., Any]:
    """A part as a function of whole arrays, the devices' parts side by side; see `across`.

    Args:
        region: the site.
        part: the side of it to run.
        run: how to evaluate the part on one device, where not as it is.
    """
    mesh, _ = devices_of(region)
    fragment = region.fragment(part)
    if run is not None:
        fragment = replace(fragment, fn=run)
    return cast(Callable[..., Any], jax.jit(by_hand_on(fragment, mesh)[0]))


def across(region: Region) -> AbstractContextManager[Any]:
    """The context of the site's mesh, on devices of this host."""
    return cast(AbstractContextManager[Any], jax.set_mesh(devices_of(region)[0]))
