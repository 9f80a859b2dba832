"""Verify a site that is too large to run: the same equations at smaller shapes, rewritten anew.

Single dimensions are divided (see `divided`); or where that comes to nothing, a size and its
multiples by one number throughout: in types, in params, in literals and in bounds of facts. What
comes out is a program of its own, and the pass itself is asked what it makes of it: what is
verified is the pass's own rewrite, or nothing. Evidence of this kind is weaker than that of a run
at the program's shapes, and is called so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...compat import bodies, jaxprs
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...compat.megablox import at_other_shapes
from ...compat.same_body import same_params
from ...compat.tracing import Tracer
from ...lowering.fragment import by_hand_on
from ...matchers.fact import UNKNOWN, Constant, Fact
from ...passes.base import Contract, Pass
from ...passes.engine.fragments import Cut, Region
from ...passes.engine.rewrite import rewrite
from .check import Level
from .devices import devices_of
from .dimensions import LEAST, SMALLEST
from .divided import ByDimension, assignments
from .gemm_kernel import kernel_gemm
from .problem import OF_REWRITE, Problem, build, cost
from .record import Kept, Piece, Recorder
from .scale import SAME, Scale
from .verdict import Checked, Verdict

ROOM = 1.5
"""How often what is run should fit the limits, for it is run many times."""
ROUNDED_ROOM = 12.0
"""The same where errors are averaged over many runs, in float64 and of derivatives, too."""


class CannotShrink(Exception):
    """The equations don't stand at smaller shapes; the message says at which."""


Smaller = Scale | ByDimension
Done = dict[Any, list[tuple[dict[str, Any], list[Any], list[Any]]]]
"""By primitive and operands: the params of what was done, the operands themselves, the results."""


def check_shrunk(
    piece: Piece,
    p: Pass,
    contract: Contract,
    limits: Any,
    check: Callable[[Piece, Contract, Any], tuple[Checked, Any]],
) -> tuple[Checked, Any, Piece] | str:
    """The verdict on a site at shapes that fit, how it was reached and of what; or why not."""
    reasons: dict[str, None]
    end, reasons, tried = time.monotonic() + limits.seconds, {}, set[str]()
    room = ROUNDED_ROOM if contract is Contract.ROUNDING else ROOM
    for problem, part in _whole_first(piece, p, reasons):
        for scale in _tried(problem, part, limits, room):
            if time.monotonic() > end:
                reasons = {f"not all tried within {limits.seconds:g} s": None, **reasons}
                break
            try:
                small, facts = shrunk(part, piece.ancestry.facts, scale, piece.region)
                if _known(small, facts, tried):
                    continue
                found = _rewritten(small, facts, p, piece, problem)
            except CannotShrink as error:
                reasons[str(error)] = None
                continue
            checked, level = check(found, contract, limits)
            if checked.verdict is not Verdict.UNKNOWN:
                said = f"at shrunk shapes: {_said(part, scale)}"
                return replace(checked, shrunk=True, notes=(*checked.notes, said)), level, found
            reasons[f"at smaller shapes: {checked.reason}"] = None
    return "; ".join(list(reasons)[:2]) or "no size can be divided"


def _whole_first(piece: Piece, p: Pass, reasons: dict[str, None]) -> Iterator[tuple[Problem, Cut]]:
    """The site with more and more of its producers; first those parts in which its pattern is.

    Whether a part holds all of it, the pass says of the part at the program's own shapes. Where it
    doesn't apply there, it might only for what it is that sizes are smaller: such come last.
    """
    later: list[tuple[Problem, Cut]] = []
    producers: set[frozenset[int]] = set()
    for depth, floats in _levels(piece.ancestry.depth):
        problem = build(piece, depth, floats)
        if problem.taken in producers:
            continue
        producers.add(problem.taken)
        for part in _parts(problem, piece):
            try:
                same, facts = shrunk(part, piece.ancestry.facts, SAME, piece.region)
            except CannotShrink as error:
                reasons[str(error)] = None
                continue
            try:
                _rewritten(same, facts, p, piece, problem)
            except CannotShrink:
                later.append((problem, part))
                continue
            yield problem, part
    yield from later


def _levels(deepest: int) -> list[Level]:
    """With which producers to try; few at first, for what is tried takes a rewrite each time."""
    exact = [(d, False) for d in (0, 2, deepest)]
    return [
        *exact[:1],
        (OF_REWRITE, True),
        *exact[1:],
        *((d, True) for d in (1, 2, 4, 8, 16) if d < deepest),
        (deepest, True),
    ]


def _known(small: Body, facts: tuple[Fact, ...], tried: set[str]) -> bool:
    """Whether the same program was tried before, which it is then."""
    text = f"{small} {facts}"
    known = text in tried
    tried.add(text)
    return known


def _said(part: Cut, scale: Smaller) -> str:
    pairs = {p for v in _vars(part) for p in zip(v.aval.shape, scale.shape(v), strict=True)}
    return ", ".join(f"{n:,} → {m:,}" for n, m in sorted(pairs) if n != m)


