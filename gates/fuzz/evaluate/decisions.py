"""What floats decide: comparisons, choices, orders, and what becomes an integer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import is_float

Decision = tuple[str, bytes]
"""The primitive that decides, and what came of it."""

_STEPS = {"sign", "round", "floor", "ceil"}
"""Of which a result is a float, and jumps."""


def decided(eqn: Eqn, ins: Sequence[Any], outs: Sequence[Any]) -> list[Decision]:
    """What one equation decided by floats; nothing where it only computes.

    The bits of a float are no decision: each rounding moves them.
    """
    name = eqn.primitive.name
    if name == "bitcast_convert_type" or not any(is_float(np.asarray(x).dtype) for x in ins):
        return []
    if name == "sort":
        order = np.argsort(np.asarray(ins[0]), axis=eqn.params["dimension"], kind="stable")
        return [(name, order.tobytes())]
    found = []
    for out in map(np.asarray, outs):
        if not is_float(out.dtype):
            found.append((name, np.ascontiguousarray(out).tobytes()))
        elif name in _STEPS:  # its result is a whole number, but for noise
            found.append((name, np.rint(out.astype(np.float64)).tobytes()))
    return found
