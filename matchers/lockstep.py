"""Recognise parts cut from one array and run through the same chain of equations, in lock-step.

A chain is described as a tree of what it computes, in which the parts are one: of each kind of
equation that works along the axis independently there is one for all parts together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compat import jaxprs
from ..compat.bodies import Role
from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive
from .along import Axes, Stop, operand_axes, rules
from .chain import Call, Input, Node, Shared, Step
from .cuts import calls, custom, cut, made_by
from .graph import Scope, Value

Place = tuple[Scope, Atom]
_MOST = 400
"""Nodes of a chain after which no more is looked at."""


@dataclass
class Chain:
    """What the parts of one array are, taken together."""

    root: Node | None = None
    failure: Stop | None = None
    passed: set[tuple[int, int]] = field(default_factory=set)
    """Equations gone through, by scope and index; the cuts are not among them."""
    contexts: list[Eqn] = field(default_factory=list)


def chain_of(scope: Scope, atoms: Sequence[Atom], axis: int) -> Chain:
    """The chain that the ``atoms``, parts along ``axis``, come out of.

    Returns:
      Its ``root``, or the ``failure`` for which there is none.
    """
    found = Chain()
    sizes = tuple(int(a.aval.shape[axis]) for a in atoms)
    try:
        found.root = _Matcher(found, sizes).parts([(scope, a) for a in atoms], axis)
    except Stop as stop:
        found.failure = stop
    return found


class _Matcher:
    """Walks the producers of all parts at once."""

    def __init__(self, chain: Chain, sizes: tuple[int, ...], frames: Sequence[Scope] = ()) -> None:
        self.chain = chain
        self.sizes = sizes
        self.frames = tuple(frames)
        """For each part the body of the call that the walk is in."""
        self.input_axes: dict[int, int | None] = {}
        self._known: dict[Any, Node] = {}

    def parts(self, places: Sequence[Place], axis: int | None) -> Node:
        """The tree for values that are parts along ``axis``, or all equal."""
        places = [self._look(p) for p in places]
        key = (*((id(s), id(a)) for s, a in places), axis)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _MOST:
                raise Stop("too-long", f"more than {_MOST} equations", "a shorter chain")
            known = self._known[key] = self._parts(places, axis)
        return known

    def _parts(self, places: Sequence[Place], axis: int | None) -> Node:
        inputs = self._inputs(places)
        if inputs is not None:
            return self._input(inputs, axis)
        if axis is None:
            return self._shared(places)
        values = {_value(p) for p in places}
        eqns = [made_by(p) for p in places]
        if None in eqns:
            raise self._apart(places, values)
        made = [(s, i, r) for (s, _), (i, r) in zip(places, eqns, strict=True)]  # type: ignore[misc]
        equations = tuple(s.eqns[i] for s, i, _ in made)
        first = equations[0]
        if any(e.primitive is not first.primitive for e in equations):
            names = " and ".join(dict.fromkeys(e.primitive.name for e in equations))
            raise Stop("different-ops", names, "the same operations on every part")
        whole = cut(made, axis)
        if whole is not None:
            return whole
        if len(values) == 1 and first.primitive is not primitive("broadcast_in_dim_p"):
            raise Stop("equal-operand", f"a {first.outvars[0].aval.str_short()} for all alike",
                       "parts of a larger array, or a value equal along the axis")  # fmt: skip
        if first.primitive in custom():
            return self._call(made, equations, axis)
        if first.primitive is primitive("optimization_barrier_p"):
            return self._barrier(made, equations, axis)
        return self._step(made, equations, axis)

    def _look(self, place: Place) -> Place:
        """Through calls that say nothing of derivatives or shardings, up to the frame."""
        scope, atom = place
        while not jaxprs.is_literal(atom):
            found = scope.definition(atom)
            if found is None:
                if scope in self.frames:
                    break
            elif scope.eqns[found[0]].primitive not in calls():
                break
            else:
                self._pass(scope, found[0])
                _unsharded(scope.eqns[found[0]])
            step = scope.step(atom)
            if step is None:
                break
            scope, atom = step
        return scope, atom

    def _inputs(self, places: Sequence[Place]) -> list[int | None] | None:
        """Which inputs of the frames the places are; None where none of them is one."""
        if not self.frames:
            return None
        found = [
            None if s is not f or jaxprs.is_literal(a) or s.definition(a) else s.position(a)
            for (s, a), f in zip(places, self.frames, strict=True)
        ]
        return None if all(f is None for f in found) else found

    def _input(self, positions: Sequence[int | None], axis: int | None) -> Node:
        at = positions[0]
        if at is None or any(p != at for p in positions):
            raise Stop("operands", "another input of the call for another part", "the same input")
        if self.input_axes.setdefault(at, axis) != axis:
            raise Stop("operands", "one input of a call used along two axes", "along one")
        return Input(at)

    def _shared(self, places: Sequence[Place]) -> Node:
        values = {_value(p) for p in places}
        if len(values) == 1:
            return Shared(values.pop())
        made = [made_by(p) for p in places]
        if None in made:
            raise self._apart(places, values)
        eqns = tuple(s.eqns[m[0]] for (s, _), m in zip(places, made, strict=True) if m)
        first, result = eqns[0], made[0][1]  # type: ignore[index]
        try:
            self._alike(eqns, first.params)
            if first.primitive not in _plain() or len(eqns) != len(places):
                raise Stop("operands", f"results of {first.primitive.name}", "known operations")
            operands = self._each(places, made, eqns, (None,) * len(first.invars))
        except Stop as stop:
            raise _of_its_own(first, result, stop) from None
        return Step(eqns, operands, result, None, 0)

    def _apart(self, places: Sequence[Place], values: set[Value]) -> Stop:
        if len(values) == 1:
            return Stop("equal-operand", "one value for all parts", "parts of a larger array")
        what = " and ".join(dict.fromkeys(_describe(p) for p in places))
        return Stop("operands", what, "slices of one array, side by side, or one value for all")

    def _step(self, made: Any, eqns: tuple[Eqn, ...], axis: int) -> Node:
        axes = operand_axes(eqns[0], axis)
        for eqn in eqns[1:]:
            if operand_axes(eqn, axis) != axes:
                raise Stop("different-ops", f"{eqn.primitive.name} along different axes", "one")
        self._alike(eqns, _rest(eqns[0], axis), lambda e: _rest(e, axis))
        operands = self._each([(s, None) for s, _, _ in made], made, eqns, axes)
        return self._done(made, Step(eqns, operands, made[0][2], axis, sum(self.sizes)))

    def _each(self, places: Any, made: Any, eqns: tuple[Eqn, ...], axes: Axes) -> tuple[Node, ...]:
        del made
        scopes = [place[0] for place in places]
        return tuple(
            self.parts([(s, e.invars[i]) for s, e in zip(scopes, eqns, strict=True)], axis)
            for i, axis in enumerate(axes)
        )

    def _barrier(self, made: Any, eqns: tuple[Eqn, ...], axis: int) -> Node:
        scopes = [s for s, _, _ in made]
        if len({(id(s), id(e)) for s, e in zip(scopes, eqns, strict=True)}) == 1:
            # one barrier for all parts
            results = [r for _, _, r in made]
            if sorted(results) != list(range(len(eqns[0].invars))):
                raise Stop("barrier", f"a barrier of {len(eqns[0].invars)} values",
                           "a barrier of the parts and nothing else")  # fmt: skip
            atoms = [eqns[0].invars[r] for r in results]
            node = self.parts(list(zip(scopes, atoms, strict=True)), axis)
            return self._done(made, Step(eqns, (node,), 0, axis, sum(self.sizes)))
        if len({len(e.invars) for e in eqns}) > 1:
            raise Stop("barrier", "barriers of different numbers of values", "of equally many")
        self._alike(eqns, {}, lambda e: {})
        try:
            operands = self._each([(s, None) for s in scopes], made, eqns,
                                  (axis,) * len(eqns[0].invars))  # fmt: skip
        except Stop as stop:
            if len(eqns[0].invars) == 1:
                raise
            raise Stop("barrier", f"a barrier that ties a part to something else: {stop.found}",
                       "barriers of parts only") from None  # fmt: skip
        return self._done(made, Step(eqns, operands, made[0][2], axis, sum(self.sizes)))

    def _call(self, made: Any, eqns: tuple[Eqn, ...], axis: int) -> Node:
        first, result = eqns[0], made[0][2]
        results = [r for _, _, r in made]
        if any(r != result for r in results):
            one = len({(id(s), i) for s, i, _ in made}) == 1
            said = f"results {' and '.join(map(str, results))} of {'one' if one else 'a'} "
            raise Stop("together" if one else "different-ops", said + first.primitive.name,
                       "an operation for each part" if one else "the same result")  # fmt: skip
        inside = [s.inside(i) for s, i, _ in made]
        if any(found is None or found[1].role is not Role.CALL for found in inside):
            raise Stop("unsupported-op", first.primitive.name, "a call whose body is known")
        frames = [found[0] for found in inside if found is not None]
        below = _Matcher(self.chain, self.sizes, frames)
        outputs = [(f, jaxprs.opened(f.body).outvars[result]) for f in frames]
        inner = below.parts(outputs, axis)
        operands: list[Node | None] = []
        axes: list[int | None] = []
        for i in range(len(first.invars)):
            places = [(s, e.invars[i]) for (s, _, _), e in zip(made, eqns, strict=True)]
            at = below.input_axes.get(i)
            node = self.parts(places, at)
            literal = isinstance(node, Shared) and jaxprs.is_literal(node.value.atom)
            operands.append(None if literal else node)
            axes.append(at)
        call = Call(eqns, inner, tuple(operands), tuple(axes), result, axis, self.sizes)
        return self._done(made, call)

    def _done(self, made: Any, node: Node) -> Node:
        for scope, index, _ in made:
            self._pass(scope, index)
        self.chain.contexts.append(made[0][0].eqns[made[0][1]])
        return node

    def _pass(self, scope: Scope, index: int) -> None:
        if scope.is_kept(index):
            raise Stop("kept", scope.eqns[index].primitive.name, "equations that may be changed")
        self.chain.passed.add((id(scope), index))

    def _alike(self, eqns: Sequence[Eqn], first: Any, of: Any = lambda e: e.params) -> None:
        for eqn in eqns[1:]:
            if eqn.primitive is not eqns[0].primitive:
                raise Stop("different-ops", f"{eqns[0].primitive.name} and {eqn.primitive.name}",
                           "the same operations on every part")  # fmt: skip
            if len(eqn.invars) != len(eqns[0].invars) or of(eqn) != first:
                raise Stop("different-params", _difference(first, of(eqn)),
                           f"the same {eqn.primitive.name} on every part")  # fmt: skip
            if eqn.ctx != eqns[0].ctx:
                raise Stop("context", "equations traced in different contexts", "one context")


def _of_its_own(eqn: Eqn, result: int, stop: Stop) -> Stop:
    """That a value which all parts should share differs; said once, however far up the cause is."""
    through = (*stop.through, eqn.primitive.name)
    cause = stop.found.partition(_CAUSE)[2] if stop.through else stop.found
    what = f"{eqn.outvars[result].aval.str_short(short_dtypes=True)} of each part's own"
    return Stop("operands", f"{what}, by way of {' → '.join(through)}{_CAUSE}{cause}",
                "one value for all parts", through)  # fmt: skip


_CAUSE = ", where the parts differ in "


@functools.cache
def _plain() -> frozenset[Any]:
    """What gives equal results for equal operands."""
    return frozenset({*rules(), primitive("iota_p"), primitive("pvary_p")}) - {None}


def _rest(eqn: Eqn, axis: int) -> dict[str, Any]:
    """The params of an equation but for sizes along the axis, which are the parts' own."""
    params = dict(eqn.params)
    for name in ("shape", "new_sizes", "start_indices", "limit_indices"):
        if name in params:
            params[name] = (*params[name][:axis], *params[name][axis + 1 :])
    return params


def _difference(first: Any, other: Any) -> str:
    names = [n for n in first if first[n] != other.get(n)]
    return ", ".join(f"{n} {first[n]!r} and {other.get(n)!r}" for n in names) or "other operands"


def _unsharded(eqn: Eqn) -> None:
    """A call with shardings of its own isn't seen through."""
    for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
        for given in eqn.params.get(name, ()):
            if given is not None and type(given).__name__ != "UnspecifiedValue":
                raise Stop("sharding", f"a call with {name} of its own", "a call without")


def _value(place: Place) -> Value:
    return Value(*place)


def _describe(place: Place) -> str:
    scope, atom = place
    if jaxprs.is_literal(atom):
        return f"the literal {atom.val}"
    found = scope.definition(atom)
    short: str = atom.aval.str_short()
    return (
        f"an input {short}" if found is None else f"{scope.eqns[found[0]].primitive.name} {short}"
    )
