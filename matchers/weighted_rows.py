"""Recognise the backward of rows that come out of a matrix product and are weighted one by one.

With ``y = h · wo`` and rows ``w · y``, the cotangents ``g`` of the rows give three things: ``dw``,
the products of each row of ``g`` with its row of ``y``; and, of ``d = w · g``, the gradients of
``h`` and ``wo``, by two more matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn, Var
from ..compat.primitives import primitive
from .graph import OUTPUT, Scope
from .placed_rows import Placed, distinct, outer_behind, row_numbers, same_places, taken_behind
from .spread_rows import Dims, Spread, Summed, spread_behind, summed_with


@dataclass(frozen=True)
class Difference:
    """Why what was found isn't the whole of such a backward."""

    found: str
    wanted: str


@dataclass
class Backward:
    """The equations of one such backward, by their indices in one body."""

    weight_gradient: int
    """The sum over each row of ``g · y``."""
    cotangents: Atom
    """``g``: ``[…, d]``."""
    column: Atom
    """``w``: as long as there are rows, ``[…]`` or ``[…, 1]``."""
    product: int
    """``y``, from ``h`` and ``wo``."""
    weighted: Var
    """``d``."""
    placed: Placed | None = None
    """Where rows are taken to tokens' choices before they are weighted, how; ``g`` is then of the
    tokens, and ``w`` ``[tokens…, choices]``."""
    spread: Spread | None = None
    """Where rows are added up in another order of axes than their product has, how the cotangents
    and weights lie there."""
    result_dims: Dims = ()
    """For each axis of the weights' gradient, which of the rows' it is, where they are spread."""
    input_gradient: int | None = None
    wo_gradients: tuple[int, ...] = ()
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """The equations to be replaced, in order."""
        found = (self.weight_gradient, self.input_gradient, *self.wo_gradients)
        return tuple(sorted(i for i in found if i is not None))


@functools.cache
def products() -> frozenset[Any]:
    """The primitives that multiply matrices."""
    return frozenset(primitive(n) for n in ("dot_general_p", "ragged_dot_general_p")) - {None}


def backwards(scope: Scope) -> dict[int, Backward]:
    """All such backwards of a body, by their first equation."""
    known: dict[int, Backward] | None = scope.memo.get("weighted_rows")
    if known is None:
        sums = (i for i in scope.live if scope.eqns[i].primitive is primitive("reduce_sum_p"))
        found = [f for i in sums if (f := _backward(scope, i)) is not None]
        dots = [i for i in scope.live if scope.eqns[i].primitive in products()]
        found += [f for i in dots if (f := _routed(scope, i)) is not None]
        found += [f for i in dots if (f := _turned(scope, i)) is not None]
        known = scope.memo["weighted_rows"] = {f.members[0]: f for f in found}
    return known


def _backward(scope: Scope, index: int) -> Backward | None:
    eqn = scope.eqns[index]
    summed = eqn.invars[0]
    if tuple(eqn.params["axes"]) != (summed.aval.ndim - 1,):
        return None
    times = _made(scope, summed)
    if times is None or scope.eqns[times].primitive is not primitive("mul_p"):
        return None
    pair = scope.eqns[times].invars
    for y, g in (pair, pair[::-1]):
        if y.aval.shape != summed.aval.shape or g.aval.shape != summed.aval.shape:
            continue
        for weighted, column, other in _weighted(scope, g, times):
            del other
            found = _around(scope, index, times, y, g, weighted, column)
            if found is not None:
                return found
    return None


