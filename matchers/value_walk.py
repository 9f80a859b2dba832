"""Follow a value through everything that only moves, adds up, scales or reduces it over devices.

A gradient is converted, transposed, summed over micro-batches in a loop's carry and scattered over
a mesh on its way to whoever uses it: these walks go along, into bodies and out of them again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..compat import jaxprs
from ..compat.bodies import Flow
from ..compat.jaxprs import Atom, Var
from ..compat.primitives import primitive
from .demand import carried_inputs, is_pairwise
from .graph import OUTPUT, Scope

_MOVES = """
all_gather_p all_gather_invariant_p broadcast_in_dim_p convert_element_type_p copy_p
dynamic_slice_p layout_constraint_p neg_p optimization_barrier_p pad_p ppermute_p
psum_invariant_p psum_p pvary_p reduce_precision_p reduce_scatter_p reduced_vary_cast_p reshape_p
reshard_p rev_p sharding_constraint_p slice_p split_p squeeze_p transpose_p unstack_p
"""
_SUMS = "add_p add_jaxvals_p sub_p concatenate_p dynamic_update_slice_p stack_p"

Place = tuple[Scope, int]


@functools.cache
def _named(names: str) -> frozenset[Any]:
    return frozenset({primitive(name) for name in names.split()} - {None})


def moves(scope: Scope, index: int, operand: int) -> bool:
    """Whether an equation's results hold its operand's values, moved, summed or scaled by one."""
    eqn = scope.eqns[index]
    p = eqn.primitive
    if p in _named(_MOVES):
        return operand == 0 or is_pairwise(eqn)
    if p in _named(_SUMS):
        return True
    if p is primitive("select_n_p"):
        return operand > 0
    if p is primitive("reduce_sum_p"):
        return bool(eqn.outvars[0].aval.shape)
    if p is primitive("mul_p"):
        return is_uniform(scope, eqn.invars[1 - operand])
    return p is primitive("div_p") and operand == 0 and is_uniform(scope, eqn.invars[1])


def is_uniform(scope: Scope, atom: Atom) -> bool:
    """Whether every element of an array is one number."""
    if jaxprs.is_literal(atom) or atom.aval.size == 1 or scope.fact(atom).constant is not None:
        return True
    producer = scope.producer(atom)
    return (
        producer is not None
        and producer.eqn.primitive is primitive("broadcast_in_dim_p")
        and producer.eqn.invars[0].aval.size == 1
    )


@dataclass
class Walk:
    """Where a value goes."""

    values: set[tuple[int, Var]] = field(default_factory=set)
    """By ``(id(scope), variable)``."""
    passed: list[Place] = field(default_factory=list)
    """Equations that move it on, nearest first."""
    readers: list[Place] = field(default_factory=list)
    """Equations that make something else of it, nearest first."""
    outputs: list[int] = field(default_factory=list)
    """Outputs of the program that hold it."""
    carries: list[tuple[Scope, int, int]] = field(default_factory=list)
    """Loops that carry it, as scope, equation and result."""


class Walker:
    """Walks through one program's values; equations that are dead are looked at too."""

    def __init__(self) -> None:
        self._readers: dict[int, dict[Var, list[tuple[int, int]]]] = {}

    def onward(self, starts: Iterable[tuple[Scope, Var]]) -> Walk:
        """Where some values go."""
        walk = Walk()
        waiting = list(starts)
        passed: set[tuple[int, int]] = set()
        while waiting:
            scope, var = waiting.pop(0)
            if (id(scope), var) in walk.values:
                continue
            walk.values.add((id(scope), var))
            for index, operand in self._read_by(scope, var):
                if index == OUTPUT:
                    waiting += self._outward(scope, operand, walk)
                    continue
                inside = list(_inward(scope, index, operand))
                eqn = scope.eqns[index]
                if inside:
                    waiting += inside
                elif moves(scope, index, operand):
                    if (id(scope), index) not in passed:
                        passed.add((id(scope), index))
                        walk.passed.append((scope, index))
                    to = [eqn.outvars[operand]] if is_pairwise(eqn) else eqn.outvars
                    waiting += [(scope, v) for v in to]
                else:
                    walk.readers.append((scope, index))
        return walk

    def _read_by(self, scope: Scope, var: Var) -> list[tuple[int, int]]:
        """Who reads a variable: equation and operand, or `OUTPUT` and its position."""
        known = self._readers.get(id(scope.body))
        if known is None:
            known = self._readers[id(scope.body)] = {}
            jaxpr = jaxprs.opened(scope.body)
            for index, eqn in enumerate(jaxpr.eqns):
                for operand, atom in enumerate(eqn.invars):
                    if not jaxprs.is_literal(atom):
                        known.setdefault(atom, []).append((index, operand))
            for position, atom in enumerate(jaxpr.outvars):
                if not jaxprs.is_literal(atom):
                    known.setdefault(atom, []).append((OUTPUT, position))
        return known.get(var, [])

    def _outward(self, scope: Scope, position: int, walk: Walk) -> Iterator[tuple[Scope, Var]]:
        """From a body's output to the results of its callers, and round a loop."""
        if not scope.callers and position not in walk.outputs:
            walk.outputs.append(position)
        for caller in scope.callers:
            port = caller.entered.outputs[position]
            if port.outer is None:
                continue
            if port.flow is Flow.CARRY:
                walk.carries.append((caller.scope, caller.index, port.outer))
                # Into the loop's body, and into its condition where it has one.
                for key, child in caller.scope.children[caller.index].items():
                    carry = carried_inputs(caller.scope.entered(caller.index, key))[port.outer]
                    yield child, jaxprs.invars(child.body)[carry]
            yield caller.scope, caller.scope.eqns[caller.index].outvars[port.outer]


