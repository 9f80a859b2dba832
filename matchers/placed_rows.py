"""Recognise rows of a product that are taken to their tokens' choices before they are weighted.

A routed layer gathers the rows of its experts by the inverse of the order that sorted them, masks
those that were dropped, and lays them out as ``[tokens, choices, d]``. In the backward the weighted
cotangents go the other way, by a scatter-add to the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import lax

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .graph import OUTPUT, Scope, Value
from .scattered import Slices, whole_slices
from .wrapped_index import plain_value


@dataclass(frozen=True)
class Placed:
    """Which row of the product each choice has."""

    shape: tuple[int, ...]
    """Of the choices, ``[tokens…, choices]``."""
    gather: Eqn | None = None
    """What takes the rows to the choices; None where they are there."""
    scatter: Eqn | None = None
    """What takes the choices' cotangents to the rows."""
    mask: Atom | None = None
    """``[rows]`` or ``[rows, 1]``: where it doesn't hold, the choice has no row."""


@dataclass(frozen=True)
class Outer:
    """``d``, cotangents of tokens times the weights of their choices, at their rows."""

    cotangents: Atom
    """``[tokens…, d]``"""
    weights: Atom
    """``[tokens…, choices]`` or ``[tokens…, choices, 1]``"""
    placed: Placed
    spread: Var | None = None
    """The cotangents repeated for each choice, ``[tokens…, choices, d]``; None if they aren't."""


@dataclass(frozen=True)
class Taken:
    """Rows of a product at their choices."""

    rows: Atom
    placed: Placed
    read: str | None
    """What reads them on the way besides; None if nothing does."""


def outer_behind(scope: Scope, atom: Atom) -> Outer | None:
    """The cotangents and weights whose products a product's rows are."""
    at, scatter = _narrow(scope, atom), None
    eqn = _made(scope, at)
    if eqn is not None and eqn.primitive is primitive("scatter_add_p"):
        dims = eqn.params["dimension_numbers"]
        if whole_slices(eqn) != Slices(0, 0) or tuple(dims.update_window_dims) != (1,):
            return None
        if not scope.fact(eqn.invars[0]).is_zero():
            return None
        scatter, at = eqn, _narrow(scope, eqn.invars[2])
    at, mask = _unmasked(scope, at)
    at = _narrow(scope, at)
    eqn = _made(scope, at)
    if eqn is None or eqn.primitive is not primitive("reshape_p") or not _keeps_last(eqn):
        return None
    at = _narrow(scope, eqn.invars[0])
    eqn = _made(scope, at)
    if eqn is not None and eqn.primitive is primitive("mul_p"):
        return _outer_by_element(scope, eqn, scatter, mask)
    turned = eqn is not None and eqn.primitive is primitive("transpose_p")
    if turned and eqn is not None:
        last = at.aval.ndim - 1
        if tuple(eqn.params["permutation"]) != (*range(last - 1), last, last - 1):
            return None
        at = _narrow(scope, eqn.invars[0])
        eqn = _made(scope, at)
    pair = None if eqn is None else _pair(eqn, turned)
    if pair is None:
        return None
    cotangents, weights = pair
    return Outer(cotangents, weights, Placed(tuple(weights.aval.shape), None, scatter, mask))


def _outer_by_element(
    scope: Scope, times: Eqn, scatter: Eqn | None, mask: Atom | None
) -> Outer | None:
    """The same, of a product by element with cotangents that are repeated for each choice."""
    shape = tuple(times.outvars[0].aval.shape)
    for spread, other in (times.invars, times.invars[::-1]):
        weights = row_numbers(scope, other, shape)
        eqn = _made(scope, _narrow(scope, spread))
        if weights is None or eqn is None or tuple(spread.aval.shape) != shape:
            continue
        if eqn.primitive is not primitive("broadcast_in_dim_p") or len(eqn.invars) > 1:
            continue
        g, dims = eqn.invars[0], tuple(eqn.params["broadcast_dimensions"])
        tokens = len(shape) - 2
        if dims == (*range(tokens), tokens + 1) and g.aval.shape == (*shape[:tokens], shape[-1]):
            return Outer(g, weights, Placed(shape[:-1], None, scatter, mask), spread)
    return None


def _pair(eqn: Eqn, turned: bool) -> tuple[Atom, Atom] | None:
    """Cotangents and weights of an outer product for each token; ``turned``: cotangents first."""
    if eqn.primitive is not primitive("dot_general_p"):
        return None
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    batch = tuple(range(eqn.outvars[0].aval.ndim - 2))
    if left or right or tuple(left_batch) != batch or tuple(right_batch) != batch:
        return None
    one, other = eqn.invars
    return (one, other) if turned else (other, one)


def taken_behind(scope: Scope, atom: Atom) -> Taken | None:
    """The rows of a product that ``[tokens…, choices, d]`` are."""
    path = [atom]
    at = _widened(scope, atom, path)
    eqn = _made(scope, at)
    if eqn is None or eqn.primitive is not primitive("reshape_p") or not _keeps_last(eqn):
        return None
    at = _widened(scope, eqn.invars[0], path)
    at, mask = _unmasked(scope, at)
    at = _widened(scope, at, path)
    gather, eqn = None, _made(scope, at)
    if eqn is not None and eqn.primitive is primitive("gather_p") and _takes_rows(eqn):
        gather, at = eqn, _widened(scope, eqn.invars[0], path)
    placed = Placed(tuple(atom.aval.shape[:-1]), gather, None, mask)
    return Taken(at, placed, read_besides(scope, path))


