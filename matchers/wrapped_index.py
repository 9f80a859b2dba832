"""Recognise what jax writes around the indices of a gather or scatter, and look behind it.

`x[i]` becomes a select that wraps negative indices around, and a trailing dimension of size one
that makes index vectors of single indices.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from ..compat.primitives import primitive as public
from ..compat.tracing import primitive
from .graph import Scope, Value
from .pattern import Bind, Captures, Constant, OneOf, Op, commuted


@functools.cache
def wrapped_index() -> Op:
    """``select_n(i < 0, i, i + n)``; captures ``index`` and ``size``."""
    negative = Op(primitive("lax.lax.lt_p"), (Bind("index"), Constant(0)))
    # Add and select need one dtype throughout, so this changes the weakness of the type only.
    strengthened = Op(
        primitive("lax.lax.convert_element_type_p"),
        (Bind("index"),),
        params={"weak_type": False, "sharding": None},
        capture={"new_dtype": "dtype"},
    )
    index = OneOf((Bind("index"), strengthened))
    wrapped = commuted(primitive("lax.lax.add_p"), index, Bind("size"))
    return Op(primitive("lax.lax.select_n_p"), (negative, Bind("index"), wrapped))


def plain_index(scope: Scope, atom: Atom) -> Atom:
    """The atom of the same body that holds the indices before jax wrapped and expanded them.

    Only what changes no value is looked behind: a wrap-around of indices known to be at least 0.
    """
    while True:
        inner = _expanded(scope, atom)
        inner = _unwrapped(scope, atom) if inner is None else inner
        if inner is None:
            return atom
        atom = inner


def plain_value(scope: Scope, atom: Atom) -> Value:
    """Where the indices are made, whichever body that is in; through exact conversions too."""
    while True:
        value = scope.resolve(atom)
        inner = _behind(value)
        if inner is None:
            return value
        scope, atom = inner.scope, inner.atom


def _behind(value: Value) -> Value | None:
    """What a value is an index made of, where it is one; ``value`` is as `Scope.resolve` has it."""
    scope, atom = value.scope, value.atom
    found = None if jaxprs.is_literal(atom) else scope.definition(atom)
    if found is None:
        return None
    eqn = scope.eqns[found[0]]
    p = eqn.primitive
    if p not in looked_behind():
        return None
    if p is primitive("lax.lax.select_n_p"):
        captures: Captures = {}
        if wrapped_index().match(scope, atom, captures) is not None:
            return None
        index: Value = captures["index"]
        if _nonnegative(index.scope, index.atom):
            return index
        local = _unwrapped(scope, atom)  # more may be known where the index comes out of a call
        return None if local is None else Value(scope, local)
    if p in same_value():
        return Value(scope, eqn.invars[0])
    if p is primitive("lax.lax.convert_element_type_p"):
        # The values 0 … n-1 of a permutation mean the same in both types.
        axes = {scope.fact(a).permutation for a in (eqn.invars[0], atom)}
        return Value(scope, eqn.invars[0]) if None not in axes else None
    expanded = _expanded(scope, atom)
    return None if expanded is None else Value(scope, expanded)


@functools.cache
def looked_behind() -> frozenset[Any]:
    """The primitives, calls aside, whose results may be an index made by another equation."""
    names = ("select_n_p", "convert_element_type_p", "broadcast_in_dim_p", "reshape_p")
    return same_value() | {primitive("lax.lax." + name) for name in names}


@functools.cache
def same_value() -> frozenset[Any]:
    """Primitives that change what is known of a value's devices or name, not the value."""
    return frozenset({public("name_p"), public("pvary_p")} - {None})


def _expanded(scope: Scope, atom: Atom) -> Atom | None:
    """The operand of an equation that only adds a trailing dimension of size one."""
    found = None if jaxprs.is_literal(atom) else scope.definition(atom)
    if found is None:
        return None
    eqn = scope.eqns[found[0]]
    if eqn.primitive is not primitive("lax.lax.broadcast_in_dim_p") and (
        eqn.primitive is not primitive("lax.lax.reshape_p") or eqn.params["dimensions"] is not None
    ):
        return None
    source = eqn.invars[0]
    if jaxprs.is_literal(source) or atom.aval.shape != (*source.aval.shape, 1):
        return None
    dims = eqn.params.get("broadcast_dimensions", tuple(range(source.aval.ndim)))
    return source if tuple(dims) == tuple(range(source.aval.ndim)) else None


def _unwrapped(scope: Scope, atom: Atom) -> Atom | None:
    """The index inside a wrap-around, as an operand of the equation that does it or calls it."""
    captures: Captures = {}
    producer = None if jaxprs.is_literal(atom) else scope.producer(atom)
    if producer is None or producer.eqn.primitive is not primitive("lax.lax.select_n_p"):
        return None
    if wrapped_index().match(scope, atom, captures) is not None:
        return None
    found = scope.definition(atom)
    operands: list[Any] = [] if found is None else scope.eqns[found[0]].invars
    for operand in operands:
        if not jaxprs.is_literal(operand) and scope.resolve(operand) == captures["index"]:
            return operand if _nonnegative(scope, operand) else None
    return None


def _nonnegative(scope: Scope, atom: Atom) -> bool:
    lo = scope.fact(atom).lo
    return lo is not None and lo >= 0
