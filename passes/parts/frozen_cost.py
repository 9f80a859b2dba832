"""What a weight's gradient costs: the operations that make it, and what carries it to its reader.

Counted from shapes: a scan's body once for each iteration and any other loop's once, every branch
of a cond; under `jax.shard_map`, what one device does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ...compat import bodies, jaxprs
from ...compat.jaxprs import Body, Eqn
from ...compat.kernel_parts import is_kernel
from ...compat.primitives import primitive
from ...matchers.graph import Scope
from ...matchers.value_walk import Place

_COLLECTIVES = "psum_p psum_invariant_p reduce_scatter_p all_gather_p all_gather_invariant_p"


@dataclass(frozen=True)
class Spent:
    """What some operations cost."""

    flops: int = 0
    """Of the operations that make the gradient."""
    collective_bytes: int = 0
    """Operands of collectives, on one device."""
    accumulator_bytes: int = 0
    """Values that loops carry."""
    operations: tuple[tuple[str, int], ...] = ()
    """Equations by primitive, loops counted once."""


def spent(
    makers: Iterable[Place],
    passed: Iterable[Place],
    carries: Iterable[tuple[Scope, int, int]],
    left: Callable[[Place], Eqn | None] = lambda place: None,
) -> Spent:
    """The cost of what makes a gradient, of what moves it on, and of the loops that carry it.

    Args:
      makers: what makes it.
      passed: what moves it on.
      carries: loops that carry it, as scope, equation and result.
      left: of a kernel that makes something else too, what is left of it without the gradient.
    """
    counted: Counter[str] = Counter()
    flops = moved = 0
    for scope, index in makers:
        eqn, rest = scope.eqns[index], left((scope, index))
        counted[eqn.primitive.name] += 1
        flops += (operations(eqn) - (0 if rest is None else operations(rest))) * trips(scope)
    collectives = {primitive(name) for name in _COLLECTIVES.split()}
    for scope, index in passed:
        eqn = scope.eqns[index]
        counted[eqn.primitive.name] += 1
        if eqn.primitive in collectives:
            moved += size(eqn.invars[0].aval) * trips(scope)
    kept = {(id(s), i, r): s.eqns[i].outvars[r].aval for s, i, r in carries}
    return Spent(flops, moved, sum(map(size, kept.values())), tuple(sorted(counted.items())))


def operations(eqn: Eqn) -> int:
    """Multiplications and additions of one equation; of a kernel, those of its matrix products."""
    if is_kernel(eqn):
        grid = [n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)]
        return prod(grid) * _products(eqn.params["jaxpr"])
    out = eqn.outvars[0].aval
    if eqn.primitive is primitive("dot_general_p"):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * int(out.size) * prod(int(lhs[d]) for d in contracted)
    if eqn.primitive is primitive("ragged_dot_general_p"):
        return 2 * int(eqn.invars[0].aval.size) * int(out.shape[-1])
    if eqn.primitive is primitive("conv_general_dilated_p"):
        rhs = eqn.invars[1].aval
        features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * int(out.size) * int(rhs.size) // int(features)
    return int(eqn.invars[-1].aval.size)


def _products(body: Body) -> int:
    """Of the matrix products in a body, and in those that it carries."""
    total = 0
    for eqn in jaxprs.opened(body).eqns:
        inner = sum(_products(e.body) for e in bodies.carried(eqn).entered)
        dot = eqn.primitive is primitive("dot_general_p")
        total += operations(eqn) if dot else inner * _length(eqn)
    return total


def size(aval: Any) -> int:
    """Bytes of a value."""
    return int(aval.size) * int(aval.dtype.itemsize)


def trips(scope: Scope) -> int:
    """How often a body runs, through all its calls; each branch of a cond as if it were taken."""
    known: int | None = scope.memo.get("trips")
    if known is None:
        calls = (trips(c.scope) * _length(c.scope.eqns[c.index]) for c in scope.callers)
        known = scope.memo["trips"] = sum(calls) if scope.callers else 1
    return known


def _length(eqn: Eqn) -> int:
    length = eqn.params.get("length", 1)
    return length if isinstance(length, int) else 1
