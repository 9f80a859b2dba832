"""What a rewrite promises of values, which no CPU makes use of: held on each input that is run.

Inputs on which the original breaks a promise of its own are nobody's to judge. An order among equal
keys that a sort leaves open is turned around, and must not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.jaxprs import Eqn
from ...compat.primitives import primitive
from ...compat.tracing import Tracer
from ...matchers.fact import limits, meet
from ..promises import broken, made
from .evaluate import Rule, evaluate
from .inputs import Input
from .problem import Problem, walk

Array = Any


@dataclass
class Watch:
    """Notes the promises that aren't kept while equations are run."""

    own: frozenset[int]
    """Equations that are the program's own: the producers'."""
    found: dict[str, str] = field(default_factory=dict)
    """By kind, what the others break."""
    of_program: bool = False
    """Whether one of the program's own is broken."""

    def rule(self, eqn: Eqn, operands: Sequence[Any]) -> None:
        """Looks at one equation; it is then evaluated as it is."""
        if made(eqn) and not any(isinstance(v, Tracer) for v in operands):
            for kind, said in broken(eqn, operands).items():
                self.of_program |= id(eqn) in self.own
                if id(eqn) not in self.own:
                    self.found.setdefault(kind, f"{eqn.primitive.name}: {said}")


def watch(problem: Problem) -> Watch:
    """For one run of a rewrite."""
    taken = [e for e in problem.after.eqns if id(e) in problem.taken]
    return Watch(frozenset(id(e) for e in walk(taken)))


def narrowed(problem: Problem) -> Iterator[Problem]:
    """With integers that could be indices of an array, where the rewrite promises anything.

    Of a type's whole range hardly two are in bounds together, and what is outside may be dropped.
    """
    if not any(map(made, walk(e for e in problem.after.eqns if id(e) not in problem.taken))):
        return
    for greatest in dict.fromkeys((max((i.most for i in problem.inputs), default=0) - 1, 3)):
        inputs = tuple(_narrowed(one, greatest) for one in problem.inputs)
        if inputs != problem.inputs:
            yield replace(problem, inputs=inputs)


def _narrowed(one: Input, greatest: int) -> Input:
    fact = one.fact
    told = fact.constant, fact.affine, fact.permutation, one.groups_of
    if limits(one.dtype) is None or any(t is not None for t in told):
        return one
    return replace(one, fact=meet(fact, one, 0, greatest) or fact)


def breaks_its_own(problem: Problem, arrays: Sequence[Array]) -> bool:
    """Whether the original breaks a promise that it makes itself on these inputs."""
    part = problem.before
    if problem.breaks_a_promise(arrays):
        return True
    if problem.across or not any(map(made, walk(part.eqns))):
        return False
    seen = Watch(frozenset())
    with problem.context():
        values = [jnp.asarray(a) for a in arrays]
        evaluate(part.eqns, part.inputs, part.outputs, values, seen.rule)
    return bool(seen.found)


def ties_turned(problem: Problem) -> Rule | None:
    """Sorts that leave the order of equal keys open, with that order turned around.

    None where the rewrite has no such sort, or the original has one, too: what it makes of ties is
    then as open.
    """
    if problem.across or not any(map(_is_open, walk(problem.after.eqns))):
        return None
    return None if any(map(_is_open, walk(problem.before.eqns))) else _turned


def _is_open(eqn: Eqn) -> bool:
    return eqn.primitive is primitive("sort_p") and not eqn.params["is_stable"]


def _turned(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    if not _is_open(eqn):
        return None
    axis = eqn.params["dimension"]
    turned = tuple(lax.rev(jnp.asarray(v), (axis,)) for v in operands)
    return list(lax.sort(turned, axis, is_stable=True, num_keys=eqn.params["num_keys"]))


def not_held(problem: Problem) -> tuple[str, ...]:
    """What a rewrite promises, and the original doesn't, where it isn't looked at."""
    before = _kinds(walk(problem.before.eqns))
    own = [e for e in problem.after.eqns if id(e) not in problem.taken]
    inside = walk(own) if problem.across else (e for eqn in own for e in _in_loops(eqn))
    found = sorted(_kinds(inside) - before)
    where = "where devices talk" if problem.across else "in a loop or a kernel"
    return (f"promises {where} weren't held: {', '.join(found)}",) if found else ()


def _kinds(eqns: Iterable[Eqn]) -> set[str]:
    return {kind for eqn in eqns for kind in made(eqn)}


def _in_loops(eqn: Eqn) -> Iterator[Eqn]:
    """The equations of bodies that are run whole."""
    for entered in compat_bodies.carried(eqn).entered:
        eqns = jaxprs.opened(entered.body).eqns
        if entered.role in (compat_bodies.Role.CALL, compat_bodies.Role.BRANCH):
            for inner in eqns:
                yield from _in_loops(inner)
        else:
            yield from walk(eqns)
