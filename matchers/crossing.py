"""What masks tell across the calls, branches, loops and devices that they pass through.

A mask and what it tells of keep their places where both are handed over alike: whole, as the slices
of one iteration, or as the parts of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..compat import jaxprs
from ..compat.bodies import Entered, Flow, Port, Role, carried
from ..compat.primitives import primitive
from .fact import Fact, limits, meet
from .flow import inflow
from .guards import TELLS_NOTHING, Guard, Guards, Region, both, either, translated
from .subjects import Subject

if TYPE_CHECKING:
    from .facts import Analysis, BodyFacts

_ALIKE = (Flow.SAME, Flow.SLICE, Flow.SHARD)
"""How a mask may be handed over; carried values are others in every iteration."""


class Crossing:
    """The guards of one body's masks, and what they are in the bodies that its equations carry."""

    def __init__(
        self,
        analysis: Analysis,
        result: BodyFacts,
        definition: Callable[[jaxprs.Var], tuple[int, Any] | None],
    ) -> None:
        self._analysis = analysis
        self._result = result
        self._definition = definition
        self.guards = Guards(
            result.fact, self._producer, result.given, self._of_result, self._evaluated
        )

    def _producer(self, var: jaxprs.Var) -> Any:
        found = self._definition(var)
        return None if found is None else found[1]

    def given(self, eqn: jaxprs.Eqn, entered: Entered) -> dict[Any, Guard]:
        """What the masks among an equation's operands tell of its other operands, in a body."""
        found: dict[Any, Guard] = {}
        names: dict[str, dict[Subject, Subject]] = {}
        for port, var in zip(entered.inputs, jaxprs.invars(entered.body)):
            dtype = getattr(var.aval, "dtype", None)
            if port.outer is None or port.flow not in _ALIKE or limits(dtype) != (0, 1):
                continue
            guard = self.guards.of(eqn.invars[port.outer])
            if not guard:
                continue
            way = _way(port)
            if way not in names:
                names[way] = dict(self._operands(eqn, entered, port))
            inside = translated(guard, names[way], whole=port.flow is Flow.SAME) or TELLS_NOTHING
            made = self._of_inputs(eqn, entered, port, guard, var.aval.shape)
            inside = Guard(both(inside.false, made.false), both(inside.true, made.true))
            inside = inside.without((var, ()))
            if inside:
                found[var] = inside
        return found

    def in_branch(
        self, eqn: jaxprs.Eqn, entered: Entered, count: int, operands: Sequence[Fact]
    ) -> Sequence[Fact]:
        """What is known of scalars where a branch is taken, from what it is chosen by."""
        chosen, index = entered.key[1], eqn.invars[0]
        limit = limits(index.aval.dtype)
        if chosen is None or limit is None:
            return operands
        lo = limit[0] if chosen == 0 else chosen
        hi = limit[1] if chosen == count - 1 else chosen
        region = self.guards.where(index, lo, hi)
        if not region:  # nothing is known, or the branch is never taken: any facts will do
            return operands
        result = list(operands)
        for i, atom in enumerate(eqn.invars):
            if getattr(atom.aval, "shape", None) != () or limits(atom.aval.dtype) is None:
                continue
            better = self.guards.narrowed(atom, region)
            if better is not None:
                found = meet(operands[i], atom.aval, *better.range(atom.aval.dtype))
                result[i] = operands[i] if found is None else found
        return result

    def _operands(
        self, eqn: jaxprs.Eqn, entered: Entered, like: Port
    ) -> list[tuple[Subject, Subject]]:
        """The subjects of operands handed over like one, and of the inputs that they become."""
        pairs: list[tuple[Subject, Subject]] = []
        for port, var in zip(entered.inputs, jaxprs.invars(entered.body)):
            if port.outer is not None and _way(port) == _way(like):
                outer = self.guards.subjects.of(eqn.invars[port.outer])
                if outer is not None:
                    pairs.append((outer, (var, ())))
        return pairs

    def _of_inputs(
        self,
        eqn: jaxprs.Eqn,
        entered: Entered,
        like: Port,
        guard: Guard,
        shape: Sequence[int],
    ) -> Guard:
        """What a mask tells of operands that are made of what it is about."""
        false: Region = {}
        true: Region = {}
        for port, var in zip(entered.inputs, jaxprs.invars(entered.body)):
            if port.outer is None or _way(port) != _way(like):
                continue
            dtype = getattr(var.aval, "dtype", None)
            if limits(dtype) in (None, (0, 1)) or var.aval.shape != shape:
                continue
            atom, subject = eqn.invars[port.outer], (var, ())
            false = both(false, self._told(atom, subject, guard.false))
            true = both(true, self._told(atom, subject, guard.true))
        return Guard(false, true)

    def _told(self, atom: jaxprs.Atom, subject: Subject, region: Region) -> Region:
        fact = self.guards.narrowed(atom, region)
        if fact is None:
            return None
        bounds = fact.range(atom.aval.dtype)
        known = self._result.fact(atom).range(atom.aval.dtype)
        return {} if bounds == known else {subject: bounds}

    def _of_result(self, eqn: jaxprs.Eqn, mask: jaxprs.Var) -> Guard | None:
        """What a mask that an equation returns tells of its operands and other results.

        Of branches, what each of them tells: the one that is taken isn't known.
        """
        definition = self._definition(mask)
        assert definition is not None
        children = self._result.children(definition[0])
        found: Guard | None = None
        for entered in carried(eqn).entered if children else ():
            if entered.role is Role.PREDICATE:
                continue
            told = self._returned(eqn, entered, children[entered.key], mask)
            if found is None:
                found = told
            else:
                found = Guard(either(found.false, told.false), either(found.true, told.true))
        return found if found else None

    def _returned(
        self, eqn: jaxprs.Eqn, entered: Entered, child: BodyFacts, mask: jaxprs.Var
    ) -> Guard:
        wanted, outvars = eqn.outvars.index(mask), jaxprs.opened(entered.body).outvars
        returned = list(zip(entered.outputs, outvars))
        for port, var in returned:
            if port.outer != wanted or port.flow not in _ALIKE:
                continue
            names: dict[Subject, Subject] = {}
            for other, inner in returned:
                subject = child.guards.subjects.of(inner)
                if subject is None or other.outer is None or _way(other) != _way(port):
                    continue
                names.setdefault(subject, (eqn.outvars[other.outer], ()))
            guard, whole = child.guards.of(var), port.flow is Flow.SAME
            operands = {inner: outer for outer, inner in self._operands(eqn, entered, port)}
            of_results = translated(guard, names, whole=whole) or TELLS_NOTHING
            of_operands = translated(guard, operands, whole=whole) or TELLS_NOTHING
            return Guard(
                both(of_results.false, of_operands.false), both(of_results.true, of_operands.true)
            )
        return TELLS_NOTHING

    def _evaluated(self, eqn: jaxprs.Eqn, operands: Sequence[Fact]) -> Fact | None:
        """What a call gives at the places where its operands are known to be so."""
        if len(eqn.outvars) != 1 or eqn.primitive is not primitive("jit_p"):
            return None
        bodies = carried(eqn).entered
        if len(bodies) != 1 or not self._analysis.positionwise(bodies[0].body):
            return None
        given: Mapping[Any, Guard] = self.given(eqn, bodies[0])
        child = self._analysis.enter(bodies[0].body, inflow(eqn, bodies[0], operands), given)
        return child.outputs[0]


def _way(port: Port) -> str:
    """Equal for two arrays whose places stay together: by slices, or by the same devices."""
    return port.flow.value if port.flow is not Flow.SHARD else f"shard {port.spec}"
