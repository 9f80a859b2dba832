"""Layouts of arguments and results where no device can say which one it would choose itself.

jax leaves a layout that is the device's default out of the program. Without a device the default
isn't known, so every layout that the user states stays in: two programs may then differ in what a
device would have made equal, and never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.interpreters import pxla as _pxla
from jax.sharding import AbstractMesh, NamedSharding


@contextmanager
def stated_layouts() -> Iterator[None]:
    """While it lasts, layouts over an abstract mesh are taken as they are stated."""
    original = _pxla.is_default_layout

    def is_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, AbstractMesh) and layout is not None:
            return False
        return bool(original(layout, sharding, aval))

    _pxla.is_default_layout = is_default_layout
    try:
        yield
    finally:
        _pxla.is_default_layout = original
