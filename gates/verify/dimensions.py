"""Which dimensions of a site's values shrink together, found by each primitive's rule for shapes.

Two sizes that are the same number by chance, as 64 chunks and 64 rows are, stay apart. What is
found decides only which smaller program is tried: that one is traced, and rewritten, by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...compat import bodies, jaxprs
from ...compat.jaxprs import Atom, Eqn, Var
from ...compat.megablox import Megablox
from ...passes.engine.fragments import Cut
from .gemm_kernel import kernel_gemm
from .problem import expanded, products

Key = tuple[Var, int]
"""A dimension of a value."""

LEAST = 64
"""Smaller sizes stay: as numbers they could mean anything."""
SMALLEST = 8
"""No dimension becomes smaller than this."""


class Dimensions:
    """The dimensions of a part's values, those that are divided by the same number united."""

    def __init__(self, part: Cut) -> None:
        self._over: dict[Key, Key] = {}
        self._products: list[tuple[Key, tuple[Key, ...]]] = []
        self._pinned: list[Key] = []
        self.work: list[tuple[int, list[Key]]] = []
        """Of each matrix product its work, and the dimensions of all that it reads and makes."""
        self.expanded: list[tuple[int, list[Key]]] = []
        """The bytes of what a CPU makes beside the values, and the dimensions by which it grows."""
        self.values: dict[Var, None] = dict.fromkeys(v for v in part.inputs if _shape(v))
        self._walk(part.eqns)

    def root(self, key: Key) -> Key:
        """What stands for all dimensions that are united with one."""
        while key in self._over:
            key = self._over[key]
        return key

    def unite(self, *keys: Key) -> None:
        """They are divided by the same number."""
        first = self.root(keys[0])
        for key in keys[1:]:
            other = self.root(key)
            if other != first:
                self._over[other] = first

    def alike(self, a: Atom, b: Atom) -> None:
        """Two values shrink alike in every dimension."""
        if not jaxprs.is_literal(a) and not jaxprs.is_literal(b):
            for d in range(min(len(_shape(a)), len(_shape(b)))):
                self.unite((a, d), (b, d))

    def pin(self, *keys: Key) -> None:
        """They stay as they are."""
        self._pinned += keys

    def product(self, whole: Key, factors: tuple[Key, ...]) -> None:
        """One dimension is several others, one after the other."""
        self._products.append((whole, factors))

    def _walk(self, eqns: Sequence[Eqn]) -> None:
        for eqn in eqns:
            self.values.update(dict.fromkeys(v for v in eqn.outvars if _shape(v)))
            entered = bodies.carried(eqn).entered
            if (call := kernel_gemm(eqn)) is not None:
                self._multiply(eqn)
                _gemm(self, eqn, call)
                self._counted(eqns, eqn)
            elif len(entered) == 1 and entered[0].role is bodies.Role.CALL:
                self._enter(eqn, entered[0].body)
            elif entered:
                values = [a for a in (*eqn.invars, *eqn.outvars) if not jaxprs.is_literal(a)]
                self.pin(*(key for v in values for key in keys(v)))
            else:
                self._multiply(eqn)
                _RULES.get(eqn.primitive.name, _by_size)(self, eqn)

    def _multiply(self, eqn: Eqn) -> None:
        """What a matrix product costs, and what of."""
        if (work := products(eqn)) > 0:
            found = [a for a in (*eqn.invars, *eqn.outvars) if not jaxprs.is_literal(a)]
            self.work.append((work, [key for v in found for key in keys(v)]))
        for more, atoms in expanded(eqn):
            found = [a for a in atoms if not jaxprs.is_literal(a)]
            self.expanded.append((more, [key for v in found for key in keys(v)]))

    def _counted(self, eqns: Sequence[Eqn], gemm: Eqn) -> None:
        """A GEMM's groups' sizes count its rows, and shrink with what they were counted in."""
        lhs, _, sizes = gemm.invars[:3]
        if jaxprs.is_literal(lhs):
            return
        read = {sizes}
        for eqn in reversed(eqns):
            if not read.isdisjoint(eqn.outvars):
                read.update(a for a in eqn.invars if not jaxprs.is_literal(a))
        same = [k for v in read if v is not lhs for k in keys(v) if size_of(k) == _shape(lhs)[0]]
        self.unite((lhs, 0), *same)

    def _enter(self, eqn: Eqn, body: Any) -> None:
        inner = jaxprs.opened(body)
        self.pin(*(key for v in inner.constvars for key in keys(v)))
        self.values.update(dict.fromkeys(v for v in inner.invars if _shape(v)))
        for a, b in zip(eqn.invars, inner.invars, strict=True):
            self.alike(a, b)
        self._walk(inner.eqns)
        for a, b in zip(eqn.outvars, inner.outvars, strict=True):
            self.alike(a, b)

    def roots(self) -> list[Key]:
        """What may be divided, what most elements have first."""
        weight: dict[Key, int] = {}
        for v in self.values:
            for key in keys(v):
                if size_of(key) >= LEAST:
                    root = self.root(key)
                    weight[root] = weight.get(root, 0) + math.prod(_shape(v))
        pinned = {self.root(k) for k in self._pinned}
        return sorted((r for r in weight if r not in pinned), key=lambda r: -weight[r])

    def divided(self, divisors: Mapping[Key, int]) -> dict[Key, int] | None:
        """What is divided by how much if these are; None where something can't be."""
        found = dict(divisors)
        for _ in range(len(self._products) + 1):
            before = dict(found)
            for whole, factors in self._products:
                w, f = self.root(whole), tuple(map(self.root, factors))
                inner = math.prod(found.get(k, 1) for k in f)
                if found.get(w, 1) == inner:
                    continue
                if w not in found:
                    found[w] = inner
                elif inner == 1:
                    found[max(f, key=size_of)] = found[w]
                else:
                    return None
            if found == before:
                return found if self._divides(found) else None
        return None

    def _divides(self, divisors: Mapping[Key, int]) -> bool:
        if any(self.root(k) in divisors for k in self._pinned):
            return False
        for v in self.values:
            for key in keys(v):
                by = divisors.get(self.root(key), 1)
                if by > 1 and (size_of(key) % by or size_of(key) // by < SMALLEST):
                    return False
        return True


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def keys(var: Var) -> list[Key]:
    """A value's dimensions."""
    return [(var, d) for d in range(len(_shape(var)))]


def size_of(key: Key) -> int:
    """How long a dimension is."""
    return int(key[0].aval.shape[key[1]])


def _by_size(dims: Dimensions, eqn: Eqn) -> None:
    """No rule of its own: values of one shape alike, else dimensions of one size."""
    values = [a for a in (*eqn.invars, *eqn.outvars) if not jaxprs.is_literal(a) and _shape(a)]
    if len({len(_shape(a)) for a in values}) <= 1 and all(
        len({n for n in sizes if n != 1}) <= 1 for sizes in zip(*map(_shape, values), strict=True)
    ):
        for along in zip(*map(keys, values), strict=True):
            dims.unite(*([k for k in along if size_of(k) != 1] or along[:1]))
        return
    known: dict[int, Key] = {}
    for key in (key for a in values for key in keys(a)):
        dims.unite(known.setdefault(size_of(key), key), key)


def _dimwise(dims: Dimensions, eqn: Eqn) -> None:
    """Pieces of an array: each dimension as the result's."""
    if any(len(_shape(a)) != len(_shape(eqn.outvars[0])) for a in eqn.invars if _shape(a)):
        _by_size(dims, eqn)
        return
    for a in eqn.invars:
        if _shape(a):
            for out in eqn.outvars:
                dims.alike(a, out)


def _broadcast(dims: Dimensions, eqn: Eqn) -> None:
    source, (out,) = eqn.invars[0], eqn.outvars
    if not jaxprs.is_literal(source):
        for d, n in enumerate(eqn.params["broadcast_dimensions"]):
            if _shape(source)[d] == _shape(out)[n]:
                dims.unite((source, d), (out, n))


def _transpose(dims: Dimensions, eqn: Eqn) -> None:
    for d, n in enumerate(eqn.params["permutation"]):
        dims.unite((eqn.invars[0], n), (eqn.outvars[0], d))


def _without(param: str) -> Callable[[Dimensions, Eqn], None]:
    """The result has not the dimensions that a param names."""

    def rule(dims: Dimensions, eqn: Eqn) -> None:
        gone = set(eqn.params[param])
        for a in eqn.invars:
            if jaxprs.is_literal(a) or not _shape(a):
                continue
            stay = [d for d in range(len(_shape(a))) if d not in gone]
            for out in eqn.outvars:
                for n, d in enumerate(stay):
                    dims.unite((a, d), (out, n))

    return rule


def _dot(dims: Dimensions, eqn: Eqn) -> None:
    (contracted, batch), (lhs, rhs), (out,) = (
        eqn.params["dimension_numbers"], eqn.invars, eqn.outvars)  # fmt: skip
    for left, right in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        dims.unite((lhs, left), (rhs, right))
    free = [(side, d) for side, gone in ((lhs, (*contracted[0], *batch[0])),
                                         (rhs, (*contracted[1], *batch[1])))
            for d in range(len(_shape(side))) if d not in gone]  # fmt: skip
    for n, key in enumerate((*((lhs, d) for d in batch[0]), *free)):
        dims.unite(key, (out, n))


def _gemm(dims: Dimensions, eqn: Eqn, call: Megablox) -> None:
    """A grouped GEMM's kernel: rows, contracted elements, columns and groups."""
    (lhs, rhs, sizes, *offset), (out,) = eqn.invars, eqn.outvars
    contracted, columns = (2, 1) if call.transpose_rhs else (1, 2)
    wanted = [((lhs, 0), (out, 0)), ((lhs, 1), (rhs, contracted)), ((rhs, columns), (out, 1)),
              ((sizes, 0), (rhs, 0))]  # fmt: skip
    for pair in wanted:
        given = [key for key in pair if not jaxprs.is_literal(key[0])]
        if offset and pair[0][0] is sizes:
            dims.pin(*given)  # an offset is in groups, and which ones is a number
        elif given:
            dims.unite(*given)


def _solve(dims: Dimensions, eqn: Eqn) -> None:
    matrix, rhs = eqn.invars
    last = len(_shape(matrix)) - 1
    dims.alike(rhs, eqn.outvars[0])
    for d in range(last - 1):
        dims.unite((matrix, d), (rhs, d))
    rows = last - 1 if eqn.params["left_side"] else last
    dims.unite((matrix, last - 1), (matrix, last), (rhs, rows))


def _top_k(dims: Dimensions, eqn: Eqn) -> None:
    last = len(_shape(eqn.outvars[0])) - 1
    for out in eqn.outvars:
        dims.pin((out, last))
        for d in range(last):
            dims.unite((eqn.invars[0], d), (out, d))


def _reshape(dims: Dimensions, eqn: Eqn) -> None:
    source, (out,) = eqn.invars[0], eqn.outvars
    if jaxprs.is_literal(source):
        return
    for left, right in groups(_shape(source), _shape(out)):
        ins, outs = tuple((source, d) for d in left), tuple((out, d) for d in right)
        if len(ins) == len(outs) == 1:
            dims.unite(ins[0], outs[0])
        elif len(ins) == 1:
            dims.product(ins[0], outs)
        elif len(outs) == 1:
            dims.product(outs[0], ins)
        else:
            dims.pin(*ins, *outs)


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Dimensions, but for those of one, that hold the same elements before and after."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(before[d] for d in ins)) != (b := math.prod(after[d] for d in outs)):
            rest = left if a < b else right
            if not rest:
                return
            (ins if a < b else outs).append(rest.pop(0))
        yield ins, outs


_RULES: dict[str, Callable[[Dimensions, Eqn], None]] = {
    "all_gather": _dimwise,
    "broadcast_in_dim": _broadcast,
    "concatenate": _dimwise,
    "dot_general": _dot,
    "dynamic_slice": _dimwise,
    "dynamic_update_slice": _dimwise,
    "iota": lambda dims, eqn: None,
    "pad": _dimwise,
    "reduce_scatter": _dimwise,
    "reshape": _reshape,
    "slice": _dimwise,
    "split": _dimwise,
    "squeeze": _without("dimensions"),
    "top_k": _top_k,
    "transpose": _transpose,
    "triangular_solve": _solve,
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "argmax",
            "argmin",
        ),
        _without("axes"),
    ),
}
