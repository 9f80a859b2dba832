"""Derivatives of both sides of a site, by `jax.vjp`, as an outer ``grad`` would take them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...compat.primitives import primitive
from ...passes.engine.fragments import Cut
from .evaluate import Unrunnable, is_float
from .problem import Problem, walk

Array = Any


@dataclass(frozen=True)
class Derivative:
    """The derivatives of a problem's floating point outputs by its floating point inputs."""

    problem: Problem
    slots: tuple[int, ...]
    """The inputs."""
    outputs: tuple[int, ...]
    real: bool = False
    """Whether cotangents are real numbers; else they are small integers."""

    def both(self, arrays: Sequence[Array]) -> tuple[list[Array], list[Array] | str]:
        """Of both sides, at some inputs and cotangents made from these; a failure of the second."""
        before = self.of(self.problem.before, arrays)
        try:
            return before, self.of(self.problem.after, arrays)
        except Unrunnable:
            raise
        except Exception as error:
            line = next((s for s in str(error).splitlines() if s.strip()), "")
            return before, f"the rewrite's derivative fails: {type(error).__name__}: {line[:200]}"

    def of(self, part: Cut, arrays: Sequence[Array]) -> list[Array]:
        """Of one side."""
        with self.problem.context():
            run = lambda values: self.problem.values(part, values, differentiated=True)
            return self._vjp(run, [jnp.asarray(a) for a in arrays], _seed_of(arrays))

    def exactly(self, arrays: Sequence[Array]) -> list[Array]:
        """Of what stood there, in float64.

        Raises:
            Unrunnable: it has a derivative rule of its own, or depends on representations.
        """
        part = self.problem.before
        if any(e.primitive is primitive("custom_vjp_call_p") for e in walk(part.eqns)):
            raise Unrunnable("it has a derivative of its own, which is in its own precision")
        with self.problem.context(wide=True):
            values = [
                jnp.asarray(a, jnp.float64 if i in self.slots else None)
                for i, a in enumerate(arrays)
            ]
            return self._vjp(self.problem.wide_values, values, _seed_of(arrays))

    def _vjp(
        self, run: Callable[[Sequence[Any]], list[Any]], values: list[Any], seed: int
    ) -> list[Array]:
        def floats(*given: Any) -> list[Any]:
            filled = list(values)
            for slot, value in zip(self.slots, given, strict=True):
                filled[slot] = value
            outs = run(filled)
            return [outs[i] for i in self.outputs]

        primal, pull = jax.vjp(floats, *(values[i] for i in self.slots))
        return [np.asarray(g) for g in pull(self._cotangents(primal, seed))]

    def _cotangents(self, primal: Sequence[Any], seed: int) -> list[Any]:
        if not self.real:
            return [_cotangent(i, v) for i, v in enumerate(primal)]
        types = [self.problem.before.outputs[i].aval.dtype for i in self.outputs]
        return [_real(i, v, t, seed) for i, (v, t) in enumerate(zip(primal, types, strict=True))]


def _seed_of(arrays: Sequence[Array]) -> int:
    """Another one for other inputs, so that errors are averaged over cotangents as well."""
    return zlib.crc32(b"".join(np.asarray(a).tobytes() for a in arrays))


def _real(i: int, value: Any, dtype: Any, seed: int) -> Any:
    """Normal numbers of an output's type in the program, also where more precise ones are taken."""
    rng = np.random.default_rng([7, i, int(np.prod(value.shape)), seed])
    found = rng.standard_normal(value.shape).astype(np.float32)
    return jnp.asarray(found.astype(dtype), value.dtype)


def _cotangent(seed: int, value: Any) -> Any:
    """Small integers, the same for both sides and in any precision."""
    rng = np.random.default_rng([7, seed, int(np.prod(value.shape))])
    return jnp.asarray(rng.integers(-4, 5, value.shape).astype(np.float32), value.dtype)


def derivative(problem: Problem) -> Derivative | str:
    """How to take a problem's derivatives; in words, why there are none.

    Whether there are any is for the original to say: a rewrite of which none can be taken, or
    which loses one, is then a violation. An input that is known to hold one value, or integers
    only, in every run has no derivative to pass on.
    """
    avals = [v.aval for v in problem.before.inputs]
    varies = [one.fact.constant is None and one.fact.lo is None for one in problem.inputs]
    slots = tuple(i for i, a in enumerate(avals) if is_float(a.dtype) and varies[i])
    outs = tuple(i for i, a in enumerate(problem.before.outputs) if is_float(a.aval.dtype))
    if not slots or not outs:
        return "no derivatives: nothing floating point goes in or comes out"
    found = Derivative(problem, slots, outs)
    zeros = [np.zeros(v.shape, v.dtype) for v in problem.inputs]
    if problem.across:
        from .fillings import fill
        from .themes import SUMMED

        zeros = fill(problem, SUMMED[0], 0)
    try:
        found.of(problem.before, zeros)
    except Unrunnable as error:
        return f"no derivatives: {error}"
    except Exception as error:
        line = next((s for s in str(error).splitlines() if s.strip()), "")
        return f"no derivatives: jax takes none of the original ({line[:120]})"
    return found
