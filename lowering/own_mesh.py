"""Functions that hold a mesh of this host's devices, where the target's was wanted."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType, FunctionType
from typing import Any

from jax.sharding import Mesh

from ..compat.lowered import own_meshes
from .errors import InputError
from .load import describe
from .targets import TargetDevice
from .words import plural

_ABOUT = re.compile(r"mesh|shard|axis|axes|device", re.IGNORECASE)
"""What an error says where a mesh may be its cause."""
_MISFIT = re.compile(r"context mesh|not found in mesh")
"""What it says where a mesh of one device, which fits most programs, may be its cause."""
_TOO_FEW = re.compile(r"Number of devices (?P<found>\d+) must.*mesh_shape \((?P<shape>[\d, ]+)\)")
"""What jax says of a mesh made while it traces: it counts this host's devices, not the target's."""
_MOST = 2_000
"""Values that are looked at."""


def advice(error: BaseException, has_mesh: bool) -> str:
    """What to do about a mesh that the frames of an error hold; empty where they hold none.

    Args:
        error: what tracing or lowering a function raised.
        has_mesh: whether the case says a mesh.
    """
    said = f"{type(error).__name__}: {error}"
    few = _TOO_FEW.search(said)
    if few is not None:
        axes = {f"axis{i}": int(n) for i, n in enumerate(few["shape"].strip(", ").split(", "))}
        held = f"; jax makes a mesh of this host's devices ({few['found']}), "
        return f"{held}where the target's were wanted: {_remedy(axes, has_mesh)}"
    found = next(_meshes(error), None) if _ABOUT.search(said) else None
    if "TargetDevice" in said or (found is not None and _is_of_target(found)):
        held = "makes a mesh itself while it is traced, of devices that nothing can be placed on"
        return f"; it {held}: {_remedy({} if found is None else found.shape, has_mesh)}"
    if found is None or (found.size == 1 and not _MISFIT.search(said)):
        return ""
    held = f"holds a mesh of this host's devices ({_shown(found)}), where the target's was wanted"
    return f"; it {held}: {_remedy(found.shape, has_mesh)}"


def untraceable(name: str, error: BaseException, has_mesh: bool) -> InputError:
    """One line on why a function can't be traced, with `advice`."""
    return InputError(f"{name} can't be traced: {describe(error)}{advice(error, has_mesh)}")


def of_host(lowered: Any) -> Mesh | None:
    """The mesh of this host's devices that a lowered program is sharded over, if there is one."""
    return next((mesh for mesh in own_meshes(lowered) if not _is_of_target(mesh)), None)


def refusal(mesh: Mesh, wanted: Mapping[str, int] | None) -> str:
    """Why a program sharded over a host's mesh isn't the case's; empty where it may be.

    Args:
        mesh: from `of_host`.
        wanted: the case's mesh, if it has one.
    """
    if not wanted or math.prod(wanted.values()) == mesh.size:
        return ""
    return (
        f"it runs on a mesh of this host's devices ({_shown(mesh)}), where the case's was wanted "
        f"({_extents(wanted)}): {_remedy(mesh.shape, True)}"
    )


def remark(mesh: Mesh) -> str:
    """What to know of figures of a program that is sharded over a host's mesh."""
    held = f"the program's own mesh, of this host's devices ({_shown(mesh)}), decides that it is"
    count = plural(mesh.size, "device")
    return f"{held} one for {count}; for other meshes {_remedy(mesh.shape, False)}"


def _remedy(axes: Mapping[str, int], has_mesh: bool) -> str:
    if has_mesh:
        return "build the function on the mesh that build(mesh) gets"
    told = "give a case whose build(mesh) makes the function on the mesh that it gets"
    if not axes:
        return told
    alone = math.prod(axes.values()) == 1  # how many were meant isn't known
    extents = ", ".join(f"{name!r}: {'…' if alone else extent}" for name, extent in axes.items())
    return f"{told}, as in relower.case(build, mesh={{{extents}}})"


def _shown(mesh: Mesh) -> str:
    return _extents(mesh.shape)


def _extents(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in axes.items())


def _is_of_target(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "tpu")


def _meshes(error: BaseException) -> Iterator[Any]:
    """Meshes in the error's frames, and in what the functions there close over.

    jax cuts its own frames out of tracebacks, and with them a mesh that was given to a transform.
    """
    pending: deque[Any] = deque()
    place = error.__traceback__
    while place is not None:
        pending.extend(_values(place.tb_frame))
        place = place.tb_next
    seen: set[int] = set()
    while pending and len(seen) < _MOST:
        value = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mesh) and value.size and not _from_libtpu(value):
            yield value
        pending.extend(_held(value))


def _from_libtpu(mesh: Mesh) -> bool:
    """Whether it may be the mesh that ``build`` got on the topology route."""
    return _is_of_target(mesh) and not isinstance(mesh.devices.flat[0], TargetDevice)


def _values(frame: FrameType) -> Iterator[Any]:
    """What a frame's code can name: its own variables, and those of its module that it uses."""
    yield from frame.f_locals.values()
    for name in frame.f_code.co_names:
        if name in frame.f_globals:
            yield frame.f_globals[name]


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
