"""Facts about every variable of a program: forward abstract interpretation of nested jaxprs.

A body is analysed once per combination of facts about its inputs, so that one body called at four
sites costs one analysis where the facts agree, and sites with different facts are kept apart.
Loops are taken to a fixed point (see `loops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.assume_range import assume_range_p
from ..compat.bodies import BodyKey, Carried, Role, carried
from ..compat.primitives import host_array, primitive
from . import loops
from .crossing import Crossing
from .fact import UNKNOWN, Constant, Fact, default_of, integer, join, limits, meet
from .fact_of_values import of_array, of_scalar
from .flow import inflow, outflow
from .guards import Guard, Guards, Region
from .packed_order import packed_order
from .relations import floor_divided
from .transfer import contradicts, is_positionwise, is_static, rules

_MOST_ELEMENTS = 1 << 16
"""Larger constant arrays aren't looked at."""


_MOST_EVALUATED = 24
"""Equations of a body that is worth another analysis for the sake of one select."""

MOST_CONTEXTS = 64
"""Sets of facts about its inputs in which one body is analysed; beyond, without them."""


class BodyFacts:
    """The facts about the variables of one body, given those about its inputs."""

    __slots__ = ("_children", "_facts", "body", "given", "guards", "inputs", "outputs")

    def __init__(
        self, body: jaxprs.Body, inputs: tuple[Fact, ...], given: Mapping[Any, Guard]
    ) -> None:
        self.body = body
        self.inputs = inputs
        self.given = given
        """What masks among the inputs tell of other inputs."""
        self.guards: Guards
        self.outputs: tuple[Fact, ...] = ()
        self._facts: dict[Any, Fact] = {}
        self._children: dict[int, dict[BodyKey, BodyFacts]] = {}

    def fact(self, atom: jaxprs.Atom) -> Fact:
        """What is known of a variable or literal of this body."""
        if jaxprs.is_literal(atom):
            return _of_literal(atom)
        found = self._facts.get(atom)
        return default_of(atom.aval) if found is None else found

    def constant(self, atom: jaxprs.Atom) -> Constant | None:
        """What every element of a variable or literal is; None where that isn't known.

        For less than `fact` takes: no type alone tells a constant.
        """
        found = _of_literal(atom) if jaxprs.is_literal(atom) else self._facts.get(atom)
        return None if found is None else found.constant

    def children(self, eqn_index: int) -> dict[BodyKey, BodyFacts]:
        """The facts inside the bodies that one equation carries; empty if it carries none.

        For a loop they hold in every iteration, for a branch whenever it is taken.
        """
        return self._children.get(eqn_index, {})


@dataclass(frozen=True, slots=True)
class Splice:
    """A copy of a jaxpr's equations in another body."""

    template: jaxprs.Jaxpr
    operands: Sequence[jaxprs.Atom]
    """What the template's inputs are there."""
    eqns: Sequence[jaxprs.Eqn]
    """One for each equation of the template, in order."""
    results: Sequence[jaxprs.Var] = ()
    """The variables of what was replaced, some of which these equations may bind again."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """An `assume_range` that can't be true of any value that reaches it."""

    eqn: jaxprs.Eqn
    known: Fact


