"""Recognise rows that are weighted and added up in another order of axes than their product has.

Every expert works on every token, ``y`` is ``[experts, tokens, d]``, and an einsum, or a product by
element and a sum, combines ``y`` with ``w``, ``[tokens, experts]``. In the backward, cotangents are
those of the tokens, each repeated for every expert; the weights' gradient has ``w``'s axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Var
from ..compat.primitives import primitive
from .graph import OUTPUT, Scope
from .placed_rows import read_besides, row_numbers

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """Cotangents and weights whose products are the rows ``[…, d]``, and how they lie there."""

    cotangents: Var
    weights: Atom
    cotangent_dims: Dims
    """For each axis of the cotangents, which of the rows' it is; of the last, ``d``, their last
    where the product has it there."""
    weight_dims: Dims
    """For each axis of the weights, which of the rows' it is; one of 1 at their end aside."""


@dataclass(frozen=True)
class Summed:
    """The gradient of the weights: sums over ``d`` of the cotangents times what the rows were."""

    index: int
    """Of the equation that gives the sums."""
    rows: Atom
    """The rows as they lie in their product, or the value at which the search ended."""
    result_dims: Dims
    """For each axis of the gradient, which of the rows' it is."""
    read: str | None
    """What reads the rows on the way besides; None if nothing does."""


def spread_behind(scope: Scope, atom: Atom) -> Iterator[Spread]:
    """What may be the cotangents and weights whose products a product's rows are.

    Of an outer product of two matrices, either may be the cotangents.
    """
    at, dims, _ = _turned(scope, atom)
    made = _made(scope, at)
    eqn = None if made is None else scope.eqns[made]
    last = atom.aval.ndim - 1
    if eqn is None or last < 1:
        return
    if eqn.primitive is primitive("dot_general_p"):
        (left, right), batches = eqn.params["dimension_numbers"]
        if left or right:
            return
        of = _result_dims([a.aval.ndim for a in eqn.invars], batches)
        for (g, weights), (of_g, of_w) in ((eqn.invars, of), (eqn.invars[::-1], of[::-1])):
            found = tuple(dims[i] for i in of_g), tuple(dims[i] for i in of_w)
            if not found[0] or not jaxprs.is_var(g) or len(found[1]) != last:
                continue
            if found[0][-1] not in found[1]:
                yield Spread(g, weights, *found)
    elif eqn.primitive is primitive("mul_p") and dims != tuple(range(last + 1)):
        # `weighted_rows` looks for those that lie as in their product.
        for g, other in (eqn.invars, eqn.invars[::-1]):
            numbers = row_numbers(scope, other, tuple(eqn.outvars[0].aval.shape))
            if numbers is not None and jaxprs.is_var(g) and g.aval.ndim == last + 1:
                yield Spread(g, numbers, dims, dims[:-1])


def summed_with(scope: Scope, spread: Spread) -> Iterator[Summed]:
    """Sums over ``d`` of the cotangents times arrays that have the rows' axes, in some order."""
    g = spread.cotangents
    for reader in scope.readers(g):
        if reader == OUTPUT:
            continue
        eqn = scope.eqns[reader]
        if eqn.primitive is primitive("dot_general_p"):
            yield from _summed_by_product(scope, reader, spread)
        elif eqn.primitive is primitive("mul_p") and g.aval.ndim == len(spread.weight_dims) + 1:
            rows = eqn.invars[1] if eqn.invars[0] is g else eqn.invars[0]
            for after in scope.readers(eqn.outvars[0]):
                if after != OUTPUT and _sums_last(scope, after) and rows.aval.shape == g.aval.shape:
                    yield from _summed_by_element(scope, after, rows, spread)


def _summed_by_product(scope: Scope, index: int, spread: Spread) -> Iterator[Summed]:
    eqn, g = scope.eqns[index], spread.cotangents
    contracted, batch = eqn.params["dimension_numbers"]
    for mine in (0, 1):
        rows = eqn.invars[1 - mine]
        if eqn.invars[mine] is not g or not jaxprs.is_var(rows):
            continue
        tokens = tuple(batch[mine])
        if tuple(contracted[mine]) != (g.aval.ndim - 1,) or len(tokens) != g.aval.ndim - 1:
            continue
        if rows.aval.ndim != len(spread.weight_dims) + 1:
            continue
        # What each axis of the rows read is, of those in their product: known of the batch.
        known = {r: spread.cotangent_dims[t] for t, r in zip(tokens, batch[1 - mine], strict=True)}
        known[contracted[1 - mine][0]] = spread.cotangent_dims[-1]
        at, place, path = _placed(scope, rows)
        if any(place[axis] != wanted for axis, wanted in known.items()):
            continue
        free = [axis for axis in range(rows.aval.ndim) if axis not in known]
        result = (*(known[r] for r in batch[1 - mine]), *(place[axis] for axis in free))
        yield Summed(index, at, result, read_besides(scope, path))


def _summed_by_element(scope: Scope, index: int, rows: Atom, spread: Spread) -> Iterator[Summed]:
    at, place, path = _placed(scope, rows)
    if place == spread.cotangent_dims:
        yield Summed(index, at, place[:-1], read_besides(scope, path))


def _placed(scope: Scope, rows: Atom) -> tuple[Atom, Dims, list[Atom]]:
    """The rows as they lie in their product; for each axis of those read which of these it is."""
    at, dims, path = _turned(scope, rows)
    return at, tuple(dims.index(axis) for axis in range(len(dims))), path


def _turned(scope: Scope, atom: Atom) -> tuple[Atom, Dims, list[Atom]]:
    """What a value is but for casts and transposes; the axis of the value that each of it becomes.

    And all that is passed on the way.
    """
    dims = tuple(range(atom.aval.ndim))
    path = [atom]
    while (made := _made(scope, atom)) is not None:
        eqn = scope.eqns[made]
        if eqn.primitive is primitive("transpose_p"):
            # Axis i of the value is axis order[i] of what is turned.
            order = eqn.params["permutation"]
            dims = tuple(dims[order.index(axis)] for axis in range(len(order)))
        elif eqn.primitive is not primitive("convert_element_type_p"):
            break
        atom = eqn.invars[0]
        path.append(atom)
    return atom, dims, path


def _result_dims(ranks: list[int], batches: tuple[Dims, Dims]) -> list[Dims]:
    """For each axis of two operands that nothing is contracted of, which one of the result."""
    found: list[Dims] = []
    after = len(batches[0])
    for rank, batch in zip(ranks, batches, strict=True):
        batch = tuple(batch)
        free = [axis for axis in range(rank) if axis not in batch]
        found.append(tuple(
            batch.index(axis) if axis in batch else after + free.index(axis)
            for axis in range(rank)
        ))  # fmt: skip
        after += len(free)
    return found


def _sums_last(scope: Scope, index: int) -> bool:
    eqn = scope.eqns[index]
    last = (eqn.invars[0].aval.ndim - 1,)
    return eqn.primitive is primitive("reduce_sum_p") and tuple(eqn.params["axes"]) == last


def _made(scope: Scope, atom: Atom) -> int | None:
    found = None if jaxprs.is_literal(atom) else scope.definition(atom)
    return None if found is None else found[0]
