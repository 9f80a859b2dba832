"""Verify a site that is too large to run: the same equations at smaller shapes, rewritten anew.

A size and its multiples are divided by one number throughout: in types, in params, in literals and
in bounds of facts; or where that comes to nothing, single dimensions are (see `divided`). What
comes out is a program of its own, and the pass itself is asked what it makes of it: what is
verified is the pass's own rewrite, or nothing. Evidence of this kind is weaker than that of a run
at the program's shapes, and is called so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...compat import bodies, jaxprs
from ...compat.jaxprs import Atom, Body, Eqn, Var
from ...matchers.fact import UNKNOWN, Constant, Fact
from ...passes.base import Contract, Pass
from ...passes.engine.fragments import Cut
from ...passes.engine.rewrite import rewrite
from .dimensions import LEAST, SMALLEST
from .divided import ByDimension, assignments
from .problem import Problem, build, cost
from .record import Kept, Piece, Recorder
from .verdict import Checked, Verdict

ROOM = 2
"""How often what is run should fit the limits, for it is run many times."""


class CannotShrink(Exception):
    """The equations don't stand at smaller shapes; the message says at which."""


@dataclass(frozen=True)
class Scale:
    """Multiples of ``unit`` are divided by ``by``."""

    unit: int
    by: int

    def size(self, n: int) -> int:
        """A size, or a number that is one."""
        return n // self.by if abs(n) >= LEAST and n % self.unit == 0 else n

    def bound(self, n: int) -> int:
        """A size, or the last place of one."""
        if self.size(n) != n:
            return self.size(n)
        return self.size(n + 1) - 1

    def shape(self, var: Var) -> tuple[int, ...]:
        """The smaller shape of a value."""
        return tuple(map(self.size, var.aval.shape))

    def params(self, eqn: Eqn) -> dict[str, Any]:
        """An equation's params, with the sizes in them."""
        return {k: self._param(v) for k, v in eqn.params.items()}

    def _param(self, value: Any) -> Any:
        if type(value) is int:
            return self.bound(value)
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        return value


Smaller = Scale | ByDimension


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
    for depth, floats in ((0, False), (2, False), (piece.ancestry.depth, False),
                          (piece.ancestry.depth, True)):  # fmt: skip
        problem = build(piece, depth, floats)
        for scale in _scales(problem, limits):
            if time.monotonic() > end:
                break
            try:
                small, facts = shrunk(problem.before, piece.ancestry.facts, scale)
                if _known(small, facts, tried):
                    continue
                found = _rewritten(small, facts, p, piece)
            except CannotShrink as error:
                reasons[str(error)] = None
                continue
            checked, level = check(found, contract, limits)
            if checked.verdict is not Verdict.UNKNOWN:
                said = f"at shrunk shapes: {_said(problem.before, scale)}"
                return replace(checked, shrunk=True, notes=(*checked.notes, said)), level, found
            reasons[f"at smaller shapes: {checked.reason}"] = None
    return "; ".join(list(reasons)[:2]) or "no size can be divided"


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


def _scales(problem: Problem, limits: Any) -> Iterator[Smaller]:
    """Divisors that make a site fit, the gentlest of each unit first; units as few as can be."""
    part = problem.before
    sizes = Counter(n for v in _vars(part) for n in v.aval.shape if n >= LEAST)
    work, size = cost(part.eqns)
    size += sum(v.aval.size * v.aval.dtype.itemsize for v in part.inputs)
    over = 2 * ROOM * max(size / limits.bytes, work / limits.work)
    for unit in sorted(sizes, reverse=True):
        by = 2
        while by < over:
            by *= 2
        while by <= unit // SMALLEST and unit % by == 0:
            yield Scale(unit, by)
            by *= 8
    over = ROOM * max(problem.bytes / limits.bytes, problem.work / limits.work)
    yield from assignments(part, max(over, 2.0))


def shrunk(part: Cut, facts: Mapping[Var, Fact], scale: Smaller) -> tuple[Body, tuple[Fact, ...]]:
    """Equations at other shapes, as a program, and what is known of its inputs.

    Raises:
        CannotShrink: an equation doesn't stand there, or means something else.
    """
    import jax

    def run(*values: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(part.inputs, values, strict=True))
        for eqn in part.eqns:
            _step(eqn, env, scale)
        return [_read(a, env, scale) for a in part.outputs]

    types = [_struct(v, scale) for v in part.inputs]
    try:
        closed = jax.make_jaxpr(run)(*types)
    except CannotShrink:
        raise
    except Exception as error:
        line = next((s for s in str(error).splitlines() if s.strip()), "")[:160]
        raise CannotShrink(f"at smaller shapes: {type(error).__name__}: {line}") from error
    return closed, tuple(_fact(facts.get(v, UNKNOWN), scale) for v in part.inputs)


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


def _step(eqn: Eqn, env: dict[Var, Any], scale: Smaller) -> None:
    entered = bodies.carried(eqn).entered
    operands = [_read(a, env, scale) for a in eqn.invars]
    if entered:
        if len(entered) != 1 or entered[0].role is not bodies.Role.CALL or eqn.effects:
            raise CannotShrink(f"{eqn.primitive.name} has no rule for other shapes")
        body = entered[0].body
        inner = jaxprs.opened(body)
        given = (*jaxprs.consts(body), *operands)
        names = dict(zip((*inner.constvars, *inner.invars), given, strict=True))
        for one in inner.eqns:
            _step(one, names, scale)
        results = [_read(a, names, scale) for a in inner.outvars]
    else:
        named = scale.params(eqn).items()
        params = {k: None if k in ("sharding", "out_sharding") else v for k, v in named}
        bound = eqn.primitive.get_bind_params(params)
        made = eqn.primitive.bind(*operands, **bound)
        results = made if eqn.primitive.multiple_results else [made]
    for var, value in zip(eqn.outvars, results, strict=True):
        wanted = scale.shape(var)
        if value.shape != wanted or value.dtype != var.aval.dtype:
            raise CannotShrink(
                f"{eqn.primitive.name} makes {value.shape} of {value.dtype} at smaller shapes, "
                f"wanted {wanted} of {var.aval.dtype}"
            )
        env[var] = value


def _rewritten(body: Body, facts: tuple[Fact, ...], p: Pass, like: Piece) -> Piece:
    """The pass's own rewrite of the smaller program, of the same kind as of the larger."""
    recorder = Recorder()
    rewrite(body, recorder.recording([p]), facts=facts)
    kept = [one for several in recorder.kept.values() for one in several]
    alike = [one.piece for one in kept if one.piece and _kinds(one.piece) == _kinds(like)]
    if not alike:
        raise CannotShrink(f"at smaller shapes {_what(kept)}")
    return alike[-1]


def _what(kept: Sequence[Kept]) -> str:
    return "the pass makes something else of it" if kept else "the pass doesn't apply"


def _kinds(piece: Piece) -> tuple[Counter[str], ...]:
    """How many equations of each kind stood there, and came in their place."""
    parts = piece.before, piece.after
    return tuple(Counter(e.primitive.name for e in part.eqns) for part in parts)
