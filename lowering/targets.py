"""Targets: a kind of chip and a topology, and the mesh that a program is lowered for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from .errors import InputError
from .words import plural

Route = Literal["abstract", "topology"]
AxisTypes = Literal["auto", "explicit"]
DEFAULT_TARGET = "TPU7x:2x2x1"
MAX_DEVICES = 1 << 16
"""Each device is an object here; no machine has so many."""
_LONGEST = 60
"""Characters of a target that a message shows."""

# TensorCores of one chip that jax shows as devices of their own.
_DEVICES_PER_CHIP: Mapping[str, int] = {"TPU7x": 2}
_DIMENSIONS = 3
_SPEC = re.compile(r"(?P<kind>[^:]+):(?P<shape>\d+(x\d+)*)")
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@dataclass(frozen=True)
class TargetDevice:
    """What a device of the target says about itself; nothing can be placed on it."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    num_cores: int = 1

    @property
    def local_hardware_id(self) -> int:
        """The same as ``id``: the target is one host."""
        return self.id


@dataclass(frozen=True)
class Target:
    """``TPU7x:2x2x1``: chips of one kind in a grid."""

    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def device_count(self) -> int:
        """How many devices jax would show."""
        return math.prod(self.shape) * _DEVICES_PER_CHIP[self.kind]

    def devices(self) -> list[TargetDevice]:
        """All devices in jax's order: x fastest, the cores of a chip together."""
        cores = _DEVICES_PER_CHIP[self.kind]
        found = []
        for chip, index in enumerate(np.ndindex(*reversed(self.shape))):
            coords = tuple(int(i) for i in reversed(index))
            for core in range(cores):
                found.append(TargetDevice(chip * cores + core, coords, core, self.kind))
        return found


def parse_target(spec: str) -> Target:
    """``KIND:AxBxC`` to a `Target`.

    Raises:
        InputError: the text has another form, the kind isn't known, an extent is zero, there are
            more or fewer than three, or too many devices.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InputError(f"target {spec!r}: wanted KIND:AxBxC, as in {DEFAULT_TARGET!r}")
    kind = match["kind"]
    if kind not in _DEVICES_PER_CHIP:
        raise InputError(f"target {spec!r}: no such kind {kind!r}; known: TPU7x")
    extents = match["shape"].split("x")
    # Python takes no number of thousands of digits.
    huge = any(len(extent.lstrip("0")) > len(str(MAX_DEVICES)) for extent in extents)
    found = Target(kind, () if huge else tuple(map(int, extents)))
    if 0 in found.shape:
        raise InputError(f"target {spec!r}: every extent must be at least 1")
    if huge or found.device_count > MAX_DEVICES:
        shown = spec if len(spec) < _LONGEST else f"{spec[:_LONGEST]}…"
        raise InputError(f"target {shown!r}: wanted at most {MAX_DEVICES:,} devices")
    if len(extents) != _DIMENSIONS:
        filled = "x".join([*extents, *["1"] * (_DIMENSIONS - len(extents))])
        raise InputError(
            f"target {spec!r}: found {plural(len(extents), 'extent')}, wanted {_DIMENSIONS}, as "
            f"{kind} is a grid of three dimensions"
            + (f": {kind}:{filled}" if len(extents) < _DIMENSIONS else "")
        )
    return found


def make_mesh(
    target: Target, axes: Mapping[str, int] | None, axis_types: AxisTypes, route: Route
) -> Any:
    """The mesh that a program is traced and lowered under.

    Args:
        target: where the devices come from.
        axes: extent by axis name; None or empty is one device, on an axis called ``device``.
        axis_types: for all axes alike; jax's default differs between versions, so it is stated.
        route: ``abstract`` needs no TPU software; ``topology`` asks libtpu for the devices.

    Raises:
        InputError: more devices wanted than the target has, an unknown option, or no libtpu.
    """
    if axis_types not in _AXIS_TYPES:
        raise InputError(f"axis types {axis_types!r}: wanted 'auto' or 'explicit'")
    if route not in ("abstract", "topology"):
        raise InputError(f"route {route!r}: wanted 'abstract' or 'topology'")
    axes = dict(axes) if axes else {"device": 1}
    for name, extent in axes.items():
        if not isinstance(extent, int) or extent < 1:
            raise InputError(f"mesh axis {name!r}: extent {extent!r}, wanted a positive number")
    wanted = math.prod(axes.values())
    if wanted > target.device_count:
        shown = ", ".join(f"{name}={extent}" for name, extent in axes.items())
        raise InputError(
            f"mesh {shown} needs {wanted} devices, target {target} has {target.device_count}: "
            "choose a larger target"
        )
    types = (_AXIS_TYPES[axis_types],) * len(axes)
    shape, names = tuple(axes.values()), tuple(axes)
    if route == "abstract":
        device = AbstractDevice(target.kind, 1, "tpu")
        return AbstractMesh(shape, names, axis_types=types, abstract_device=device)
    devices = np.array(topology_devices(target)[:wanted], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=types)


def topology_devices(target: Target) -> list[Any]:
    """The devices that libtpu describes for a target; programs can be compiled for them.

    Raises:
        InputError: libtpu isn't installed, or knows no such topology.
    """
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(str(target), "tpu").devices)
    except Exception as error:  # whatever libtpu or its absence raises
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if find_spec("libtpu") is not None:
            raise InputError(f"libtpu gives no devices for target {target}: {cause}") from error
        raise InputError(
            f"route 'topology' needs libtpu (install relower[tpu]) for {target}: {cause}"
        ) from error


def mesh_context(mesh: Any) -> AbstractContextManager[Any]:
    """The context that makes ``mesh`` the one that tracing sees."""
    if isinstance(mesh, AbstractMesh):
        context: AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(mesh)
    else:
        context = jax.set_mesh(mesh)
    return context