class Analysis:
    """All facts of one program. Holds on to the bodies that it has seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], BodyFacts] = {}
        self._contradictions: dict[int, Contradiction] = {}
        self._contexts: dict[int, int] = {}
        self.generalised: set[int] = set()
        """Bodies met with more sets of facts than `MOST_CONTEXTS`; later calls got none."""
        self._constants: dict[int, tuple[Any, Fact]] = {}
        self._origins: dict[int, tuple[jaxprs.Body, list[BodyFacts]]] = {}
        self._positionwise: dict[int, tuple[jaxprs.Body, bool]] = {}
        self._spliced: dict[int, tuple[Splice, int]] = {}
        self._found_in: dict[int, dict[int, list[tuple[int, Fact]]]] = {}

    def spliced(self, splice: Splice) -> None:
        """Say what some equations were copied from.

        Nothing that stands around a copy is used inside it, so that one analysis serves all
        copies on which operands the same is known of.
        """
        for index, eqn in enumerate(splice.eqns):
            self._spliced[id(eqn)] = splice, index

    def rewritten(self, body: jaxprs.Body, origin: BodyFacts) -> None:
        """Say that ``body`` was made from the body of ``origin`` by a rewrite.

        Variables that both share hold the same values, so that what is known of them is known
        already and only the new equations need be looked at.
        """
        self._origins.setdefault(id(body), (body, []))[1].append(origin)

    def _origin(self, found: BodyFacts) -> BodyFacts | None:
        """The facts of the body that this one was made from, where its inputs have the same."""
        body, inputs = found.body, found.inputs
        for origin in self._origins.get(id(body), (body, []))[1]:
            if origin.given == found.given and all(
                origin.fact(v) == f for v, f in zip(jaxprs.invars(body), inputs)
            ):
                return origin
        return None

    @property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """Assumed ranges that were found to be wrong, or to stand in code that never runs."""
        return tuple(self._contradictions.values())

    def enter(
        self,
        body: jaxprs.Body,
        in_facts: Sequence[Fact] | None = None,
        given: Mapping[Any, Guard] | None = None,
    ) -> BodyFacts:
        """The facts inside ``body``, given facts about its inputs; None knows nothing of them.

        Args:
            body: A ``ClosedJaxpr`` or ``Jaxpr``, as found in an equation's params.
            in_facts: One for each of the body's ``invars``.
            given: For masks among the ``invars``, what they tell of other ``invars``.
        """
        invars = jaxprs.invars(body)
        if in_facts is None:
            in_facts = (UNKNOWN,) * len(invars)
        if len(in_facts) != len(invars):
            raise ValueError(f"found {len(in_facts)} facts, wanted one for each of {len(invars)}")
        inputs = tuple(default_of(v.aval) if f is UNKNOWN else f for f, v in zip(in_facts, invars))
        given = given or {}
        key = id(body), inputs, _key(given)
        if self._contexts.get(id(body), 0) >= MOST_CONTEXTS and key not in self._seen:
            # One more set of facts for a body that has many: what holds of any input still holds.
            self.generalised.add(id(body))
            inputs, given = tuple(default_of(v.aval) for v in invars), {}
            key = id(body), inputs, _key(given)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = BodyFacts(body, inputs, given)
            self._contexts[id(body)] = self._contexts.get(id(body), 0) + 1
            _BodyAnalysis(self, found).run(self._origin(found))
        return found

    def found_in(self, facts: BodyFacts) -> Mapping[int, Sequence[tuple[int, Fact]]]:
        """What is known of a body's results, by equation; listed once for all copies of it."""
        known = self._found_in.get(id(facts))
        if known is None:
            known = self._found_in[id(facts)] = {}
            for index, eqn in enumerate(jaxprs.opened(facts.body).eqns):
                found = [
                    (r, facts._facts[v]) for r, v in enumerate(eqn.outvars) if v in facts._facts
                ]
                if found:
                    known[index] = found
        return known

    def positionwise(self, body: jaxprs.Body) -> bool:
        """Whether each element of a body's results is made of those at its own place alone."""
        known = self._positionwise.get(id(body))
        if known is None:
            eqns = jaxprs.opened(body).eqns
            call = primitive("jit_p")
            found = len(eqns) <= _MOST_EVALUATED and all(
                self.positionwise(eqn.params["jaxpr"])
                if eqn.primitive is call
                else is_positionwise(eqn)
                for eqn in eqns
            )
            known = self._positionwise[id(body)] = (body, found)
        return known[1]

    def _constant(self, value: Any, aval: Any) -> Fact:
        known = self._constants.get(id(value))
        if known is None:
            fact = UNKNOWN
            array = host_array(value)
            if array is not None and array.size <= _MOST_ELEMENTS and hasattr(aval, "shape"):
                fact = of_array(array, aval)
            known = self._constants[id(value)] = (value, fact)
        return known[1]

    def _contradicted(self, eqn: jaxprs.Eqn, known: Fact) -> None:
        self._contradictions.setdefault(id(eqn), Contradiction(eqn, known))


