"""Cut a site out of its program: the equations that a rewrite removes, and what it puts there.

Both are functions of the same kind, from values at hand in the body to values that it reads
elsewhere, so that each can be compiled by itself. Several ways to rewrite one site are cut
together: what any of them removes is part of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...compat import bodies as compat_bodies
from ...compat import jaxprs, tracing, vma
from ...compat.bodies import Flow, Role
from ...compat.jaxprs import Atom, Eqn, Var
from ...compat.mesh_types import by_hand
from ...compat.tracing import primitive
from ...lowering.fragment import Fragment, Port
from ...matchers.graph import Scope
from ..base import Match, Replacement
from .interpreter import replacement_equations


class Uncut(Exception):
    """The site can't be compiled by itself; the message says why, in one line."""


@dataclass(frozen=True)
class Cut:
    """Equations as a function of their inputs."""

    eqns: tuple[Eqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    @property
    def idle(self) -> bool:
        """Whether nothing is computed: every output is an input or a constant."""
        return not self.eqns


@dataclass(frozen=True)
class Region:
    """A site as it is and as each way would leave it."""

    before: Cut
    after: Mapping[str, Cut]
    mesh: Any
    """The `AbstractMesh` around it, or None."""
    manual: tuple[str, ...]
    """The axes that `shard_map`s around it split."""
    check_vma: bool
    runs: int | None
    """How often one run of the program runs it; None where a loop's length isn't known."""

    def fragment(self, cut: Cut) -> Fragment:
        """What to compile."""

        def port(atom: Atom) -> Port:
            own = vma.varying(atom.aval) if self.check_vma else frozenset(self.manual)
            varying = tuple(a for a in self.manual if a in own)
            return Port(tuple(atom.aval.shape), atom.aval.dtype, varying)

        def run(*values: Any) -> Sequence[Any]:
            return tracing.evaluate_alone(cut.eqns, cut.inputs, cut.outputs, values)

        wide = any(
            np.dtype(a.aval.dtype).itemsize == 8
            for a in (*cut.inputs, *cut.outputs)
            if np.issubdtype(a.aval.dtype, np.number)
        )
        inputs, outputs = tuple(map(port, cut.inputs)), tuple(map(port, cut.outputs))
        return Fragment(run, inputs, outputs, self.mesh, self.manual, self.check_vma, wide)


def cut(match: Match, ways: Mapping[str, Replacement], *, in_kernels: bool = False) -> Region:
    """A site and its rewrites, each as a function of values at hand.

    Args:
        match: the site.
        ways: what to put in its place, by name.
        in_kernels: cut sites in kernels' bodies too: what is cut can be evaluated, not compiled.

    Raises:
        Uncut: it has effects, is in a kernel, is sharded over an Explicit mesh, or a way needs a
            value of another body.
    """
    scope = match.scope
    mesh, manual, check_vma = _surroundings(match, in_kernels)
    eqns = scope.eqns
    gone = {name: removed(scope, match.index, way) for name, way in ways.items()}
    region = sorted(frozenset().union(*gone.values(), {match.index}))
    for index in region:
        _check(eqns[index])
    made_here = {v for index in region for v in eqns[index].outvars}
    wanted = _read_outside(scope, set(region), made_here)
    if not wanted:
        raise Uncut("nothing outside of the site reads what it computes")
    before = _closed([eqns[i] for i in region], wanted, scope)
    after = {}
    for name, way in ways.items():
        if way.wants is not None:
            raise Uncut(f"the way {name!r} needs a value of another body")
        new, values = replacement_equations(match, way)
        known = dict(zip(way.results, values, strict=True))
        rest = [eqns[i] for i in region if i not in gone[name]]
        rest = [jaxprs.substitute(eqn, known) for eqn in rest]
        outputs = [known.get(v, v) for v in wanted]
        after[name] = _closed([*rest, *new], outputs, scope)
    return Region(before, after, mesh, manual, check_vma, _runs(scope))


def _surroundings(match: Match, in_kernels: bool) -> tuple[Any, tuple[str, ...], bool]:
    """The mesh around a site, its axes that are split by hand, and whether what varies is checked.

    Both as the site itself was traced: the program may stand in a `shard_map` of its caller's.
    """
    checks = []
    for caller in match.scope.path():
        eqn = caller.scope.eqns[caller.index]
        if caller.entered.role is Role.KERNEL and not in_kernels:
            raise Uncut("it stands in a kernel's body")
        if eqn.primitive is compat_bodies.shard_map_primitive():
            checks.append(bool(eqn.params["check_vma"]))
    mesh, manual = by_hand(match.eqn.ctx.cur_abstract_mesh)
    atoms = (*match.eqn.invars, *match.eqn.outvars)
    varies = any(vma.varying(atom.aval) for atom in atoms)
    return mesh, manual, all(checks) if checks else varies


def removed(scope: Scope, root: int, way: Replacement) -> frozenset[int]:
    """The live equations that nothing needs any more once a way is taken."""
    jaxpr = jaxprs.opened(scope.body)
    demanded = zip(jaxpr.outvars, scope.demanded, strict=True)
    read: set[Var] = {a for a, wanted in demanded if wanted and jaxprs.is_var(a)}
    replaced = {root, *way.also}
    results = set(way.results)
    operands = {a for a in way.operands if jaxprs.is_var(a)}
    live: set[int] = set()
    # What the operands need may come after the root, where other equations go with it.
    needed = not read.isdisjoint(results) or any(
        not results.isdisjoint(a for a in scope.eqns[i].invars if jaxprs.is_var(a))
        for i in scope.live
    )
    read |= operands if needed else set()
    for index in reversed(scope.live):
        eqn = scope.eqns[index]
        if index in replaced or not (eqn.effects or not read.isdisjoint(eqn.outvars)):
            continue
        live.add(index)
        read.update(a for a in eqn.invars if jaxprs.is_var(a))
    return frozenset(scope.live) - live


def _check(eqn: Eqn) -> None:
    if jaxprs.true_effects(eqn):
        raise Uncut(f"{eqn.primitive.name} has effects")
    elsewhere = tracing.runs_elsewhere(eqn)
    if elsewhere is not None:
        raise Uncut(f"{eqn.primitive.name} is compiled under {elsewhere}")
    for atom in (*eqn.invars, *eqn.outvars):
        spec = getattr(getattr(atom.aval, "sharding", None), "spec", ())
        if any(part is not None for part in spec):
            raise Uncut(
                f"{atom.aval.str_short(short_dtypes=True)} is sharded over an Explicit mesh"
            )
        if not hasattr(atom.aval, "shape") or not hasattr(atom.aval, "dtype"):
            raise Uncut(f"{eqn.primitive.name} works on {atom.aval}, which is no array")


def _read_outside(scope: Scope, region: set[int], made: set[Var]) -> list[Var]:
    """The values made in the region that anything else reads, in order of first use."""
    found: dict[Var, None] = {}
    jaxpr = jaxprs.opened(scope.body)
    for index in scope.live:
        if index not in region:
            found.update((a, None) for a in scope.eqns[index].invars
                         if jaxprs.is_var(a) and a in made)  # fmt: skip
    for atom, wanted in zip(jaxpr.outvars, scope.demanded, strict=True):
        if wanted and jaxprs.is_var(atom) and atom in made:
            found[atom] = None
    return list(found)


def _closed(eqns: Sequence[Eqn], outputs: Sequence[Atom], scope: Scope) -> Cut:
    """The equations that ``outputs`` need, in order; a constant that they read is made anew.

    A compiler that sees an iota sorts otherwise than one that sees an array.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    done: dict[int, Eqn] = {}
    inputs: dict[Var, None] = {}
    renamed: dict[Var, Var] = {}

    def make(eqn: Eqn) -> None:
        if id(eqn) in done:
            return
        for atom in eqn.invars:
            need(atom)
        done[id(eqn)] = eqn

    def need(atom: Atom) -> None:
        if not jaxprs.is_var(atom) or atom in inputs or atom in renamed:
            return
        if atom in makers:
            make(makers[atom])
            return
        constant = _constant(scope, atom)
        if constant is None:
            inputs[atom] = None
            return
        equations, var = constant
        for eqn in equations:
            done.setdefault(id(eqn), eqn)
        if var is not atom:
            renamed[atom] = var

    for atom in outputs:
        need(atom)
    ordered = tuple(jaxprs.substitute(eqn, renamed) for eqn in done.values())
    final = tuple(renamed.get(a, a) if jaxprs.is_var(a) else a for a in outputs)
    return Cut(ordered, tuple(inputs), final)


def _constant(scope: Scope, var: Var) -> tuple[list[Eqn], Var] | None:
    """The equations that make a value out of nothing, seen through calls, and their result."""
    where: Scope = scope
    definition = where.definition(var)
    while definition is None:
        caller, position = where.callers[:1], where.position(var)
        if not caller or position is None or len(where.callers) != 1:
            return None
        call = caller[0]
        port = call.entered.inputs[position]
        eqn = call.scope.eqns[call.index]
        if call.entered.role is not Role.CALL or not _inlined(eqn) or port.flow is not Flow.SAME:
            return None
        if port.outer is None or not jaxprs.is_var(eqn.invars[port.outer]):
            return None
        where, var = call.scope, eqn.invars[port.outer]
        definition = where.definition(var)
    equations = _from_nothing(where, definition[0], 8)
    return None if equations is None else (equations, var)


def _from_nothing(scope: Scope, index: int, depth: int) -> list[Eqn] | None:
    eqn = scope.eqns[index]
    if depth == 0 or eqn.effects or compat_bodies.carried(eqn) is not compat_bodies.NOTHING:
        return None
    found: list[Eqn] = []
    for atom in eqn.invars:
        if not jaxprs.is_var(atom):
            continue
        definition = scope.definition(atom)
        inner = None if definition is None else _from_nothing(scope, definition[0], depth - 1)
        if inner is None:
            return None
        found += inner
    return [*found, eqn]


def _inlined(eqn: Eqn) -> bool:
    """Whether the compiler sees through a call; `jax.remat` hides what comes in."""
    return eqn.primitive is primitive("pjit.jit_p") or eqn.primitive is primitive(
        "core.closed_call_p"
    )


def _runs(scope: Scope) -> int | None:
    """How often a body runs in one run of the program, loops included; branches count once."""
    if not scope.callers:
        return 1
    total = 0
    for caller in scope.callers:
        outer = _runs(caller.scope)
        length: Any = 1
        if caller.entered.role in (Role.LOOP, Role.PREDICATE):
            length = caller.scope.eqns[caller.index].params.get("length")
        if outer is None or not isinstance(length, int):
            return None
        total += outer * length
    return total
