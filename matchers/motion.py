"""Which equations may be brought forward in their body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..compat import jaxprs
from ..compat.jaxprs import Eqn, Var
from ..compat.primitives import primitive


def is_pure(eqn: Eqn) -> bool:
    """Whether an equation has no effect; to name a mesh axis is none."""
    return not jaxprs.true_effects(eqn)


def is_barrier(eqn: Eqn) -> bool:
    """Whether an equation states in which order things are to run."""
    return any(eqn.primitive is primitive(p) for p in ("optimization_barrier_p", "tie_p"))


def made_after(
    eqns: Sequence[Eqn], made: dict[Var, int], wanted: Iterable[Var], index: int
) -> list[int]:
    """The equations after ``index`` that the variables ``wanted`` are computed by, in any order.

    Args:
      eqns: the equations of a body.
      made: the equation that binds each variable.
      wanted: variables of the body.
      index: equations up to this one, inclusive, aren't looked at.
    """
    found: set[int] = set()
    stack = list(wanted)
    while stack:
        at = made.get(stack.pop(), -1)
        if at > index and at not in found:
            found.add(at)
            stack.extend(a for a in eqns[at].invars if jaxprs.is_var(a))
    return list(found)