def read_besides(scope: Scope, path: list[Atom]) -> str | None:
    """What reads one of the values of a path besides the next; None if nothing does."""
    for at in path:
        readers = set(scope.readers(at)) if jaxprs.is_var(at) else set()
        if len(readers) > 1 or OUTPUT in readers:
            return "an output" if OUTPUT in readers else scope.eqns[max(readers)].primitive.name
    return None


def same_places(scope: Scope, there: Placed, back: Placed) -> bool:
    """Whether cotangents go back to the rows that the choices were taken from."""
    if there.shape != back.shape or (there.gather is None) != (back.scatter is None):
        return False
    if (there.mask is None) != (back.mask is None):
        return False
    if there.mask is not None and scope.resolve(there.mask) != scope.resolve(back.mask):
        return False
    if there.gather is None or back.scatter is None:
        return True
    one, other = there.gather.invars[1], back.scatter.invars[1]
    return scope.resolve(one) == scope.resolve(other)


def distinct(scope: Scope, there: Placed) -> bool:
    """Whether no two choices are known to have one row."""
    if there.gather is None:
        return True
    indices, rows = there.gather.invars[1], there.gather.invars[0].aval.shape[0]
    value = plain_value(scope, indices)
    if jaxprs.is_literal(value.atom) or value.scope.fact(value.atom).permutation != 0:
        return False
    clipped = there.gather.params["mode"] is lax.GatherScatterMode.CLIP
    return bool(not clipped or rows >= indices.aval.shape[0])


def row_numbers(scope: Scope, atom: Atom, shape: tuple[int, ...]) -> Atom | None:
    """The numbers, one for each row, that an array repeats along its last axis."""
    if jaxprs.is_literal(atom) or atom.aval.ndim != len(shape):
        return None
    rows = tuple(shape[:-1])
    if tuple(atom.aval.shape) == (*rows, 1):
        return atom
    eqn = _made(scope, atom)
    if eqn is None or eqn.primitive is not primitive("broadcast_in_dim_p") or len(eqn.invars) > 1:
        return None
    operand, dims = eqn.invars[0], tuple(eqn.params["broadcast_dimensions"])
    leading = tuple(range(len(rows)))
    wanted = {leading: rows, (*leading, len(rows)): (*rows, 1)}
    return operand if tuple(operand.aval.shape) == wanted.get(dims) and rows else None


def _takes_rows(eqn: Eqn) -> bool:
    dims, rows = eqn.params["dimension_numbers"], eqn.invars[0].aval
    plain = not dims.operand_batching_dims and not dims.start_indices_batching_dims
    return bool(
        plain and rows.ndim == 2 and eqn.invars[1].aval.ndim == 2
        and tuple(dims.offset_dims) == (1,) and tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.start_index_map) == (0,)
        and tuple(eqn.params["slice_sizes"]) == (1, rows.shape[1])
    )  # fmt: skip


def _keeps_last(eqn: Eqn) -> bool:
    """Whether a reshape lays out rows otherwise, as they follow each other."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    last = bool(before and after and before[-1] == after[-1] and eqn.params["dimensions"] is None)
    return last and min(len(before), len(after)) == 2


def _narrow(scope: Scope, atom: Atom) -> Atom:
    return _widened(scope, atom, [])


def _widened(scope: Scope, atom: Atom, path: list[Atom]) -> Atom:
    """What a value was converted from; ``path`` gathers what is passed, and that."""
    eqn = _made(scope, atom)
    while eqn is not None and eqn.primitive is primitive("convert_element_type_p"):
        path.append(atom)
        atom = eqn.invars[0]
        eqn = _made(scope, atom)
    path.append(atom)
    return atom


def _unmasked(scope: Scope, atom: Atom) -> tuple[Atom, Atom | None]:
    """What is zero but where a mask of rows holds, and the mask; in a call too."""
    producer = None if jaxprs.is_literal(atom) else scope.producer(atom)
    if producer is None or producer.eqn.primitive is not primitive("select_n_p"):
        return atom, None
    pred, *cases = producer.eqn.invars
    if len(cases) != 2 or not producer.scope.fact(cases[0]).is_zero():
        return atom, None
    kept, column = producer.scope.resolve(cases[1]), _column(producer.scope, pred, atom.aval.shape)
    inside = column is not None and kept.scope is scope and column.scope is scope
    if not inside or column is None or jaxprs.is_literal(kept.atom):
        return atom, None
    return kept.atom, column.atom


def _column(scope: Scope, atom: Atom, shape: tuple[int, ...]) -> Value | None:
    """The mask of rows that a mask of ``[rows, d]`` repeats."""
    made = scope.producer(atom)
    if len(shape) != 2 or made is None or tuple(atom.aval.shape) != tuple(shape):
        return None
    if made.eqn.primitive is not primitive("broadcast_in_dim_p") or len(made.eqn.invars) > 1:
        return None
    operand, dims = made.eqn.invars[0], tuple(made.eqn.params["broadcast_dimensions"])
    wanted = {(0,): (shape[0],), (0, 1): (shape[0], 1)}
    return made.scope.resolve(operand) if tuple(operand.aval.shape) == wanted.get(dims) else None


def _made(scope: Scope, atom: Atom) -> Eqn | None:
    found = None if jaxprs.is_literal(atom) else scope.definition(atom)
    return None if found is None else scope.eqns[found[0]]
