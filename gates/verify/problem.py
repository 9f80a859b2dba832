"""A site as something to run: two functions of the same inputs, with or without its producers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.assume_range import assume_range_p
from ...compat.jaxprs import Atom, Eqn, Var
from ...compat.primitives import primitive
from ...matchers.fact import UNKNOWN, Fact, limits, meet
from ...passes.engine.fragments import Cut, Region
from ..promises import broken as not_kept
from .devices import across, joined
from .evaluate import Rule, evaluate, in_float64, is_complex, is_float, summed_once
from .gemm_kernel import kernel_gemm
from .inputs import Input
from .record import Piece

Array = Any


@dataclass(frozen=True)
class Problem:
    """Both sides of a site on common inputs."""

    before: Cut
    after: Cut
    """Of the same inputs, in the same order, and as many outputs."""
    inputs: tuple[Input, ...]
    region: Region
    producers: int
    """Equations before the site that are run with it."""
    taken: frozenset[int]
    """Their ids."""
    unshared: tuple[str, ...]
    """Types of inputs that only the rewrite reads: nothing here says what they are."""
    across: bool
    """Whether devices exchange values in it: it is run on several."""
    arithmetic: bool
    """Whether floating point numbers are computed in it, and not only moved."""
    wide: bool
    """Whether there are 64-bit types."""
    work: int
    """Multiplications and additions of its matrix products."""
    bytes: int
    """Of all that it reads and makes."""
    compiled: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What was compiled for several devices."""
    mutation: Any = None
    """What is changed in the rewrite's inputs and outputs; see `operators`."""
    rule: Rule | None = None
    """What is changed in the rewrite's equations."""
    summed: bool = False
    """Whether each sum is rounded once, on both sides."""

    @contextlib.contextmanager
    def context(self, wide: bool = False) -> Iterator[None]:
        """In which to run it: with 64-bit types where it has them, or they are wanted."""
        with contextlib.ExitStack() as stack:
            if self.wide or wide or self.summed:
                stack.enter_context(jax.enable_x64(True))
            if self.across:
                stack.enter_context(across(self.region))
            yield

    def run(self, which: Cut, arrays: Sequence[Array], first: Rule | None = None) -> list[Array]:
        """One side's outputs, equation by equation; on several devices where they talk.

        Args:
            which: the side.
            arrays: one for each input.
            first: asked about every equation before anything else, where devices don't talk.

        Raises:
            Unrunnable: it can't be run here.
        """
        with self.context():
            values = [jnp.asarray(a) for a in arrays]
            return [np.asarray(v) for v in self.values(which, values, first=first)]

    def values(
        self, which: Cut, values: Sequence[Any], differentiated: bool = False,
        first: Rule | None = None,
    ) -> list[Any]:  # fmt: skip
        """One side's outputs, in its `context`; arrays may be tracers."""
        mutant = self.mutation if which is self.after else None

        def run(*given: Any) -> list[Any]:
            if mutant is not None and mutant.inputs is not None:
                given = tuple(mutant.inputs(list(given)))
            rule = self._rule(mutant is not None and mutant.eqn is not None)
            if first is not None and not self.across:
                rule = _both(first, rule)
            parts = which.eqns, which.inputs, which.outputs
            found = evaluate(*parts, given, rule, differentiated=differentiated)
            return mutant.outputs(found) if mutant is not None and mutant.outputs else found

        if not self.across:
            return run(*values)
        return list(self._compiled((differentiated, id(which)), which, run)(*values))

    def _rule(self, mutated: bool) -> Rule | None:
        first = self.rule if mutated else None
        return _both(first, summed_once if self.summed else None)

    def _compiled(self, key: Any, which: Cut, run: Any) -> Callable[..., Any]:
        if key not in self.compiled:
            self.compiled[key] = joined(self.region, which, run), which
        return self.compiled[key][0]  # type: ignore[no-any-return]

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Of each input of integers that is told no more: its elements and its range's ends."""
        free = [i for i in self.inputs if i.groups_of is None and limits(i.dtype) is not None]
        return [
            (i.size, *i.fact.range(i.dtype))
            for i in free
            if all(told is None for told in (i.fact.constant, i.fact.affine, i.fact.permutation))
        ]

    def breaks_a_promise(self, arrays: Sequence[Array]) -> bool:
        """Whether a range that the program states of a value doesn't hold in the original's run.

        Inputs obey what is stated of them; what producers make of them may not. Nor may the groups
        of a GEMM's kernel have more rows than there are.
        """
        every = list(walk(self.before.eqns))
        stated = [e for e in every if e.primitive is assume_range_p]
        counted = [e for e in every if kernel_gemm(e) is not None]
        if not (stated or counted) or self.across:
            return False
        broken: list[Eqn] = []

        def rule(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
            if kernel_gemm(eqn) is not None:
                sizes = np.asarray(operands[2], np.int64)
                if sizes.min(initial=0) < 0 or sizes.sum() > operands[0].shape[0]:
                    broken.append(eqn)
                if not stated or broken:
                    return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
            if eqn.primitive is assume_range_p and not_kept(eqn, operands):
                broken.append(eqn)
            return None

        with self.context():
            part, values = self.before, [jnp.asarray(a) for a in arrays]
            evaluate(part.eqns, part.inputs, part.outputs, values, rule)
        return bool(broken)

    def exactly(self, arrays: Sequence[Array]) -> list[Array]:
        """What stood there, in float64.

        Raises:
            Unrunnable: it depends on how values are represented.
        """
        with self.context(wide=True):
            values = [jnp.asarray(a) for a in arrays]
            return [np.asarray(v) for v in self.wide_values(values)]

    def wide_values(self, values: Sequence[Any]) -> list[Any]:
        """What stood there, in float64, in a context with 64-bit types."""
        part = self.before

        def run(*given: Any) -> list[Any]:
            return in_float64(part.eqns, part.inputs, part.outputs, given)

        if not self.across:
            return run(*values)
        return list(self._compiled("wide", part, run)(*values))


def _both(first: Rule | None, second: Rule | None) -> Rule | None:
    """One rule, and then the other where that says nothing."""
    if first is None or second is None:
        return first or second

    def either(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        found = first(eqn, operands)
        return second(eqn, operands) if found is None else found

    return either


OF_REWRITE = -1
"""In place of a depth: what the rewrite alone reads is made of what the original reads."""


def build(piece: Piece, depth: int, floats: bool = True) -> Problem:
    """A site with the producers of its inputs up to ``depth`` steps back.

    Args:
        piece: the site.
        depth: steps back; or OF_REWRITE.
        floats: whether to take in what makes floating point values, too.

    Raises:
        Unrunnable: an equation can't be run outside of its program.
    """
    if depth == OF_REWRITE:
        known = set(piece.before.inputs)
        only = [v for v in piece.after.inputs if v not in known]
        prefix = piece.ancestry.between(only, known)
    else:
        prefix = piece.ancestry.prefix(depth, floats)
    before = _closed(prefix, piece.before)
    after = _closed(prefix, piece.after)
    inputs = tuple(dict.fromkeys((*before.inputs, *after.inputs)))
    only_after = [v for v in after.inputs if v not in set(before.inputs)]
    groups = group_sizes(before.eqns)
    most = max((n for v in inputs for n in v.aval.shape), default=0)
    eqns = (*before.eqns, *after.eqns)
    facts = _with_promises(piece.ancestry.facts, eqns, inputs)
    specs = tuple(_input(v, facts, groups, most) for v in inputs)
    avals = [a.aval for e in eqns for a in (*e.invars, *e.outvars)]
    work, size = cost(before.eqns), cost(after.eqns)
    own = set(map(id, (*piece.before.eqns, *piece.after.eqns)))
    return Problem(
        before=Cut(before.eqns, inputs, before.outputs),
        after=Cut(after.eqns, inputs, after.outputs),
        inputs=specs,
        region=piece.region,
        producers=max(
            len(before.eqns) - len(piece.before.eqns), len(after.eqns) - len(piece.after.eqns)
        ),
        taken=frozenset(id(e) for e in eqns if id(e) not in own),
        unshared=tuple(v.aval.str_short(short_dtypes=True) for v in only_after),
        across=any(e.effects for e in eqns),
        arithmetic=any(map(_computes, eqns)),
        wide=any(np.dtype(a.dtype).itemsize == 8 for a in avals if _is_number(a)),
        work=max(work[0], size[0]),
        bytes=work[1] + size[1],
    )


def _with_promises(
    facts: Mapping[Var, Fact], eqns: Sequence[Eqn], inputs: Sequence[Var]
) -> dict[Var, Fact]:
    """What is known of inputs, and what the program states of them in the part that is run."""
    found: dict[Any, Fact] = {v: facts.get(v, UNKNOWN) for v in inputs}
    for eqn in (e for e in eqns if e.primitive is assume_range_p):
        var: Any = eqn.invars[0]
        if jaxprs.is_var(var) and var in found and limits(var.aval.dtype) is not None:
            told = meet(found[var], var.aval, eqn.params["lo"], eqn.params["hi"])
            found[var] = told or found[var]
    return found


def _is_number(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.number))


def _input(var: Var, facts: Mapping[Var, Fact], groups: Mapping[Var, int], most: int) -> Input:
    fact = facts.get(var, UNKNOWN)
    return Input(tuple(var.aval.shape), var.aval.dtype, fact, groups.get(var), most)


def _closed(prefix: Sequence[Eqn], part: Cut) -> Cut:
    """A part with those producers that it needs, as a function of what they read."""
    read: set[Var] = {a for a in part.outputs if jaxprs.is_var(a)}
    kept: list[Eqn] = []
    for eqn in reversed((*prefix, *part.eqns)):
        if not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(a for a in eqn.invars if jaxprs.is_var(a))
    eqns = tuple(reversed(kept))
    made = {v for e in eqns for v in e.outvars}
    atoms = (*(a for e in eqns for a in e.invars), *part.outputs)
    inputs = dict.fromkeys(a for a in atoms if jaxprs.is_var(a) and a not in made)
    return Cut(eqns, tuple(inputs), part.outputs)


def walk(eqns: Iterable[Eqn]) -> Any:
    """Every equation, those of bodies included."""
    for eqn in eqns:
        yield eqn
        for entered in compat_bodies.carried(eqn).entered:
            yield from walk(jaxprs.opened(entered.body).eqns)


_MOVING = """
broadcast_in_dim concatenate gather reshape slice squeeze transpose rev select_n pad dynamic_slice
dynamic_update_slice split stack unstack tile copy copy_p sort top_k scatter bitcast_convert_type
optimization_barrier all_gather all_to_all ppermute pvary name expand_dims assume_range iota
stop_gradient jit closed_call cond scan while custom_jvp_call custom_vjp_call remat checkpoint
""".split()


def _computes(eqn: Eqn) -> bool:
    """Whether an equation makes floating point numbers by arithmetic, in it or in a body."""
    return any(
        e.primitive.name not in _MOVING
        and any(_is_real_or_complex(getattr(v.aval, "dtype", np.int32)) for v in e.outvars)
        for e in walk([eqn])
    )


def _is_real_or_complex(dtype: Any) -> bool:
    return is_float(dtype) or is_complex(dtype)


def group_sizes(eqns: Sequence[Eqn]) -> dict[Var, int]:
    """Values that a grouped matrix product takes as its groups' sizes, and the rows it has."""
    found: dict[Var, int] = {}
    for eqn in reversed(eqns):
        if eqn.primitive is primitive("ragged_dot_general_p"):
            lhs, _, sizes = eqn.invars[:3]
            if jaxprs.is_var(sizes):
                (dim,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
                found[sizes] = lhs.aval.shape[dim]
        elif kernel_gemm(eqn) is not None and jaxprs.is_var(eqn.invars[2]):
            found[eqn.invars[2]] = eqn.invars[0].aval.shape[0]
        elif eqn.primitive is primitive("convert_element_type_p") and eqn.outvars[0] in found:
            if jaxprs.is_var(eqn.invars[0]):
                found[eqn.invars[0]] = found[eqn.outvars[0]]
        for entered in compat_bodies.carried(eqn).entered:
            body = jaxprs.opened(entered.body)
            inner = group_sizes(body.eqns)
            for var, port in zip(body.invars, entered.inputs, strict=False):
                if var in inner and port.outer is not None:
                    atom: Atom = eqn.invars[port.outer]
                    if jaxprs.is_var(atom):
                        found[atom] = inner[var]
    return found


def cost(eqns: Sequence[Eqn]) -> tuple[int, int]:
    """Multiplications and additions of matrix products, and bytes made; loops by their length."""
    work = size = 0
    for eqn in eqns:
        for v in eqn.outvars:
            shape = getattr(v.aval, "shape", ())
            if hasattr(v.aval, "dtype") and hasattr(v.aval.dtype, "itemsize"):
                size += int(np.prod(shape, dtype=np.float64)) * v.aval.dtype.itemsize
        work += products(eqn)
        size += sum(more for more, _ in expanded(eqn))
        inner = [cost(jaxprs.opened(e.body).eqns) for e in compat_bodies.carried(eqn).entered]
        if eqn.primitive is compat_bodies.shard_map_primitive():
            devices = int(eqn.params["mesh"].size)
            inner = [(devices * w, devices * s) for w, s in inner]
        times = eqn.params.get("length", 1) if inner else 1
        work += sum(w for w, _ in inner) * (times if isinstance(times, int) else 1)
        size += sum(s for _, s in inner)
    return work, size


def expanded(eqn: Eqn) -> list[tuple[int, tuple[Atom, Atom]]]:
    """A grouped matrix product's operands as a CPU has them, whole, for each group.

    Returns:
        The bytes of each, and the two values by the sizes of which it grows.
    """
    if kernel_gemm(eqn) is not None:
        lhs, _, sizes = eqn.invars[:3]
        return [(int(sizes.aval.size * lhs.aval.size * lhs.aval.dtype.itemsize), (lhs, sizes))]
    if eqn.primitive is not primitive("ragged_dot_general_p"):
        return []
    lhs, rhs, sizes = eqn.invars[:3]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    both = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return [
        (int(sizes.aval.shape[-1] * a.aval.size * a.aval.dtype.itemsize), (a, sizes))
        for a in ((lhs, rhs) if both else (lhs,))
    ]


def products(eqn: Eqn) -> int:
    """Multiplications and additions of one equation, those in its bodies aside."""
    if eqn.primitive is primitive("dot_general_p"):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
        inner = int(np.prod([lhs.shape[d] for d in contracted]))
        return 2 * inner * int(np.prod(out.shape, dtype=np.float64))
    if eqn.primitive is primitive("ragged_dot_general_p") or kernel_gemm(eqn) is not None:
        # A CPU multiplies all rows with each group's matrix.
        lhs, rhs, sizes = (a.aval for a in eqn.invars[:3])
        out = eqn.outvars[0].aval
        whole = float(np.prod(lhs.shape)) * np.prod(rhs.shape) * np.prod(out.shape)
        return int(2 * np.sqrt(whole) * max(1, sizes.shape[-1] ** 0.5))
    if eqn.primitive is primitive("triangular_solve_p"):
        return int(eqn.invars[0].aval.shape[-1]) * int(np.prod(eqn.invars[1].aval.shape))
    return 0
