"""Which gradients are frozen, which of these something reads first, and what each costs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...compat import jaxprs
from ...compat.jaxprs import Eqn, Var
from ...compat.kernel_parts import is_kernel, without
from ...compat.primitives import primitive
from ...compat.source import call_stack
from ...matchers.dataflow import Dataflow
from ...matchers.demand import Demand, Demands
from ...matchers.graph import Scope
from ...matchers.idle import none_idle
from ...matchers.unchanged import unchanged
from ...matchers.value_walk import Place, Walk, Walker, backward
from ...matchers.weight_gradient import (
    Parameters,
    is_transposed,
    makers,
    shapes,
    transposed_kernels,
    transposed_makers,
)
from ..frozen import Declared, Request
from .frozen_cost import Spent, spent
from .frozen_masks import Cutter, any_mask, masks
from .frozen_told import Told

READERS_SHOWN = 3


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter that is frozen, or looks so."""

    path: str | None
    """In the user's tree; None where it isn't clear whose gradient it is."""
    declared: bool
    places: tuple[Place, ...]
    """The equations that make it; empty where there are none to be found."""
    values: tuple[tuple[Scope, Var], ...] = ()
    """The results of these that are its parts; all of them where there is nothing here."""
    dropped: bool = False
    """Whether nothing needs it any more."""
    readers: tuple[str, ...] = ()
    """What reads it, where something does."""
    times_zero: str | None = None
    """The line at which it is multiplied by zero, and nothing else is done with it."""
    kernel: str = ""
    """Why the kernel that makes it, and something that is needed, can't do without it."""
    found: str = ""
    """What stands in a declared output that holds no gradient."""
    cost: Spent = field(default_factory=Spent)


@dataclass(frozen=True)
class Judged:
    """All frozen gradients of a program."""

    gradients: tuple[Gradient, ...]
    demand: Demand
    """What the program needs without them."""


def judge(flow: Dataflow, request: Request) -> Judged | None:
    """Judge a program; None where it has no backward pass and nothing is declared."""
    if not flow.root.eqns:
        return None
    if request.again and not any_mask(flow) and none_idle(flow, makers()):
        return None  # what nothing needs in the end is what nothing reads at all, which is gone
    made, kernels = transposed_makers(flow), transposed_kernels(flow)
    if not (made or kernels or request.leaves):
        return None
    return _Judge(flow, request, made, kernels).run()


