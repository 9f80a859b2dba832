"""Names for values that several variables of a body hold: what a mask is about.

A value stays the same through exact conversions and markers, and is the same again where it is laid
out in the same way: ``(ids >= 0).reshape(-1)`` is about ``ids.reshape(-1)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .fact import Fact, limits

Subject = tuple[Any, tuple[Hashable, ...]]
"""A variable, and the changes of layout made to it since."""

_LONGEST = 24


class Subjects:
    """The subjects of one body's integers."""

    def __init__(self, fact_of: Callable[[Any], Fact], producer: Callable[[Any], Any]) -> None:
        self._fact_of = fact_of
        self._producer = producer
        self._known: dict[Any, Subject] = {}

    def of(self, atom: Any) -> Subject | None:
        """The name of an integer's or bool's value; None for a literal."""
        if jaxprs.is_literal(atom):
            return None
        known = self._known.get(atom)
        if known is None:
            known = self._known[atom] = self._find(atom)
        return known

    def _find(self, atom: Any) -> Subject:
        root, ops = atom, []
        for _ in range(_LONGEST):
            eqn = self._producer(root)
            if eqn is None:
                break
            if is_alias(eqn):
                source = eqn.invars[eqn.outvars.index(root)]
            elif self._keeps_value(eqn):
                source = eqn.invars[0]
            else:
                op = layout_op(eqn)
                if op is None:
                    break
                source = eqn.invars[0]
                if not jaxprs.is_literal(source):
                    ops.append(op)
            if jaxprs.is_literal(source):
                break
            root = source
        return root, tuple(reversed(ops))

    def _keeps_value(self, eqn: Any) -> bool:
        """Whether a conversion of integers gives back every value it gets."""
        if eqn.primitive is not primitive("convert_element_type_p"):
            return False
        source, limit = eqn.invars[0], limits(eqn.outvars[0].aval.dtype)
        if limit is None or limits(source.aval.dtype) is None:
            return False
        lo, hi = self._fact_of(source).range(source.aval.dtype)
        return limit[0] <= lo and hi <= limit[1]


@functools.cache
def _aliases() -> frozenset[Any]:
    names = ("name_p", "pvary_p", "copy_p", "stop_gradient_p", "optimization_barrier_p",
             "reduced_vary_cast_p")  # fmt: skip
    return frozenset(primitive(n) for n in names) - {None}


@functools.cache
def _layouts() -> frozenset[Any]:
    names = ("reshape_p", "broadcast_in_dim_p", "squeeze_p", "transpose_p", "rev_p", "slice_p")
    return frozenset(primitive(n) for n in names) - {None}


def is_alias(eqn: Any) -> bool:
    """Whether an equation's results are its operands, one by one."""
    return eqn.primitive in _aliases() and len(eqn.invars) == len(eqn.outvars)


def layout_op(eqn: Any) -> Hashable | None:
    """What a change of layout does to whichever one array it is done to; None for others."""
    if eqn.primitive not in _layouts() or len(eqn.invars) != 1:
        return None
    params = sorted((k, str(v)) for k, v in eqn.params.items() if k != "sharding")
    return eqn.primitive, tuple(params)