def _key(given: Mapping[Any, Guard]) -> frozenset[Any]:
    def plain(region: Region) -> frozenset[Any] | None:
        return None if region is None else frozenset(region.items())

    return frozenset((v, plain(g.false), plain(g.true)) for v, g in given.items())


def _reads(eqn: jaxprs.Eqn, those: set[Any]) -> bool:
    """Whether an equation reads one of ``those`` variables."""
    literal = jaxprs.LITERAL  # asked of nearly every equation of a rewritten program
    return not those.isdisjoint([a for a in eqn.invars if type(a) is not literal])


class _BodyAnalysis:
    """One pass over a body's equations."""

    def __init__(self, analysis: Analysis, result: BodyFacts) -> None:
        self.analysis = analysis
        self.result = result
        self.jaxpr = jaxprs.opened(result.body)
        self._producers: dict[Any, int] | None = None
        self._templates: dict[int, BodyFacts] = {}
        """Of each copy that was met, the facts of what it is a copy of."""
        self.crossing = Crossing(analysis, result, self._definition)
        self.guards = result.guards = self.crossing.guards

    def run(self, origin: BodyFacts | None = None) -> None:
        """Fill in the facts, taking over those of the body that this one was made from."""
        facts, jaxpr = self.result._facts, self.jaxpr
        known: dict[int, int] = {}
        inside: Mapping[int, dict[BodyKey, BodyFacts]] = {}
        if origin is not None:
            facts.update(origin._facts)
            known = {id(eqn): i for i, eqn in enumerate(jaxprs.opened(origin.body).eqns)}
            inside = origin._children
        consts = jaxprs.consts(self.result.body)
        if len(consts) == len(jaxpr.constvars):
            for var, value in zip(jaxpr.constvars, consts):
                facts[var] = self.analysis._constant(value, var.aval)
        facts.update(zip(jaxpr.invars, self.result.inputs))
        table, spliced = rules(), self.analysis._spliced
        related = {primitive(name) for name in ("select_n_p", "jit_p", "mul_p", "and_p")}
        better: set[Any] = set()  # variables of which more is known than before the rewrite
        for index, eqn in enumerate(jaxpr.eqns):
            before = known.get(id(eqn)) if known else None
            if before is not None and not (better and _reads(eqn, better)):
                if before in inside:
                    self.result._children[index] = inside[before]
                continue  # nearly all of a body that was rewritten
            copied = spliced.get(id(eqn)) if spliced else None
            old: Sequence[Any] = eqn.outvars
            if copied is not None:
                self._take_over(index, *copied)
                old = [v for v in eqn.outvars if v in copied[0].results]
            else:
                rule = table.get(eqn.primitive)
                if rule is not None:
                    self._apply(eqn, *rule)
                else:
                    self._descend(index, eqn)
                if eqn.primitive in related:
                    self._relate(eqn)
            if origin is not None:
                # The rewrite kept the value, and perhaps hid how it came about.
                for var in old:
                    was, now = origin._facts.get(var), facts.get(var)
                    if was is not None and (now is None or join(was, now) != was):
                        facts[var] = was
                    elif now is not None and now != was:
                        better.add(var)
        self.result.outputs = tuple(map(self.result.fact, jaxpr.outvars))

    def _take_over(self, index: int, splice: Splice, position: int) -> None:
        """The facts of the equation of which this one is a copy."""
        facts = self._templates.get(id(splice))
        if facts is None:
            given = [self.result.fact(a) for a in splice.operands]
            facts = self._templates[id(splice)] = self.analysis.enter(splice.template, given)
        for result, fact in self.analysis.found_in(facts).get(position, ()):
            self.result._facts[splice.eqns[position].outvars[result]] = fact
        if position in facts._children:
            self.result._children[index] = facts._children[position]

    def _apply(self, eqn: jaxprs.Eqn, rule: Any, is_source: bool) -> None:
        known, literal = self.result._facts, jaxprs.LITERAL  # nearly every equation comes here
        operands: list[Fact] = []
        for atom in eqn.invars:
            if type(atom) is literal:
                operands.append(_of_literal(atom))
            else:
                given = known.get(atom)
                operands.append(default_of(atom.aval) if given is None else given)
        if is_source:
            counts = limits(getattr(eqn.outvars[-1].aval, "dtype", None)) is not None
            if operands and not counts and all(f is UNKNOWN for f in operands):
                return
        elif all(f is UNKNOWN for f in operands):
            return
        if not is_static(eqn):
            return
        if eqn.primitive is assume_range_p and contradicts(eqn, operands):
            self.analysis._contradicted(eqn, operands[0])
        found = rule(eqn, operands)
        if isinstance(found, Fact):
            self.result._facts[eqn.outvars[0]] = found
        else:
            self.result._facts.update(zip(eqn.outvars, found))

    def _relate(self, eqn: jaxprs.Eqn) -> None:
        """Improves on the rules where several equations together tell more."""
        limit = limits(getattr(eqn.outvars[0].aval, "dtype", None)) if eqn.outvars else None
        if limit is None or limit == (0, 1) or not is_static(eqn):
            return
        result = eqn.outvars[0]
        axis = packed_order(eqn, self._producer, self.result.fact)
        if axis is not None:
            last = result.aval.shape[axis] - 1
            self.result._facts[result] = integer(result.aval, 0, max(last, 0), permutation=axis)
            return
        if eqn.primitive is primitive("mul_p"):
            better = self.guards.masked(eqn)
        else:
            better = None
            if limit[0] < 0:
                better = floor_divided(eqn, self._producer, self.result.fact)
            if better is None and eqn.primitive is primitive("select_n_p"):
                better = self.guards.chosen(eqn)
        if better is not None:
            known = self.result.fact(result)
            found = meet(known, result.aval, *better.range(result.aval.dtype))
            self.result._facts[result] = known if found is None else found

    def _producer(self, var: jaxprs.Var) -> Any:
        found = self._definition(var)
        return None if found is None else found[1]

    def _definition(self, var: jaxprs.Var) -> tuple[int, Any] | None:
        if self._producers is None:
            self._producers = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        index = self._producers.get(var)
        return None if index is None else (index, self.jaxpr.eqns[index])

    def _descend(self, index: int, eqn: jaxprs.Eqn) -> None:
        bodies = carried(eqn)
        if not bodies.entered:
            return
        operands = [self.result.fact(v) for v in eqn.invars]
        if any(entered.role is Role.LOOP for entered in bodies.entered):
            given = {id(e.body): self.crossing.given(eqn, e) for e in bodies.entered}
            enter = lambda body, facts: self.analysis.enter(body, facts, given[id(body)])
            children, outputs = loops.fixed_point(enter, eqn, bodies, operands)
        else:
            children, outputs = self._call(eqn, bodies, operands)
        self.result._children[index] = children
        for var, fact in zip(eqn.outvars, outputs):
            if fact is not None and fact is not UNKNOWN:
                self.result._facts[var] = fact

    def _call(
        self, eqn: jaxprs.Eqn, bodies: Carried, operands: Sequence[Fact]
    ) -> tuple[dict[BodyKey, BodyFacts], list[Fact | None]]:
        """Bodies that run once, or one of which runs: what all of them have in common."""
        children: dict[BodyKey, BodyFacts] = {}
        outputs: list[Fact | None] = [None] * len(eqn.outvars)
        for entered in bodies.entered:
            narrowed = operands
            if entered.role is Role.BRANCH:
                narrowed = self.crossing.in_branch(eqn, entered, len(bodies.entered), operands)
            given = self.crossing.given(eqn, entered)
            child = self.analysis.enter(entered.body, inflow(eqn, entered, narrowed), given)
            children[entered.key] = child
            for index, fact in outflow(eqn, entered, child.outputs):
                before = outputs[index]
                outputs[index] = fact if before is None else join(before, fact)
        return children, outputs


def _of_literal(atom: jaxprs.Literal) -> Fact:
    aval = atom.aval
    if getattr(aval, "shape", None) == ():  # nearly all of them
        return of_scalar(atom.val, aval)
    array = host_array(atom.val)
    if array is None or array.size > _MOST_ELEMENTS or not hasattr(aval, "shape"):
        return default_of(aval)
    return of_array(array, aval)
