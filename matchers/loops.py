"""Facts that hold in every iteration of a loop, by a fixed point over its carried values.

Three things keep counters bounded, without which an `i + 1` could always overflow: a scan's number
of iterations is known; a while loop's body only runs where its condition held; and bounds that
keep growing are given up one by one, each on its own side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..compat import jaxprs
from ..compat.bodies import BodyKey, Carried, Entered, Flow, Role
from ..compat.primitives import primitive
from .bisection import find_bisections
from .fact import UNKNOWN, Affine, Fact, default_of, integer, join, limits, meet
from .flow import inflow, outflow

if TYPE_CHECKING:
    from .facts import BodyFacts

Enter = Callable[[Any, Sequence[Fact]], "BodyFacts"]

_PATIENCE = 2
"""Rounds before growing bounds are given up."""
_STEPPED = 5
"""Rounds before growing bounds no longer stop at numbers that the body compares with."""
_ROUNDS = 8
"""Rounds before everything about the carried values is given up."""


def fixed_point(
    enter: Enter, eqn: jaxprs.Eqn, bodies: Carried, operands: Sequence[Fact]
) -> tuple[dict[BodyKey, BodyFacts], list[Fact | None]]:
    """The final facts inside a loop's bodies, and those about its results."""
    loop = _Loop(enter, eqn, bodies, operands)
    return loop.run()


class _Loop:
    def __init__(
        self, enter: Enter, eqn: jaxprs.Eqn, bodies: Carried, operands: Sequence[Fact]
    ) -> None:
        self.enter = enter
        self.eqn = eqn
        (self.entered,) = (e for e in bodies.entered if e.role is Role.LOOP)
        self.predicate = next((e for e in bodies.entered if e.role is Role.PREDICATE), None)
        self.fixed = list(inflow(eqn, self.entered, operands))
        self.places = _carried_places(self.entered)
        self.fixed_test = (
            list(inflow(eqn, self.predicate, operands)) if self.predicate is not None else []
        )
        self.invars = [jaxprs.invars(self.entered.body)[i] for i in self.places]
        self.initial = [self._filled(self.fixed[i], v) for i, v in zip(self.places, self.invars)]
        self.length: int | None = eqn.params.get("length")
        self.counters = self._find_counters()

    @staticmethod
    def _filled(fact: Fact, var: Any) -> Fact:
        return default_of(var.aval) if fact is UNKNOWN else fact

    def run(self) -> tuple[dict[BodyKey, BodyFacts], list[Fact | None]]:
        carry = list(self.initial)
        widened = False
        for round_ in range(_ROUNDS):
            child, test = self._iterate(carry)
            grown = self._grown(carry, child)
            if grown == carry:
                break
            if round_ >= _PATIENCE:
                stops = compared_with(self.entered.body) if round_ < _STEPPED else ()
                grown = [
                    _widened(old, new, v.aval, stops)
                    for old, new, v in zip(carry, grown, self.invars)
                ]
                widened = True
            carry = grown
        else:
            carry = [default_of(v.aval) for v in self.invars]
            child, test = self._iterate(carry)
        if widened:
            # One step down: what the body makes of any state that the fixed point allows, or the
            # first state, covers every state there is.
            carry = self._grown(self.initial, child)
            child, test = self._iterate(carry)
        return self._children(child, test), self._outputs(carry, child)

    def _iterate(self, carry: list[Fact]) -> tuple[BodyFacts, BodyFacts | None]:
        test = None
        inside = carry
        if self.predicate is not None:
            inputs = list(self.fixed_test)
            for i, fact in zip(_carried_places(self.predicate), carry):
                inputs[i] = fact
            test = self.enter(self.predicate.body, inputs)
            inside = _where_true(test, self.predicate, carry)
        inputs = list(self.fixed)
        for position, (i, fact) in enumerate(zip(self.places, inside)):
            counter = self.counters.get(position)
            inputs[i] = fact if counter is None else counter[0]
        return self.enter(self.entered.body, inputs), test

    def _grown(self, carry: list[Fact], child: BodyFacts) -> list[Fact]:
        results = [f for p, f in zip(self.entered.outputs, child.outputs) if p.flow is Flow.CARRY]
        return [
            old if position in self.counters else join(old, new)
            for position, (old, new) in enumerate(zip(carry, results))
        ]

    def _children(self, child: BodyFacts, test: BodyFacts | None) -> dict[BodyKey, BodyFacts]:
        children = {self.entered.key: child}
        if test is not None and self.predicate is not None:
            children[self.predicate.key] = test
        return children

    def _outputs(self, carry: list[Fact], child: BodyFacts) -> list[Fact | None]:
        outputs: list[Fact | None] = [None] * len(self.eqn.outvars)
        for index, fact in outflow(self.eqn, self.entered, child.outputs):
            outputs[index] = fact
        ports = [p for p in self.entered.outputs if p.flow is Flow.CARRY]
        for position, (port, fact) in enumerate(zip(ports, carry)):
            assert port.outer is not None
            counter = self.counters.get(position)
            outputs[port.outer] = fact if counter is None else counter[1]
        return outputs

    def _find_counters(self) -> dict[int, tuple[Fact, Fact]]:
        """Carried values whose course is known: facts inside the loop, and after it.

        Those of a scan that gain a fixed step, and the bounds of a binary search.
        """
        outvars = [
            v
            for p, v in zip(self.entered.outputs, jaxprs.opened(self.entered.body).outvars)
            if p.flow is Flow.CARRY
        ]
        found = {
            position: (fact, fact)
            for position, fact in find_bisections(
                self.entered.body, self.invars, outvars, self.initial
            ).items()
        }
        if type(self.length) is not int:
            return found
        for position, (var, out, first) in enumerate(zip(self.invars, outvars, self.initial)):
            if limits(getattr(var.aval, "dtype", None)) is None or var.aval.shape != ():
                continue
            step = _step(self.entered, var, out)
            if step is not None:
                counter = _counted(var.aval, first, step, self.length)
                if counter is not None:
                    found[position] = counter
        return found