def _routed(scope: Scope, index: int) -> Backward | None:
    """The backward around the product of weighted cotangents that came from tokens' choices."""
    eqn = scope.eqns[index]
    outer = outer_behind(scope, eqn.invars[0]) if _by_rows(eqn) else None
    if outer is None or not jaxprs.is_var(outer.cotangents):
        return None
    for reader, rows in _token_products(scope, outer.cotangents, outer.spread):
        taken = taken_behind(scope, rows)
        made = None if taken is None else _made(scope, taken.rows)
        if taken is None or made is None or taken.placed.shape != outer.placed.shape:
            continue
        product = scope.eqns[made]
        found = Backward(reader, outer.cotangents, outer.weights, made, eqn.invars[0])
        if product.primitive is not eqn.primitive or not _is_input_gradient(found, product, eqn):
            continue
        found.placed = replace(taken.placed, scatter=outer.placed.scatter)
        if not _by_rows(product) or scope.is_kept(made):
            continue
        if taken.read is not None:
            found.differences["read-elsewhere"] = Difference(
                f"read by {taken.read}", "rows read for the weights' gradient alone"
            )
        if not same_places(scope, taken.placed, outer.placed) or not distinct(scope, taken.placed):
            found.differences["places"] = Difference(
                "choices that may share a row, or cotangents that go elsewhere",
                "rows gathered by a permutation, cotangents scattered by the same",
            )
        for r in scope.readers(found.weighted):
            _sort_in(scope, found, product, r)
        return found
    return None


def _turned(scope: Scope, index: int) -> Backward | None:
    """The backward around a product of weighted cotangents that lie in another order of axes."""
    eqn = scope.eqns[index]
    if eqn.primitive is not primitive("dot_general_p"):
        return None
    for weighted in eqn.invars:
        for spread in spread_behind(scope, weighted) if jaxprs.is_var(weighted) else ():
            for summed in summed_with(scope, spread):
                found = _around_turned(scope, weighted, spread, summed)
                if found is not None:
                    return found
    return None


def _around_turned(scope: Scope, weighted: Var, spread: Spread, summed: Summed) -> Backward | None:
    made = _made(scope, summed.rows)
    found = Backward(summed.index, spread.cotangents, spread.weights,
                     -1 if made is None else made, weighted, spread=spread,
                     result_dims=summed.result_dims)  # fmt: skip
    product = None if made is None else scope.eqns[made]
    if made is None or product is None or product.primitive is primitive("name_p"):
        what = "an input of the body" if product is None else "name"
        found.differences["saved"] = Difference(what, "a matrix product that is computed here")
        return found
    if product.primitive is not primitive("dot_general_p") or scope.is_kept(made):
        return None
    if summed.read is not None:
        found.differences["read-elsewhere"] = Difference(
            f"read by {summed.read}", "rows read for the weights' gradient alone"
        )
    if not _by_rows(product):
        found.differences["layout"] = Difference(
            _dims(product), "rows times one matrix, or times one for each group or batch"
        )
        return found
    if spread.cotangent_dims[-1] != weighted.aval.ndim - 1:
        return None  # weights of columns
    for reader in scope.readers(weighted):
        _sort_in(scope, found, product, reader)
    return None if found.input_gradient is None and "other-reader" in found.differences else found


def _token_products(scope: Scope, g: Var, spread: Var | None) -> Iterator[tuple[int, Atom]]:
    """Equations that give each token's products with ``g``; of ``[tokens…, choices, d]`` what.

    ``spread`` is ``g`` repeated for each choice, if it is.
    """
    for reader in scope.readers(g):
        rows = None if reader == OUTPUT else _token_product(scope, reader, g)
        if rows is not None:
            yield reader, rows
    if spread is None:
        return
    for times in scope.readers(spread):
        if times == OUTPUT or scope.eqns[times].primitive is not primitive("mul_p"):
            continue
        one, other = scope.eqns[times].invars
        rows = other if one is spread else one
        if rows.aval.shape != spread.aval.shape:
            continue
        for reader in scope.readers(scope.eqns[times].outvars[0]):
            if reader != OUTPUT and _sums_rows(scope, reader):
                yield reader, rows


