"""Whether a body is run inside a Pallas kernel."""

from __future__ import annotations

from ..compat.bodies import Role
from .graph import Scope


def in_kernel(scope: Scope) -> bool | None:
    """True: only inside kernels. False: never. None: both, as a function shared by the two."""
    if "in kernel" not in scope.memo:
        found: set[bool | None] = set()
        for caller in scope.callers:
            inside = caller.entered.role is Role.KERNEL
            found.add(True if inside else in_kernel(caller.scope))
        scope.memo["in kernel"] = None if len(found) > 1 else found.pop() if found else False
    known: bool | None = scope.memo["in kernel"]
    return known
