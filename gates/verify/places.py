"""Integers that nothing is known of, as places in the arrays of a site: an index is one of these.

Anything of an integer's type is nearly always out of bounds. Within them places are spread, each
about as often as another; tied; all the first; all the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...compat import jaxprs
from ...compat.jaxprs import Eqn
from ...matchers.fact import limits
from .inputs import Input, Theme
from .problem import Problem, walk
from .themes import EXACT, ROUNDED, at_end, few_values, spread

MOST_SIZES = 4
"""Sizes of dimensions that are tried."""
_INDEXED = {"gather", "dynamic_slice", "dynamic_update_slice"}


def is_free(one: Input) -> bool:
    """Whether an input is of integers that have no range on both sides, and nothing else."""
    fact, limit = one.fact, limits(one.dtype)
    told = (fact.constant, fact.affine, fact.permutation, one.groups_of)
    open_ended = fact.lo is None or fact.hi is None
    return limit is not None and limit != (0, 1) and open_ended and all(t is None for t in told)


def sizes(problem: Problem) -> list[int]:
    """Sizes of dimensions that such an input may be a place in; none where there is no such input.

    Those of what is indexed, on either side; where nothing is, of any array.
    """
    if not any(map(is_free, problem.inputs)):
        return []
    eqns = [*walk(problem.before.eqns), *walk(problem.after.eqns)]
    indexed = [e for e in eqns if e.primitive.name in _INDEXED or _scatters(e)]
    found = _dimensions([e.invars[:1] for e in indexed])
    found = found or _dimensions([(*e.invars, *e.outvars) for e in eqns])
    if len(found) <= MOST_SIZES:
        return found
    return [found[i * (len(found) - 1) // (MOST_SIZES - 1)] for i in range(MOST_SIZES)]


def _scatters(eqn: Eqn) -> bool:
    return bool(eqn.primitive.name.startswith("scatter"))


def _dimensions(atoms: Sequence[Sequence[jaxprs.Atom]]) -> list[int]:
    return sorted({n for some in atoms for a in some for n in getattr(a.aval, "shape", ())
                   if isinstance(n, int) and n > 1})  # fmt: skip


def of_values(problem: Problem) -> tuple[Theme, ...]:
    """Themes for contracts on bits, and for integers of a rounding contract."""
    return _places(EXACT[0], sizes(problem))


def of_errors(problem: Problem) -> tuple[Theme, ...]:
    """Themes for errors, and for derivatives."""
    return _places(ROUNDED[0], sizes(problem))


def base(problem: Problem) -> Theme:
    """Normal numbers, and places where there are any."""
    return next(iter(of_errors(problem)), ROUNDED[0])


def _places(like: Theme, found: Sequence[int]) -> tuple[Theme, ...]:
    kinds = {
        "spread": spread, "tied": few_values, "all the last": at_end("hi"),
        "all the first": at_end("lo"),
    }  # fmt: skip
    return tuple(
        replace(like, name=f"{like.name}, places below {n}, {kind}", integers=fill, below=n)
        for n in found
        for kind, fill in kinds.items()
        if kind != "all the first" or n == found[0]
    )