def _vars(part: Cut) -> list[Any]:
    eqns = [v for e in part.eqns for v in e.outvars]
    return [v for v in (*part.inputs, *eqns) if hasattr(v.aval, "shape")]


def _parts(problem: Problem, piece: Piece) -> tuple[Cut, ...]:
    """What to make smaller: where devices talk, without that first and then with it."""
    alone = with_context(problem, piece, talk=False)
    together = with_context(problem, piece, talk=True)
    return (alone, together) if len(together.eqns) > len(alone.eqns) else (alone,)


def _tried(problem: Problem, part: Cut, limits: Any, room: float) -> Iterator[Smaller]:
    """How to make a part smaller, the gentlest first."""
    for often in dict.fromkeys((room, ROOM)):
        yield from _scales(problem, part, limits, often)


def with_context(problem: Problem, piece: Piece, talk: bool) -> Cut:
    """What stood there, with its producers, and those of what the rewrite alone reads.

    What the site reads is needed elsewhere, or it would have gone with the site; but for what
    devices send each other.

    Args:
        problem: the site, with some of its producers.
        piece: the site.
        talk: whether to take what devices send each other in, too, or as given.
    """
    own = set(map(id, piece.after.eqns))
    context = [e for e in problem.after.eqns if id(e) not in own]
    known = set(map(id, context))
    eqns = [*context, *(e for e in problem.before.eqns if id(e) not in known)]
    site = set(map(id, piece.before.eqns))
    eqns = [e for e in eqns if talk or not e.effects or id(e) in site]
    made = {v for e in eqns for v in e.outvars}
    # A collective has effects, so that it stays though nothing reads it.
    stays = piece.after.inputs if talk else (*piece.before.inputs, *piece.after.inputs)
    read = [v for v in stays if v in made and not (talk and v in piece.before.inputs)]
    outputs = tuple(dict.fromkeys((*problem.before.outputs, *read)))
    atoms = (*(a for e in eqns for a in e.invars), *outputs)
    inputs = tuple(dict.fromkeys(a for a in atoms if jaxprs.is_var(a) and a not in made))
    return Cut(tuple(eqns), inputs, outputs)


def _scales(problem: Problem, part: Cut, limits: Any, room: float) -> Iterator[Smaller]:
    """Divisors that make a site fit, the gentlest first."""
    sizes = Counter(n for v in _vars(part) for n in v.aval.shape if n >= LEAST)
    large = max(room * problem.bytes / limits.bytes, 1.0)
    heavy = max(room * problem.work / limits.work, 1.0)
    yield from assignments(part, large, heavy, (256, 128, 32))
    work, size = cost(part.eqns)
    size += sum(v.aval.size * v.aval.dtype.itemsize for v in part.inputs)
    over = 4 * max(size / limits.bytes, work / limits.work)
    for unit in sorted(sizes, reverse=True):
        by = 2
        while by < over:
            by *= 2
        while by <= unit // SMALLEST and unit % by == 0:
            yield Scale(unit, by)
            by *= 8
    yield from assignments(part, large, heavy, (SMALLEST,))


def shrunk(
    part: Cut, facts: Mapping[Var, Fact], scale: Smaller, region: Region | None = None
) -> tuple[Body, tuple[Fact, ...]]:
    """Equations at other shapes, as a program, and what is known of its inputs.

    Where devices talk, the program is one of them all, and nothing is known.

    Raises:
        CannotShrink: an equation doesn't stand there, or means something else.
    """
    import jax

    def run(*values: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(part.inputs, values, strict=True))
        done: Done = {}
        for eqn in part.eqns:
            _step(eqn, env, scale, done)
        return [_read(a, env, scale) for a in part.outputs]

    across = region is not None and any(e.effects for e in part.eqns)
    types = [_struct(v, scale) for v in part.inputs]
    try:
        if across:
            assert region is not None
            return _of_all(part, scale, region, run), (UNKNOWN,) * len(types)
        closed = jax.make_jaxpr(run)(*types)
    except CannotShrink:
        raise
    except Exception as error:
        line = next((s for s in str(error).splitlines() if s.strip()), "")[:160]
        raise CannotShrink(f"at smaller shapes: {type(error).__name__}: {line}") from error
    return closed, tuple(_fact(facts.get(v, UNKNOWN), scale) for v in part.inputs)


def _of_all(part: Cut, scale: Smaller, region: Region, run: Callable[..., list[Any]]) -> Body:
    """The program of all devices of the site's mesh, each of which runs the smaller part."""
    import jax

    mesh, _ = devices_of(region)
    own = region.fragment(part)
    ports = tuple(replace(p, shape=scale.shape(v)) for p, v in zip(own.inputs, part.inputs))
    fn, types = by_hand_on(replace(own, fn=run, inputs=ports), mesh)
    with jax.set_mesh(mesh):
        return jax.make_jaxpr(fn)(*types)


def _struct(var: Var, scale: Smaller) -> Any:
    import jax

    return jax.ShapeDtypeStruct(scale.shape(var), var.aval.dtype)