def _carried_places(entered: Entered) -> list[int]:
    return [i for i, port in enumerate(entered.inputs) if port.flow is Flow.CARRY]


def compared_with(body: Any, depth: int = 3) -> tuple[int, ...]:
    """Integers that a body, or a call in it, compares with: where growth may well end."""
    compares = {primitive(f"{n}_p") for n in ("lt", "le", "gt", "ge", "eq", "ne", "min", "max")}
    call = primitive("jit_p")
    found: set[int] = set()
    for eqn in jaxprs.opened(body).eqns:
        if eqn.primitive in compares or eqn.primitive is call:
            for atom in eqn.invars:
                if jaxprs.is_literal(atom) and atom.aval.shape == () and limits(atom.aval.dtype):
                    found.update((int(atom.val) - 1, int(atom.val), int(atom.val) + 1))
        if eqn.primitive is call and depth:
            found.update(compared_with(eqn.params["jaxpr"], depth - 1))
    return tuple(sorted(found))


def _widened(old: Fact, new: Fact, aval: Any, stops: Sequence[int]) -> Fact:
    """``new`` without the bounds that grew, unless to one at which growth often ends."""
    if old == new:
        return new
    dtype = default_of(aval)
    limit = limits(getattr(aval, "dtype", None))
    lo, hi = dtype.lo, dtype.hi
    if limit is not None and new.lo is not None:
        lo = max((n for n in stops if limit[0] < n <= new.lo), default=lo)
    if limit is not None and new.hi is not None:
        hi = min((n for n in stops if new.hi <= n < limit[1]), default=hi)
    widened = Fact(
        new.lo if new.lo in (old.lo, 0) else lo,
        new.hi if new.hi in (old.hi, 1) else hi,
        new.affine,
        new.permutation,
        new.constant,
        new.rising,
    )
    if limit is None and widened.integers() is None:
        widened = Fact(constant=new.constant)
    return UNKNOWN if widened == UNKNOWN else widened


def _step(entered: Entered, var: Any, out: Any) -> int | None:
    """``s`` where the body passes ``var + s`` on as the next ``var``."""
    for eqn in reversed(jaxprs.opened(entered.body).eqns):
        if out in eqn.outvars:
            if eqn.primitive is not primitive("add_p"):
                return None
            for x, y in (eqn.invars, eqn.invars[::-1]):
                if x is var and jaxprs.is_literal(y):
                    return int(y.val)
            return None
    return None


def _counted(aval: Any, first: Fact, step: int, length: int) -> tuple[Fact, Fact] | None:
    lo, hi = first.range(aval.dtype)
    limit = limits(aval.dtype)
    total = step * length
    if limit is None or lo + min(0, total) < limit[0] or hi + max(0, total) > limit[1]:
        return None
    travelled = step * max(length - 1, 0)
    inside = integer(aval, lo + min(0, travelled), hi + max(0, travelled), Affine(None, ()))
    return inside, integer(aval, lo + total, hi + total, Affine(None, ()))


def _where_true(test: BodyFacts, predicate: Entered, carry: list[Fact]) -> list[Fact]:
    """The facts about carried values where the loop's condition holds of them."""
    jaxpr = jaxprs.opened(predicate.body)
    position = {id(jaxpr.invars[i]): k for k, i in enumerate(_carried_places(predicate))}
    producer = {v: e for e in jaxpr.eqns for v in e.outvars}
    result = list(carry)
    pending = [jaxpr.outvars[0]]
    while pending:
        atom = pending.pop()
        eqn = None if jaxprs.is_literal(atom) else producer.get(atom)
        if eqn is None:
            continue
        if eqn.primitive is primitive("and_p"):
            pending.extend(eqn.invars)
            continue
        for low, high, gap in _ordered(eqn):
            _narrow(result, position, test, low, high, gap)
    return result


def _ordered(eqn: Any) -> list[tuple[Any, Any, int]]:
    """Pairs with ``low + gap <= high`` where a comparison of integers holds."""
    if len(eqn.invars) != 2 or limits(getattr(eqn.invars[0].aval, "dtype", None)) is None:
        return []
    x, y = eqn.invars
    cases = {
        primitive("lt_p"): [(x, y, 1)],
        primitive("le_p"): [(x, y, 0)],
        primitive("gt_p"): [(y, x, 1)],
        primitive("ge_p"): [(y, x, 0)],
    }
    return cases.get(eqn.primitive, [])


def _narrow(
    result: list[Fact], position: dict[int, int], test: BodyFacts, low: Any, high: Any, gap: int
) -> None:
    least, _ = test.fact(low).range(low.aval.dtype)
    _, greatest = test.fact(high).range(high.aval.dtype)
    for atom, bounds in ((low, (None, greatest - gap)), (high, (least + gap, None))):
        place = position.get(id(atom))
        if place is None:
            continue
        fact = result[place]
        lo, hi = fact.range(atom.aval.dtype)
        lo = lo if bounds[0] is None else bounds[0]
        hi = hi if bounds[1] is None else bounds[1]
        # Where nothing is left the body never runs in this round: any facts will do.
        result[place] = meet(fact, atom.aval, lo, hi) or fact
