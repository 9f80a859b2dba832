"""Mutants of the rewrites: each must be caught by the very verification that the rewrite passed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ...passes.base import Contract
from .check import Level, Limits, run
from .equivalents import known
from .evaluate import Unrunnable, bind
from .inputs import NoInputs
from .operators import Mutation, mutations
from .problem import Problem, build
from .record import Piece
from .verdict import MutantScore

MOST = 24
"""Generated mutants of one site, about."""


@dataclass
class _Watch:
    """Runs a mutation, and notes whether it ever changed a value."""

    mutation: Mutation
    blind: bool
    """Whether values are never seen, as where devices talk: then none counts as unchanged."""
    differed: bool = False

    def rule(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
        if eqn is not self.mutation.eqn or self.mutation.run is None:
            return None
        changed = self.mutation.run(eqn, list(operands))
        self._compare(changed, None if self.differed else bind(eqn, operands))
        return changed

    def watched(self) -> Mutation:
        """The mutation, noting what its changes to inputs and outputs did."""
        changes = {
            n: self._noting(change)
            for n in ("inputs", "outputs")
            if (change := getattr(self.mutation, n)) is not None
        }
        return replace(self.mutation, **changes)

    def _noting(self, change: Any) -> Any:
        def noted(values: list[Any]) -> list[Any]:
            changed: list[Any] = change(values)
            self._compare(changed, values)
            return changed

        return noted

    def _compare(self, changed: Sequence[Any], plain: Sequence[Any] | None) -> None:
        for a, b in () if plain is None or self.differed else zip(changed, plain, strict=True):
            try:
                self.differed |= np.asarray(a).tobytes() != np.asarray(b).tobytes()
            except jax.errors.TracerArrayConversionError:
                self.differed |= self.blind  # a derivative is taken: values were compared before


@dataclass(frozen=True)
class Mutants:
    """The mutants of one site, and what they are run by."""

    piece: Piece
    own: Mapping[str, Piece]
    """The pass's own."""
    contract: Contract
    level: Level
    limits: Limits

    def scores(self) -> Iterator[MutantScore]:
        """What became of each."""
        for name, piece in self.own.items():
            problem = build(piece, *self.level)
            yield self._score(name, problem, None)
        problem = build(self.piece, *self.level)
        for mutation in mutations(problem.after, self.piece.after.eqns, MOST):
            watch = _Watch(mutation, problem.across)
            changed = replace(problem, mutation=watch.watched(), rule=watch.rule, compiled={})
            if self._viable(changed):
                yield self._score(mutation.name, changed, watch)

    def _viable(self, changed: Problem) -> bool:
        """Whether a mutant has the types of what it was made of."""
        part, wanted = changed.after, [a.aval for a in changed.after.outputs]
        if changed.across:
            return changed.mutation is None or changed.mutation.eqn is None
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in part.inputs]
        try:
            with changed.context():
                found = jax.eval_shape(lambda *vs: changed.values(part, vs), *args)
        except Exception:
            return False
        kinds = [(tuple(f.shape), f.dtype) for f in found]
        return kinds == [(tuple(a.shape), a.dtype) for a in wanted]

    def _score(self, name: str, problem: Problem, watch: _Watch | None) -> MutantScore:
        if watch is not None:
            watch.differed = False
        end = time.monotonic() + self.limits.seconds
        try:
            broken, tally = run(problem, self.contract, self.limits, end)
        except (Unrunnable, NoInputs) as error:
            return MutantScore(name, False, f"it could not be run: {error}")
        if broken is not None:
            return MutantScore(name, True, f"{broken.of} on {broken.theme}")
        if watch is not None and watch.mutation.guard and not watch.differed:
            how = f"it changed no value in {tally.runs} runs: there is nothing to keep or to round"
            return MutantScore(name, False, how, equivalent=True)
        why = known(problem, name)
        if why is not None:
            return MutantScore(name, False, why, equivalent=True)
        return MutantScore(name, False, f"the same in {tally.runs} runs")