def _sums_rows(scope: Scope, index: int) -> bool:
    eqn = scope.eqns[index]
    last = (eqn.invars[0].aval.ndim - 1,)
    return eqn.primitive is primitive("reduce_sum_p") and tuple(eqn.params["axes"]) == last


def _token_product(scope: Scope, index: int, g: Atom) -> Atom | None:
    """``[tokens…, choices, d]``, whose products with each token's ``g`` an equation gives."""
    eqn = scope.eqns[index]
    if eqn.primitive is not primitive("dot_general_p"):
        return None
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    one, other = eqn.invars
    if one is not g:
        one, other, left, right = other, one, right, left
    batch = tuple(range(g.aval.ndim - 1))
    if one is not g or tuple(left_batch) != batch or tuple(right_batch) != batch:
        return None
    last = (tuple(left), tuple(right)) == ((len(batch),), (len(batch) + 1,))
    return other if last and other.aval.ndim == len(batch) + 2 else None


def _weighted(scope: Scope, g: Atom, times: int) -> list[tuple[Var, Atom, int]]:
    """Products of ``g`` with one number for each row, narrowed or not; the numbers."""
    found: list[tuple[Var, Atom, int]] = []
    for reader in scope.readers(g) if jaxprs.is_var(g) else []:
        eqn = None if reader in (OUTPUT, times) else scope.eqns[reader]
        if eqn is None or eqn.primitive is not primitive("mul_p"):
            continue
        other = eqn.invars[1] if eqn.invars[0] is g else eqn.invars[0]
        column = row_numbers(scope, other, g.aval.shape)
        if column is not None:
            found.append((_narrowed(scope, eqn.outvars[0]), column, reader))
    return found


def _narrowed(scope: Scope, var: Var) -> Var:
    """What a value is converted to, where that is its only reader."""
    readers = scope.readers(var)
    if len(readers) == 1 and readers[0] != OUTPUT:
        eqn = scope.eqns[readers[0]]
        if eqn.primitive is primitive("convert_element_type_p"):
            return eqn.outvars[0]
    return var


def _around(
    scope: Scope, index: int, times: int, y: Atom, g: Atom, weighted: Var, column: Atom
) -> Backward | None:
    readers = scope.readers(weighted)
    if not any(scope.eqns[r].primitive in products() for r in readers if r != OUTPUT):
        return None
    behind, read = _behind(scope, y, times)
    made = _made(scope, behind)
    found = Backward(index, g, column, -1 if made is None else made, weighted)
    if made is None or scope.eqns[made].primitive not in products():
        what = "an input of the body" if made is None else scope.eqns[made].primitive.name
        code = "saved" if made is None or what == "name" else "no-product"
        if code == "no-product":
            return None
        found.differences[code] = Difference(what, "a matrix product that is computed here")
        return found
    if scope.is_kept(made):
        return None
    _look_at_readers(scope, found, read)
    product = scope.eqns[made]
    if not _by_rows(product):
        found.differences["layout"] = Difference(
            _dims(product), "rows times one matrix, or times one for each group or batch"
        )
        return found
    for reader in readers:
        _sort_in(scope, found, product, reader)
    if found.input_gradient is None and found.differences:
        return None  # the likes of what such a backward is rewritten to
    return found


def _behind(scope: Scope, y: Atom, reader: int) -> tuple[Atom, list[tuple[Atom, int]]]:
    """What a value was converted from; each value on the way with the reader that may be."""
    read = [(y, reader)]
    made = _made(scope, y)
    while made is not None and scope.eqns[made].primitive is primitive("convert_element_type_p"):
        y = scope.eqns[made].invars[0]
        read.append((y, made))
        made = _made(scope, y)
    return y, read


def _look_at_readers(scope: Scope, found: Backward, read: list[tuple[Atom, int]]) -> None:
    for atom, reader in read:
        others = [r for r in scope.readers(atom) if r != reader]
        if others:
            name = "an output" if others[0] == OUTPUT else scope.eqns[others[0]].primitive.name
            found.differences["read-elsewhere"] = Difference(
                f"read by {name}", "rows read for the weights' gradient alone"
            )


