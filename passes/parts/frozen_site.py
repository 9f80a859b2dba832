"""What must hold of a frozen gradient, and what to say of it."""

from __future__ import annotations

import dataclasses

from ..base import FrozenLeaf, Match, Reason, Requirement, Site
from ..frozen_tree import amounts
from .frozen_judge import READERS_SHOWN, Gradient


def describe(match: Match, site: Site) -> FrozenLeaf:
    """What to report of a gradient beside its site."""
    gradient: Gradient = match.captures["gradient"]
    cost = gradient.cost
    return FrozenLeaf(
        path=gradient.path,
        type=site.shape,
        way="declared" if gradient.declared else "recognised",
        status=site.status,
        source=site.source,
        flops=cost.flops,
        collective_bytes=cost.collective_bytes,
        accumulator_bytes=cost.accumulator_bytes,
        operations=cost.operations,
        readers=gradient.readers,
        reasons=site.reasons,
    )


def _holds_a_gradient(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if not gradient.found:
        return None
    return Reason("no-gradient", f"no gradient of {gradient.path} comes out there", gradient.found,
                  "what a backward pass makes")  # fmt: skip


def _read_first(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if not gradient.readers:
        return None
    more = len(gradient.readers) - READERS_SHOWN
    found = ", ".join(gradient.readers[:READERS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    kept = amounts(dataclasses.asdict(gradient.cost))
    sentence = f"the gradient is read before it is dropped, which keeps {kept}"
    return Reason("read-first", sentence, found,
                  "no reader; norms can be taken over the trainable leaves only")  # fmt: skip


def _finite(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    if gradient.times_zero is None:
        return None
    return Reason("maybe-not-finite", "inf or NaN times zero is NaN, so the product is needed",
                  f"a multiplication by zero at {gradient.times_zero}",
                  "a select, or assume='finite_grads'")  # fmt: skip


def _separable(match: Match) -> Reason | None:
    gradient: Gradient = match.captures["gradient"]
    said = gradient.dropped or gradient.readers or gradient.found or gradient.times_zero
    if said:
        return None
    if match.scope.is_kept(match.index):
        return Reason("kept", "this stands in a function given to relower.keep",
                      match.scope.name_stack(match.eqn), "a place outside of it")  # fmt: skip
    size = sum(v.aval.size * v.aval.dtype.itemsize for _, v in gradient.values)
    kept = f", which keeps {size:,} bytes of results" if size else ""
    return Reason("inseparable", f"what makes the gradient makes something else too{kept}",
                  gradient.kernel or f"{match.eqn.primitive.name}, of which another result is read",
                  "an equation of the gradient's own")  # fmt: skip


REQUIREMENTS = (
    Requirement(
        "no-gradient",
        "An output declared frozen holds a gradient, and not a parameter or its update.",
        _holds_a_gradient,
    ),
    Requirement("read-first", "Nothing reads the gradient before it is masked.", _read_first),
    Requirement(
        "maybe-not-finite",
        "The gradient isn't masked by a multiplication by zero, or is assumed to be finite.",
        _finite,
    ),
    Requirement(
        "inseparable", "What makes the gradient makes nothing else that is read.", _separable
    ),
)
