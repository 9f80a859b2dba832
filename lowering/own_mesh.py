"""Functions that hold a mesh of this host's devices, where the target's was wanted."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FrameType, FunctionType
from typing import Any

from jax.sharding import Mesh

_ABOUT = re.compile(r"mesh|shard|axis|axes|device", re.IGNORECASE)
"""What an error says where a mesh may be its cause."""
_MOST = 2_000
"""Values that are looked at."""


def advice(error: BaseException, has_mesh: bool) -> str:
    """What to do about a mesh that the frames of an error hold; empty where they hold none.

    Args:
        error: what tracing or lowering a function raised.
        has_mesh: whether the case says a mesh.
    """
    found = next(_meshes(error), None) if _ABOUT.search(str(error)) else None
    if found is None:
        return ""
    shown = ", ".join(f"{name}={extent}" for name, extent in found.shape.items())
    held = f"; it holds a mesh of this host's devices ({shown}), where the target's was wanted: "
    if has_mesh:
        return held + "build the function on the mesh that build(mesh) gets"
    return held + (
        f"give a case whose build(mesh) makes the function on the mesh that it gets, as in "
        f"relower.case(build, mesh={dict(found.shape)})"
    )


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
        if isinstance(value, Mesh) and value.size > 1 and value.devices.flat[0].platform != "tpu":
            yield value
        pending.extend(_held(value))


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
