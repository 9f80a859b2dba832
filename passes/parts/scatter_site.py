"""What scatter-adds of rows have in common: the requirements that several passes share."""

from __future__ import annotations

from ...matchers.pattern import describe_atom
from ..base import Match, Reason


def into_zeros(match: Match) -> Reason | None:
    """A reason where the updates are not known to be added to zeros."""
    operand = match.eqn.invars[0]
    if match.scope.fact(operand).is_zero():
        return None
    return Reason("not-zeros", "the updates are added to something",
                  describe_atom(match.scope, operand), "zeros")  # fmt: skip


def no_whole_slices(match: Match) -> Reason:
    """Of a scatter whose updates are not whole slices along one axis."""
    return Reason("layout", "the updates are not whole slices along one axis",
                  str(match.eqn.params["dimension_numbers"]),
                  "one inserted dimension, the others whole windows, none batched")  # fmt: skip