def _sort_in(scope: Scope, found: Backward, product: Eqn, reader: int) -> None:
    eqn = None if reader == OUTPUT else scope.eqns[reader]
    if eqn is not None and eqn.primitive is product.primitive:
        if found.input_gradient is None and _is_input_gradient(found, product, eqn):
            found.input_gradient = reader
            return
        if _is_wo_gradient(found, product, eqn):
            found.wo_gradients = (*found.wo_gradients, reader)
            return
    found.differences["other-reader"] = Difference(
        f"the weighted cotangents read by {'an output' if eqn is None else eqn.primitive.name}",
        "the products that give the gradients of h and wo",
    )


def _numbers(eqn: Eqn) -> tuple[Any, ...]:
    """Contracting and batch dimensions of a product's operands, ragged and group dimensions."""
    if eqn.primitive is primitive("dot_general_p"):
        (contract, batch) = eqn.params["dimension_numbers"]
        return *map(tuple, contract), *map(tuple, batch), (), ()
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    return *map(tuple, contract), *map(tuple, batch), tuple(ragged), tuple(group)


def _dims(eqn: Eqn) -> str:
    return f"{eqn.primitive.name} of {', '.join(a.aval.str_short() for a in eqn.invars)}"


def _by_rows(eqn: Eqn) -> bool:
    """Whether a product is of ``[batch…, rows…, m]`` with one matrix for each batch or group."""
    lhs, rhs = (a.aval for a in eqn.invars[:2])
    left, _, left_batch, right_batch, ragged, group = _numbers(eqn)
    leading = tuple(range(len(left_batch)))
    if left != (lhs.ndim - 1,) or left_batch != leading or right_batch != leading:
        return False
    if eqn.primitive is primitive("ragged_dot_general_p"):
        plain = ragged == (0,) and group == (0,) and lhs.ndim == 2 and not leading
        return bool(plain and rhs.ndim == 3 and eqn.params["group_offset"] is None)
    return bool(rhs.ndim == len(leading) + 2)


def _is_input_gradient(found: Backward, product: Eqn, eqn: Eqn) -> bool:
    """``d`` times the transpose of the product's matrix."""
    if eqn.invars[0] is not found.weighted or eqn.invars[1] is not product.invars[1]:
        return False
    if not _by_rows(eqn) or any(a is not b for a, b in zip(eqn.invars[2:], product.invars[2:])):
        return False
    _, right, _, batch, _, group = _numbers(eqn)
    _, before, *_ = _numbers(product)
    free = set(range(eqn.invars[1].aval.ndim)) - set(batch) - set(group) - set(before)
    return set(right) == free


def _is_wo_gradient(found: Backward, product: Eqn, eqn: Eqn) -> bool:
    """Products of the rows of ``h`` with those of ``d``, added up over the rows."""
    pair = {id(eqn.invars[0]), id(eqn.invars[1])}
    if pair != {id(product.invars[0]), id(found.weighted)} or len(pair) < 2:
        return False
    if any(a is not b for a, b in zip(eqn.invars[2:], product.invars[2:])):
        return False
    left, right, left_batch, right_batch, ragged, group = _numbers(eqn)
    rows = set(range(product.invars[0].aval.ndim - 1)) - set(left_batch)
    if left != right or set(left) != rows or left_batch != right_batch:
        return False
    if eqn.primitive is primitive("ragged_dot_general_p"):
        return bool(ragged == (0,) and group == () and eqn.params["group_offset"] is None)
    return bool(left_batch == _numbers(product)[2])


def _made(scope: Scope, atom: Atom) -> int | None:
    found = None if jaxprs.is_literal(atom) else scope.definition(atom)
    return None if found is None else found[0]
