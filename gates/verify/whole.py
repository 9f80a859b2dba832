"""Run a whole program against what a pass that judges it as a whole left of it.

Nothing is put in place of what such a pass takes out, so there is no site to cut: all outputs must
stay what they are, but for those that the user declared frozen, which must be zeros. Both programs
are run equation by equation, loops included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.bodies import scan_counts
from ...compat.jaxprs import Body, Eqn
from ...compat.primitives import primitive
from ...compat.tracing import named_axes
from ...matchers.fact import UNKNOWN, Fact
from ...passes.base import Contract, Pass
from ...passes.engine.rewrite import rewrite
from ...passes.frozen import Request
from .check import Limits, first_line
from .compare import difference
from .devices import mapped
from .evaluate import Unrunnable, evaluate, is_float
from .inputs import Input, NoInputs, Theme, make
from .problem import cost
from .themes import EXACT, FINITE
from .verdict import Checked, Counterexample, MutantScore, Verdict

Array = Any
MOST_ITERATIONS = 4096


@dataclass
class WholeProgram:
    """A program and the pass that judged it."""

    rewrite: Pass
    before: Body
    request: Request
    known: Checked | None = None
    _after: Body | None = field(default=None, repr=False)

    @property
    def after(self) -> Body:
        """What the pass leaves of the program."""
        if self._after is None:
            self._after = rewrite(self.before, [self.rewrite], request=self.request).closed
        return self._after

    def checked(self, limits: Limits) -> Checked:
        """Whether the outputs stay; the same for every site of the pass."""
        if self.known is None:
            try:
                self.known = self._checked(limits)
            except (Unrunnable, NoInputs) as error:
                self.known = Checked(Verdict.UNKNOWN, f"the program can't be run whole: {error}")
            except Exception as error:
                why = f"{type(error).__name__}: {first_line(error)}"
                self.known = Checked(Verdict.UNKNOWN, f"the program can't be run whole: {why}")
        return self.known

    def _checked(self, limits: Limits) -> Checked:
        jaxpr = jaxprs.opened(self.before)
        work, size = cost(jaxpr.eqns)
        size += sum(v.aval.size * v.aval.dtype.itemsize for v in jaxpr.invars)
        for name, found, most in (("bytes", size, limits.bytes), ("operations", work, limits.work)):
            if found > most:
                raise Unrunnable(f"it takes {found:,} {name}, above the limit of {most:,}")
        runs, end = 0, time.monotonic() + limits.seconds
        for theme, arrays in self._filled(limits.seeds):
            before, after = (run(b, arrays) for b in (self.before, self.after))
            place = self.differs(before, after)
            runs += 1
            if place is not None:
                example = Counterexample(theme.name, place, tuple(arrays))
                why = f"an output of the program differs ({theme.name}): {place}"
                return Checked(Verdict.VIOLATION, why, counterexample=example)
            if time.monotonic() > end:
                break
        if not runs:
            return Checked(Verdict.UNKNOWN, "no input was run")
        types = tuple(v.aval.str_short(short_dtypes=True) for v in jaxpr.invars)
        return Checked(Verdict.VERIFIED, runs=runs, shapes=types, notes=("the program whole",))

    def _filled(self, seeds: int) -> Any:
        jaxpr = jaxprs.opened(self.before)
        most = max((n for v in jaxpr.invars for n in v.aval.shape), default=0)
        kinds = [(tuple(v.aval.shape), v.aval.dtype) for v in jaxpr.invars]
        # A token beyond its table would make everything a NaN, in which nothing is seen.
        within = [Input(*kind, _index(kind[1]), most=most) for kind in kinds]
        anything = [Input(*kind, UNKNOWN, most=most) for kind in kinds]
        # A mask by multiplication is one only of what is finite, which was then stated.
        themes: Sequence[Theme] = FINITE if self.request.finite_grads else EXACT
        for seed in range(seeds):
            for theme in themes:
                yield theme, make(theme, anything if seed % 2 else within, seed)

    def differs(self, before: list[Array], after: list[Array]) -> str | None:
        """Where an output that must stay doesn't, or one that is frozen isn't zero."""
        declared = {leaf.output for leaf in self.request.leaves}
        contract = Contract.VALUE if self.request.finite_grads else Contract.BITWISE
        for i, (b, a) in enumerate(zip(before, after, strict=True)):
            zero = np.zeros_like(b) if i in declared else b
            place = difference([zero], [a], contract, i not in declared)
            if place is not None:
                name = self.request.outputs[i] if i < len(self.request.outputs) else ""
                return f"output {i} {name}: {place}".replace("output 0[", "[")
        return None

    def scores(self, limits: Limits) -> tuple[MutantScore, ...]:
        """Programs in which the pass took out more than it did, and one in which a leaf shrank."""
        if self.checked(limits).verdict is not Verdict.VERIFIED:
            return ()
        found = []
        outs = jaxprs.opened(self.before).outvars
        declared = {leaf.output for leaf in self.request.leaves}
        changes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
            ("frozen, too", np.zeros_like),
            ("shrunk by 0.5 %", lambda x: (x.astype(np.float32) * 0.995).astype(x.dtype)),
        )
        runs = [[run(b, arrays) for b in (self.before, self.after)]
                for _, arrays in self._filled(1)]  # fmt: skip
        for i, out in enumerate(outs):
            if i in declared or not is_float(out.aval.dtype):
                continue
            idle = all(not np.any(before[i]) for before, _ in runs)
            for name, change in changes:
                broken = [[change(a) if j == i else a for j, a in enumerate(after)]
                          for _, after in runs]  # fmt: skip
                killed = any(self.differs(b[0], a) for b, a in zip(runs, broken, strict=True))
                how = "an output of the program" if killed else f"the same in {len(runs)} runs"
                if idle:
                    how = "the output is zero in every run, as it is masked"
                found.append(MutantScore(f"output {i} {name}", killed, how, idle and not killed))
        return tuple(found)


def arguments(body: Body, leaves: Sequence[Any], seeds: int) -> tuple[list[list[Array]], bool]:
    """Arguments to run a program on, and whether they are made up: no arrays were given."""
    invars = jaxprs.opened(body).invars
    arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray | np.generic)]
    kinds = [(tuple(v.aval.shape), v.aval.dtype) for v in invars]
    # What is neither array nor shape is part of the program, and no input of it.
    if [(tuple(np.shape(a)), a.dtype) for a in arrays] == kinds:
        return [[np.asarray(a) for a in arrays]], False
    inputs = [Input(*kind, _index(kind[1])) for kind in kinds]
    return [make(theme, inputs, seed) for seed in range(seeds) for theme in FINITE[:3]], True


def _index(dtype: Any) -> Fact:
    """Integers that are places in any array of four elements."""
    return Fact(0, 3) if jnp.issubdtype(dtype, jnp.integer) else UNKNOWN


def run(
    body: Body, arrays: Sequence[Array], watch: Callable[[Any, Any], None] | None = None
) -> list[Array]:
    """A program's outputs, equation by equation; ``watch`` is told of every value on the way.

    Raises:
        Unrunnable: a part of it can't be run so.
    """
    jaxpr = jaxprs.opened(body)
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    values = [*jaxprs.consts(body), *map(jnp.asarray, arrays)]
    rule = lambda eqn, operands: _stepwise(eqn, operands, watch)
    outs = evaluate(jaxpr.eqns, inputs, jaxpr.outvars, values, rule, watch=watch)
    return [np.asarray(v) for v in outs]


def _mapped(
    eqn: Eqn, operands: Sequence[Any], watch: Callable[[Any, Any], None] | None
) -> Sequence[Any]:
    """A shard_map, on as many devices of this host."""
    if watch is not None or named_axes():
        raise Unrunnable("a shard_map whose values are one device's")
    (entered,) = compat_bodies.carried(eqn).entered
    jaxpr = jaxprs.opened(entered.body)
    inputs = (*jaxpr.constvars, *jaxpr.invars)

    def body(*parts: Any) -> Sequence[Any]:
        values = [*jaxprs.consts(entered.body), *parts]
        rule = lambda inner, given: _stepwise(inner, given, None)
        return evaluate(jaxpr.eqns, inputs, jaxpr.outvars, values, rule)

    return mapped(eqn, operands, body)


def _stepwise(
    eqn: Eqn, operands: Sequence[Any], watch: Callable[[Any, Any], None] | None
) -> Sequence[Any] | None:
    """A scan, one iteration after the other."""
    if eqn.primitive is compat_bodies.shard_map_primitive():
        return _mapped(eqn, operands, watch)
    if jaxprs.true_effects(eqn):
        raise Unrunnable(f"{eqn.primitive.name} has effects")
    entered = compat_bodies.carried(eqn).entered
    if eqn.primitive is not primitive("scan_p"):
        if any(e.role is compat_bodies.Role.LOOP for e in entered):
            raise Unrunnable(f"{eqn.primitive.name} isn't run step by step")
        return None
    consts, carry, _, ys = scan_counts(eqn)
    length = eqn.params["length"]
    if not isinstance(length, int) or not 0 < length <= MOST_ITERATIONS:
        raise Unrunnable(f"a scan of {length} iterations")
    fixed, state = list(operands[:consts]), list(operands[consts : consts + carry])
    xs, made = operands[consts + carry :], [[None] * length for _ in range(ys)]
    jaxpr = jaxprs.opened(entered[0].body)
    given = list(jaxprs.consts(entered[0].body))
    order = reversed(range(length)) if eqn.params["reverse"] else range(length)
    for step in order:
        values = [*given, *fixed, *state, *(x[step] for x in xs)]
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        rule = lambda inner, given: _stepwise(inner, given, watch)
        outs = evaluate(jaxpr.eqns, inputs, jaxpr.outvars, values, rule, watch=watch)
        state = outs[:carry]
        for i, y in enumerate(outs[carry:]):
            made[i][step] = y
    return [*state, *(jnp.stack(column) for column in made)]