def _fact(fact: Fact, scale: Smaller) -> Fact:
    """Bounds that are sizes shrink with them; affine forms that may not fit are left out."""
    lo, hi = (None if b is None else scale.bound(b) for b in (fact.lo, fact.hi))
    constant = fact.constant
    if constant is not None and type(constant.value) is int:
        constant = Constant.of(scale.bound(constant.value))
    return Fact(lo, hi, None, fact.permutation, constant, fact.rising)


def _read(atom: Atom, env: Mapping[Var, Any], scale: Smaller) -> Any:
    if not jaxprs.is_literal(atom):
        return env[atom]
    value = atom.val
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.integer):
        return np.asarray(scale.bound(int(value)), atom.aval.dtype)[()]
    return value


def _step(eqn: Eqn, env: dict[Var, Any], scale: Smaller, done: Done) -> None:
    """One equation; one that was done before of the same values is the same.

    A value that is made in the site and comes back to it through its producers was walked to twice.
    """
    entered = bodies.carried(eqn).entered
    operands = [_read(a, env, scale) for a in eqn.invars]
    if kernel_gemm(eqn) is not None:
        results = [at_other_shapes(eqn, operands)]
    elif entered:
        if len(entered) != 1 or entered[0].role is not bodies.Role.CALL or eqn.effects:
            raise CannotShrink(f"{eqn.primitive.name} has no rule for other shapes")
        body = entered[0].body
        inner = jaxprs.opened(body)
        given = (*jaxprs.consts(body), *operands)
        names = dict(zip((*inner.constvars, *inner.invars), given, strict=True))
        for one in inner.eqns:
            _step(one, names, scale, done)
        results = [_read(a, names, scale) for a in inner.outvars]
    else:
        named = scale.params(eqn).items()
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in named}
        before = done.setdefault((eqn.primitive, tuple(map(_named, operands))), [])
        known = next((made for told, _, made in before if same_params(told, params)), None)
        if known is None:
            bound = eqn.primitive.get_bind_params(params)
            made = eqn.primitive.bind(*operands, **bound)
            known = list(made) if eqn.primitive.multiple_results else [made]
            before.append((params, operands, known))  # operands, or another could have their ids
        results = known
    for var, value in zip(eqn.outvars, results, strict=True):
        wanted = scale.shape(var)
        if value.shape != wanted or value.dtype != var.aval.dtype:
            raise CannotShrink(
                f"{eqn.primitive.name} makes {value.shape} of {value.dtype} at smaller shapes, "
                f"wanted {wanted} of {var.aval.dtype}"
            )
        env[var] = value


def _named(value: Any) -> Any:
    """A number by what it is, anything else as an object: an array's text may leave values out."""
    ndim: int = getattr(value, "ndim", 0)
    if isinstance(value, Tracer) or ndim:
        return id(value)
    return f"{value!r}:{getattr(value, 'dtype', '')}"


def _rewritten(
    body: Body, facts: tuple[Fact, ...], p: Pass, like: Piece, problem: Problem
) -> Piece:
    """The pass's own rewrite of the smaller program, of the same kind as of the larger.

    As many equations of each kind, either of the site alone or with all that was run with it.
    """
    recorder = Recorder()
    rewrite(body, recorder.recording([p]), facts=facts)
    kept = [one for several in recorder.kept.values() for one in several]
    site, whole = _kinds(like.before, like.after), _kinds(problem.before, problem.after)
    alike = [
        piece for one in kept
        if (piece := one.piece) is not None
        and (_kinds(piece.before, piece.after) == site or _whole(piece) == whole)
    ]  # fmt: skip
    if not alike:
        raise CannotShrink(f"at smaller shapes {_what(kept)}")
    return alike[-1]


def _whole(piece: Piece) -> tuple[Counter[str], ...]:
    problem = build(piece, piece.ancestry.depth)
    return _kinds(problem.before, problem.after)


def _what(kept: Sequence[Kept]) -> str:
    return "the pass makes something else of it" if kept else "the pass doesn't apply"


def _kinds(*parts: Cut) -> tuple[Counter[str], ...]:
    """How many equations of each kind there are; those in calls in their place.

    Not what makes a constant: one that was made in another body is part of the site where it is
    made in this one.
    """
    return tuple(Counter(e.primitive.name for e in _flat(_varying(part.eqns))) for part in parts)


def _varying(eqns: Sequence[Eqn]) -> list[Eqn]:
    constants: set[Var] = set()
    kept = []
    for eqn in eqns:
        if eqn.effects or any(jaxprs.is_var(a) and a not in constants for a in eqn.invars):
            kept.append(eqn)
        else:
            constants.update(eqn.outvars)
    return kept


def _flat(eqns: Sequence[Eqn]) -> Iterator[Eqn]:
    for eqn in eqns:
        entered = bodies.carried(eqn).entered
        if kernel_gemm(eqn) is not None:
            yield eqn  # what stands in it says which mesh is around it, too
        elif len(entered) == 1 and entered[0].role is bodies.Role.CALL:
            yield from _flat(jaxprs.opened(entered[0].body).eqns)
        else:
            yield eqn