def _inward(scope: Scope, index: int, operand: int) -> Iterator[tuple[Scope, Var]]:
    """The inputs of an equation's bodies that receive an operand."""
    for key, child in scope.children.get(index, {}).items():
        for position, port in enumerate(scope.entered(index, key).inputs):
            if port.outer == operand:
                yield child, jaxprs.invars(child.body)[position]


def backward(scope: Scope, atom: Atom) -> tuple[list[tuple[Scope, Var]], list[int]]:
    """What a value is made of.

    Returns:
      Results of the equations at which the walk ended, each with the scope that it stands in, and
      the inputs of the program that the walk came to.
    """
    seen: set[tuple[int, Var]] = set()
    sources: list[tuple[Scope, Var]] = []
    inputs: list[int] = []
    waiting: list[tuple[Scope, Atom]] = [(scope, atom)]
    while waiting:
        scope, atom = waiting.pop(0)
        if jaxprs.is_literal(atom) or (id(scope), atom) in seen:
            continue
        seen.add((id(scope), atom))
        place = scope.definition(atom)
        if place is None:
            waiting += _to_callers(scope, atom, inputs)
            continue
        index, result = place
        bodies = list(_to_bodies(scope, index, result))
        eqn = scope.eqns[index]
        carried = [operand for operand in range(len(eqn.invars)) if moves(scope, index, operand)]
        if bodies:
            waiting += bodies
        elif carried:
            kept = [result] if is_pairwise(eqn) else carried
            waiting += [(scope, eqn.invars[operand]) for operand in kept]
        elif scope.fact(atom).constant is None:
            sources.append((scope, atom))
    return sources, inputs


def _to_callers(scope: Scope, var: Var, inputs: list[int]) -> Iterator[tuple[Scope, Atom]]:
    position = scope.position(var)
    if position is None:
        return
    if not scope.callers:
        inputs.append(position)
    for caller in scope.callers:
        port = caller.entered.inputs[position]
        if port.outer is not None:
            yield caller.scope, caller.scope.eqns[caller.index].invars[port.outer]
        if port.flow is Flow.CARRY:
            ordinal = carried_inputs(caller.entered).index(position)
            outputs = [p for p in caller.entered.outputs if p.flow is Flow.CARRY]
            if outputs:  # a loop's body; its condition has none
                yield scope, jaxprs.opened(scope.body).outvars[ordinal]


def _to_bodies(scope: Scope, index: int, result: int) -> Iterator[tuple[Scope, Atom]]:
    for key, child in scope.children.get(index, {}).items():
        for position, port in enumerate(scope.entered(index, key).outputs):
            if port.outer == result:
                yield child, jaxprs.opened(child.body).outvars[position]
