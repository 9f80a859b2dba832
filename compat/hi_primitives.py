"""jax's own primitives that carry no jaxpr, only a Python method that makes one when lowered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def numpy_primitive(eqn: Any) -> tuple[str, Mapping[str, Any]] | None:
    """The name and params of the `jax.numpy` search that an equation is; None if it is none.

    Newer versions of jax have them as ``"searchsorted"`` and ``"nonzero"``. Their modules are
    loaded wherever an equation of theirs exists, so none is imported here.
    """
    carried = eqn.params.get("_prim")
    module = sys.modules.get("jax._src.numpy.hijax")
    if carried is None or module is None:
        return None
    for name, attribute in (("searchsorted", "SearchSorted"), ("nonzero", "Nonzero")):
        if type(carried) is getattr(module, attribute, None):
            return name, carried.params
    return None
