"""Recognise indices that name each of ``groups`` places equally often, in some known order.

``index[i] = (order[i + start] // div) mod groups``, ``order`` a permutation of ``0 … total-1``: the
tokens of rows that were sorted by expert (`order // k`), or of choices tiled over the tokens
(`order % tokens`), whole or cut to a buffer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..compat import jaxprs
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .fact import limits
from .graph import Scope, Value
from .origin import Crossed, Origin, origin
from .pattern import Bind, Captures, Constant, Op, commuted
from .stepped import Stepped, find_stepped


@dataclass(frozen=True)
class Grouped:
    """``index[i] = (order[i + start] // div) mod groups``."""

    order: Origin | None
    """A permutation of ``0 … total-1``; None where only its effect is in the program."""
    total: int
    div: int
    groups: int
    start: int = 0
    dropped: bool = False
    """Some indices are instead an index that lies outside the operand."""

    @property
    def repeats(self) -> int:
        """How often the counting of the groups starts again."""
        return self.total // (self.div * self.groups)

    @property
    def each(self) -> int:
        """How often ``order`` names each group."""
        return self.total // self.groups


def find_grouped(scope: Scope, atom: Atom, size: int) -> Grouped | None:
    """What is known of indices ``[n]`` or ``[n, 1]`` into ``size`` places; None if not enough."""
    made = origin(scope, atom)
    kept = kept_inside(made.value, size)
    if kept is not None:
        inner = _find(kept.scope, kept.atom, made.crossed)
        return None if inner is None else replace(inner, dropped=True)
    return _find(made.value.scope, made.value.atom, made.crossed)


def kept_inside(value: Value, size: int) -> Value | None:
    """The other case of a select one of whose cases is an index outside ``size`` places."""
    eqn = _made(value)
    if eqn is None or eqn.primitive is not primitive("select_n_p") or len(eqn.invars) != 3:
        return None
    for case, other in (eqn.invars[1:], eqn.invars[:0:-1]):
        known = value.scope.fact(case).constant
        if known is not None and not 0 <= known.value < size:
            return Value(value.scope, other)
    return None


def _find(scope: Scope, atom: Atom, crossed: Crossed) -> Grouped | None:
    """As `find_grouped`; ``crossed`` are the loops by which the atom came to who asks."""
    made = origin(scope, atom)
    value, crossed = made.value, crossed + made.crossed
    if jaxprs.is_literal(value.atom) or value.atom.aval.shape[1:] not in ((), (1,)):
        return None
    n = value.atom.aval.shape[0] if value.atom.aval.shape else 0
    if n > 1 and value.scope.fact(value.atom).permutation == 0:
        return Grouped(Origin(value, crossed), n, 1, n)
    divided = _divided(value, crossed)
    if divided is not None:
        return divided
    eqn = _made(value)
    if eqn is None:
        return None
    if eqn.primitive is primitive("sort_p"):
        return _sorted(value, eqn)
    if eqn.primitive is primitive("slice_p"):
        return _sliced(value.scope, eqn, crossed)
    if eqn.primitive is primitive("gather_p"):
        return _from_table(value.scope, eqn, crossed)
    if eqn.primitive in (primitive("reshape_p"), primitive("squeeze_p")):
        # Of n elements along one axis, whichever others of size one there are.
        return _find(value.scope, eqn.invars[0], crossed)
    if eqn.primitive is primitive("convert_element_type_p"):
        return _converted(value.scope, eqn, crossed)
    return None


def _converted(scope: Scope, eqn: Eqn, crossed: Crossed) -> Grouped | None:
    """Indices in another dtype that holds them all."""
    inner, limit = _find(scope, eqn.invars[0], crossed), limits(eqn.outvars[0].aval.dtype)
    fits = inner is not None and limit is not None and inner.groups - 1 <= limit[1]
    return inner if fits else None


def _made(value: Value) -> Eqn | None:
    found = None if jaxprs.is_literal(value.atom) else value.scope.definition(value.atom)
    return None if found is None else value.scope.eqns[found[0]]


def _by_constants(name: str) -> Op:
    return Op(primitive(name), (Bind("a"), Bind("b")))


@functools.cache
def _quotient() -> Op:
    """``a // b`` as jax writes it for signed integers and positive ``b``."""
    div, rem = _by_constants("div_p"), _by_constants("rem_p")
    signs = Op(primitive("ne_p"), (Op(primitive("sign_p"), (Bind("a"),)), Constant(1)))
    inexact = Op(primitive("ne_p"), (rem, Constant(0)))
    less = Op(primitive("sub_p"), (div, Constant(1)))
    return Op(primitive("select_n_p"), (commuted(primitive("and_p"), signs, inexact), div, less))


@functools.cache
def _remainder() -> Op:
    """``a % b`` as jax writes it for signed integers."""
    rem = _by_constants("rem_p")
    below = Op(primitive("lt_p"), (rem, Constant(0)))
    unlike = Op(primitive("ne_p"), (below, Constant(0)))
    inexact = Op(primitive("ne_p"), (rem, Constant(0)))
    lifted = Op(primitive("add_p"), (rem, Bind("b")))
    return Op(primitive("select_n_p"), (commuted(primitive("and_p"), unlike, inexact), rem, lifted))


def _divided(value: Value, crossed: Crossed) -> Grouped | None:
    """A quotient or remainder of grouped indices, however it is written."""
    for pattern, kind in (
        (_quotient(), "div"),
        (_remainder(), "rem"),
        (_by_constants("div_p"), "div"),
        (_by_constants("rem_p"), "rem"),
        (_by_constants("shift_right_arithmetic_p"), "shift"),
        (_by_constants("shift_right_logical_p"), "shift"),
        (_by_constants("and_p"), "mask"),
    ):
        captures: Captures = {}
        if pattern.match(value.scope, value.atom, captures) is None:
            a, b = captures["a"], captures["b"]
            known = b.scope.fact(b.atom).constant
            inner = None if known is None else _find(a.scope, a.atom, crossed)
            return None if inner is None or known is None else _by(inner, kind, int(known.value))
    return None


def _by(inner: Grouped, kind: str, by: int) -> Grouped | None:
    """``inner`` divided by or modulo a number; its values are never negative."""
    if kind == "shift":
        kind, by = "div", 1 << by if 0 <= by < 31 else 0
    elif kind == "mask":
        kind, by = "rem", by + 1 if by & (by + 1) == 0 else 0
    if by <= 0:
        return None
    if kind == "rem" and by >= inner.groups:
        return inner
    if inner.groups % by:
        return None
    if kind == "rem":
        return replace(inner, groups=by)
    return replace(inner, div=inner.div * by, groups=inner.groups // by)


def _sorted(value: Value, eqn: Eqn) -> Grouped | None:
    """Indices that count in steps, carried along by a sort of something else."""
    found = value.scope.definition(value.atom)
    assert found is not None
    operand = eqn.invars[found[1]]
    if operand.aval.ndim != 1:
        return None
    return _of_table(find_stepped(value.scope, operand), operand.aval.shape[0], None)


def _of_table(form: Stepped | None, size: int, order: Origin | None) -> Grouped | None:
    whole = form is not None and form.offset == 0 and form.stride == 1
    if not whole or form is None or size % (form.div * form.mod):
        return None
    return Grouped(order, size, form.div, form.mod)


def _sliced(scope: Scope, eqn: Eqn, crossed: Crossed) -> Grouped | None:
    """A buffer's worth of the rows."""
    source, strides = eqn.invars[0], eqn.params["strides"]
    inner = _find(scope, source, crossed) if strides is None or set(strides) == {1} else None
    if inner is None or inner.order is None:
        return None
    return replace(inner, start=inner.start + eqn.params["start_indices"][0])


def _from_table(scope: Scope, eqn: Eqn, crossed: Crossed) -> Grouped | None:
    """Elements of a table that counts in steps, taken by a permutation."""
    table, indices = eqn.invars[:2]
    if table.aval.ndim != 1 or limits(table.aval.dtype) is None or eqn.outvars[0].aval.ndim != 1:
        return None
    inner = _find(scope, indices, crossed)
    n = table.aval.shape[0]
    if inner is None or inner.total != n or inner.groups != n:
        return None
    made = _of_table(find_stepped(scope, table), n, inner.order)
    return None if made is None else replace(made, start=inner.start)