class _Judge:
    def __init__(
        self, flow: Dataflow, request: Request, made: list[Place], kernels: list[Place]
    ) -> None:
        self.root = flow.root
        self.flow = flow
        self.request = request
        self.made = made
        self.walker = Walker()
        self.cutter = Cutter(lambda: self.walker.onward(_results(self._starts())).values)
        self.kernels = kernels
        self.demands = self._demands()
        self.unchanged = unchanged(self.root)
        self.everything = (True,) * len(jaxprs.opened(self.root.body).outvars)

    @functools.cached_property
    def parameters(self) -> Parameters:
        """Read once it is asked of what parameter a gradient is, as of most programs it isn't."""
        return Parameters.of(self.flow)

    def _starts(self) -> list[Place]:
        """What makes gradients, those of biases and scales included."""
        sums = [
            (scope, index)
            for scope in self.flow.scopes
            for index, eqn in enumerate(scope.eqns)
            if eqn.primitive is primitive("reduce_sum_p") and is_transposed(scope, index)
        ]
        return self.made + sums + self.kernels

    def _demands(self, given_up: frozenset[Var] = frozenset()) -> Demands:
        cut = lambda s, i: self.cutter.cut(s, i, self.request.finite_grads)
        return Demands(cut, masks(), given_up)

    def run(self) -> Judged:
        declared, told = self._declared()
        of_kernels, told = self._of_kernels(declared, told)
        found = [*declared, *of_kernels]
        claimed = {_key(p) for g in declared for p in g.places}
        rest = [p for p in self.made if _key(p) not in claimed]
        needed = [p for p in rest if not told.dead(p)]
        named = any(g.dropped for g in declared)
        evident = [p for p in rest if told.dead(p) and self._is_evident(p)]
        masked = self._grouped(evident, told, dropped=True)
        found += [g for g in masked if g.path is not None or not named]
        if self.cutter.zeros and not self.request.finite_grads:
            found += self._times_zero(needed, told)
        known = {g.path for g in found}
        for gradient in self._returned_unchanged(needed, told):
            if gradient.path not in known:
                found.append(gradient)
        return Judged(tuple(found), told.demand)

    # --- declared ---------------------------------------------------------------------------

    def _declared(self) -> tuple[list[Gradient], Told]:
        found: dict[int, tuple[Declared, Gradient]] = {}
        for leaf in self.request.leaves:
            found[leaf.output] = leaf, self._traced_back(leaf)
        zeroed = frozenset(o for o, (_, g) in found.items() if not g.found)
        while True:
            told = self._told(self.demands, zeroed)
            if not zeroed:
                break
            # Of a body that several calls share, one that can do without is taken for this one.
            kept = {o for o in zeroed if not _is_gone(found[o][1], told)}
            if not kept:
                break
            for o in kept:
                leaf, gradient = found[o]
                found[o] = leaf, replace(gradient, kernel=_stuck(gradient, told))
            zeroed -= kept  # what these keep alive may be what others are made of
        gradients = [
            self._finished(
                gradient, told, output in zeroed, but=(output,)
            ) if not gradient.found else gradient
            for output, (_, gradient) in found.items()
        ]  # fmt: skip
        return gradients, told

    def _told(self, demands: Demands, zeroed: frozenset[int]) -> Told:
        return Told(demands.of(self.root, self.everything, zeroed))

    def _traced_back(self, leaf: Declared) -> Gradient:
        atom = jaxprs.opened(self.root.body).outvars[leaf.output]
        sources, inputs = backward(self.root, atom)
        places = dict.fromkeys((s, s.definition(v)[0]) for s, v in sources)  # type: ignore[index]
        gradient = Gradient(leaf.path, True, tuple(places), tuple(sources))
        if not sources:
            what = "an argument of the function" if inputs else "a constant"
            return replace(gradient, found=what)
        for scope, index in places:
            eqn = scope.eqns[index]
            by_hand = leaf.told_where and eqn.primitive in makers()
            if not by_hand and not is_transposed(scope, index):
                where = _place_of(scope, index)
                found = f"what {eqn.primitive.name} makes at {where}, in no backward pass"
                return replace(gradient, found=found)
        for position in inputs:
            read = self.walker.onward([(self.root, jaxprs.invars(self.root.body)[position])])
            if read.readers:
                name = self._input(position)
                return replace(gradient, found=f"a sum with {name}, which is read elsewhere too")
        return gradient

    # --- recognised -------------------------------------------------------------------------

    def _is_evident(self, place: Place) -> bool:
        """Whether what nothing needs is a parameter's gradient: it may as well be a cotangent.

        A mask says so, or that jax transposed a product with a parameter. A product of a
        `jax.custom_vjp`'s is of unknown descent: a parameter of its shape is to be returned as it
        was. In the forward pass of an outer derivative, much is left unread by jax itself.
        """
        walk = self.walker.onward(_results([place]))
        if any(self.cutter.cut(s, i, True) is not None for s, i in walk.passed):
            return True
        scope, index = place
        stack = scope.name_stack(scope.eqns[index])
        if 0 <= stack.find("jvp(") < stack.find("transpose("):
            return False
        if self.parameters.behind(place):
            return True
        if any(is_transposed(*reader) for reader in walk.readers):
            return False
        inputs = jaxprs.invars(self.root.body)
        kept = [sorted(inputs[position].aval.shape) for position in self.unchanged]
        return any(shape in kept for shape in shapes(scope.eqns[index]))

    def _of_kernels(self, declared: Sequence[Gradient], told: Told) -> tuple[list[Gradient], Told]:
        """Results of a backward pass's kernels that are masked, or that nothing reads at all.

        The latter are gradients where a parameter of their shape is returned as it was.
        """
        known = {v for g in declared for _, v in g.values}
        found = [
            Gradient(path, False, ((scope, index),), ((scope, var),))
            for scope, index in self.kernels
            for var in scope.eqns[index].outvars
            if var not in known
            and all(d and index in d.live and var not in d.read for d in told.of(scope) or [None])
            for path in self._parameter_of(scope, var)
        ]
        if found:
            self.demands = self._demands(frozenset(v for g in found for _, v in g.values))
            told = self._told(self.demands, told.demand.zeroed)
        named = any(g.dropped for g in declared)
        gradients = [
            self._finished(
                replace(g, kernel=_stuck(g, told)), told, dropped=_is_gone(g, told)
            )
            for g in found
            if g.path is not None or not named
        ]  # fmt: skip
        return gradients, told

    def _parameter_of(self, scope: Scope, var: Var) -> Iterator[str | None]:
        """The parameter whose gradient a result of a kernel seems to be; nothing if it is none."""
        inputs, shape = jaxprs.invars(self.root.body), sorted(var.aval.shape)
        alike = [p for p in self.unchanged if sorted(inputs[p].aval.shape) == shape]
        walk = self.walker.onward([(scope, var)])
        if alike or any(self.cutter.cut(s, i, True) is not None for s, i in walk.passed):
            yield self._input(alike[0]) if len(alike) == 1 else None

    def _grouped(self, places: Sequence[Place], told: Told, dropped: bool) -> list[Gradient]:
        """A gradient for each parameter; what is of none goes along with them."""
        groups: dict[tuple[int, ...], list[Place]] = {}
        for place in places:
            groups.setdefault(tuple(self.parameters.behind(place)), []).append(place)
        if len(groups) > 1:
            groups.pop((), None)
        found: list[Gradient] = []
        for inputs, group in groups.items():
            path = " or ".join(map(self._input, inputs)) or None
            several = [group] if inputs else [[p] for p in group]
            found += [
                self._finished(Gradient(path, False, tuple(one)), told, dropped) for one in several
            ]
        return found

    def _times_zero(self, places: Sequence[Place], told: Told) -> list[Gradient]:
        assuming = Demands(lambda s, i: self.cutter.cut(s, i, True), masks())
        without = self._told(assuming, told.demand.zeroed)
        line = _place_of(*self.cutter.zeros[0])
        evident = [p for p in places if without.dead(p) and self._is_evident(p)]
        gradients = self._grouped(evident, told, dropped=False)
        return [replace(g, times_zero=line, readers=()) for g in gradients]

    def _returned_unchanged(self, places: Sequence[Place], told: Told) -> list[Gradient]:
        """Gradients of parameters that come out as they went in, though something reads them."""
        if not self.unchanged:
            return []
        behind = {i for p in self.made for i in self.parameters.behind(p)}
        if not any(self.unchanged.values()) and behind <= set(self.unchanged):
            return []  # this is no step: it returns all parameters as they are
        mine = [p for p in places if set(self.parameters.behind(p)) & set(self.unchanged)]
        gradients = self._grouped(mine, told, dropped=False) if mine else []
        read = [g for g in gradients if g.path is not None and self._is_read_first(g, told)]
        return [g if g.readers else replace(g, readers=self._kept_in(g)) for g in read]

    def _kept_in(self, gradient: Gradient) -> tuple[str, ...]:
        """The outputs that hold a gradient, or a sum of it over several calls."""
        outputs = self.walker.onward(_results(gradient.places)).outputs
        return tuple(f"the output {self._output(o)}" for o in outputs)

    def _is_read_first(self, gradient: Gradient, told: Told) -> bool:
        """Whether a gradient is read, and seems to be masked afterwards.

        It isn't where the program returns it, and the parameter as it is. One that is returned as
        a sum over steps, and its parameter with zero added, is: the sum is read in a later step.
        """
        walk = self.walker.onward(_results(gradient.places))
        of = {i for p in gradient.places for i in self.parameters.behind(p)}
        updated = any(self.unchanged.get(i, False) for i in of)
        if updated and walk.outputs:
            return True
        return any(map(told.live, walk.readers)) and not walk.outputs

    # --- both -------------------------------------------------------------------------------

    def _finished(
        self, gradient: Gradient, told: Told, dropped: bool, but: Iterable[int] = ()
    ) -> Gradient:
        walk = self.walker.onward(gradient.values or _results(gradient.places))
        passed = [p for p in walk.passed if told.dead(p) or not dropped]
        carries = [c for c in walk.carries if not dropped or told.carry_dropped(c)]
        readers = () if dropped else self._readers(walk, told, frozenset(but))
        return replace(
            gradient,
            dropped=dropped,
            readers=readers,
            cost=spent(
                gradient.places, passed, carries, lambda place: _left(gradient, place, dropped)
            ),
        )

    def _readers(self, walk: Walk, told: Told, but: frozenset[int]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for scope, index in walk.readers:
            if told.live((scope, index)):
                eqn = scope.eqns[index]
                found[f"{eqn.primitive.name} at {_place_of(scope, index)}"] = None
        if self.request.leaves:
            others = [o for o in walk.outputs if o not in but]
            found.update((f"the output {self._output(o)}", None) for o in others)
        return tuple(found)

    def _input(self, position: int) -> str:
        names = self.request.inputs
        return names[position] if position < len(names) else f"argument {position}"

    def _output(self, position: int) -> str:
        names = self.request.outputs
        return names[position] if position < len(names) else str(position)


def _place_of(scope: Scope, index: int) -> str:
    """An equation's line; where a library wrote it, also the line of the user that called it."""
    eqn = scope.eqns[index]
    line = scope.source_line(eqn)
    stack = [(file, number) for file, number, _ in call_stack(eqn)]
    installed = [re.search(r"/(site|dist)-packages/", file) is not None for file, _ in stack]
    if not installed or not installed[0] or all(installed):
        return line or "unknown line"
    file, number = stack[installed.index(False)]
    return f"{line}, called at {file}:{number}"


def _key(place: Place) -> tuple[int, int]:
    return id(place[0]), place[1]


def _results(places: Iterable[Place]) -> list[tuple[Scope, Var]]:
    return [(scope, v) for scope, index in places for v in scope.eqns[index].outvars]


def _is_gone(gradient: Gradient, told: Told) -> bool:
    """Whether nothing makes a gradient any more, as far as the equations go that made it."""

    def gone(scope: Scope, var: Var) -> bool:
        place = scope.definition(var)
        assert place is not None  # the walk ended at what makes it
        return told.unmade(scope, *place)

    return all(gone(scope, var) for scope, var in gradient.values)


def _left(gradient: Gradient, place: Place, dropped: bool) -> Eqn | None:
    """What is left of a kernel without a gradient alone; all of it, where it makes it still."""
    scope, index = place
    eqn = scope.eqns[index]
    if not is_kernel(eqn):
        return None
    mine = {var for s, var in gradient.values or _results([place]) if s is scope}
    needed = [v not in mine for v in eqn.outvars]
    if not any(needed):
        return None
    left = without(eqn, needed) if dropped else "it is needed"
    return eqn if isinstance(left, str) else left.eqn


def _stuck(gradient: Gradient, told: Told) -> str:
    """Why a kernel goes on making a gradient."""
    said = (
        d.whole[index]
        for scope, index in gradient.places
        for d in told.of(scope)
        if d is not None and index in d.whole
    )
    return next(said, "")
