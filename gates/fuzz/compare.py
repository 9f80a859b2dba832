"""Whether two programs compute the same, as closely as a contract claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...compat import bodies, jaxprs
from ...compat.jaxprs import Body
from ...compat.primitives import primitive
from ...passes.base import Contract
from .evaluate.core import Evaluation
from .evaluate.decisions import Decision
from .evaluate.mode import PLAIN, Mode, is_float

NOISY = 3
"""Runs with noise, from which the error that rounding alone makes is told."""
MORE_NOISY = 24
"""The same where the few weren't enough: a sort, say, may fall out differently now and then."""

UNSIGNED = Mode(unsigned=True)

_BITCAST = primitive("bitcast_convert_type_p")

BY_JAX: Counter[str] = Counter()
"""Equations of this process that no rule evaluated, so that jax did, by primitive."""

Difference = str | None
"""What differs, or None."""


def run(closed: Body, args: Sequence[Any], mode: Mode = PLAIN) -> list[Any]:
    """The results of a program on arrays."""
    evaluation = Evaluation(mode)
    results = evaluation.run(closed, args)
    BY_JAX.update(evaluation.by_jax)
    return results


def difference(old: Body, new: Body, args: Sequence[Any], contract: Contract) -> Difference:
    """Where ``new`` breaks the contract against ``old`` on these arguments."""
    if contract is Contract.ROUNDING:
        return _further_off(old, new, args)
    mode = Mode(unsigned=contract is Contract.VALUE)
    before, after = run(old, args, mode), run(new, args, mode)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"result {i} is {b.dtype}{list(b.shape)}, wanted {a.dtype}{list(a.shape)}"
        if a.tobytes() != b.tobytes():
            return f"result {i}: {_first(a, b)}"
    return None


def _first(a: Any, b: Any) -> str:
    """The first place where two arrays differ in their bits."""
    size = a.dtype.itemsize
    one, two = (np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).reshape(-1, size)
                for x in (a, b))  # fmt: skip
    at = int(np.flatnonzero((one != two).any(axis=1))[0])
    place = tuple(int(i) for i in np.unravel_index(at, a.shape)) if a.ndim else ()
    bits = one[at][::-1].tobytes().hex(), two[at][::-1].tobytes().hex()
    return (f"at {list(place)} wanted {a[place]!s} (bits {bits[0]}), "
            f"found {b[place]!s} (bits {bits[1]})")  # fmt: skip


def _further_off(old: Body, new: Body, args: Sequence[Any]) -> Difference:
    """Exactly evaluated, both are the same; rounded, ``new`` is no further off than ``old``.

    A zero has no sign in either, as no contract but BITWISE promises one.
    """
    said = _apart(old, new, args, Mode(wide=True, unsigned=True))
    if said is not None and looks_at_bits(new):
        # What is read as bits was rounded to its type. A half of a narrow float's last place is no
        # small thing: let it be rounded alike in both, wherever it is made.
        return _apart(old, new, args, Mode(wide=True, unsigned=True, rounds_narrow=True))
    return said


def _apart(old: Body, new: Body, args: Sequence[Any], wide: Mode) -> Difference:
    before_jax = sum(BY_JAX.values())
    exact, other = run(old, args, wide), run(new, args, wide)
    plain, found = run(old, args, UNSIGNED), run(new, args, UNSIGNED)
    rounded = sum(BY_JAX.values()) > before_jax  # jax itself computes nothing in float64 here
    share = 0.5 if rounded or looks_at_bits(new) else 1e-5
    for count in (NOISY, MORE_NOISY):
        spreads = _spreads(old, args, exact, count)
        said = _compared(exact, other, plain, found, spreads, share)
        if said is None:
            return None
    return said


def looks_at_bits(body: Body) -> bool:
    """Whether a float is read as an integer somewhere: there it is rounded to its type."""
    for eqn in jaxprs.opened(body).eqns:
        if eqn.primitive is _BITCAST and is_float(eqn.invars[0].aval.dtype):
            return True
        if any(looks_at_bits(e.body) for e in bodies.carried(eqn).entered):
            return True
    return False


def _spreads(old: Body, args: Sequence[Any], exact: Sequence[Any], count: int) -> list[float]:
    """How far noise in every rounding takes each result from its exact value."""
    worst = [0.0] * len(exact)
    for seed in range(count):
        noisy = run(old, args, _noisy(seed))
        for i, (a, b) in enumerate(zip(exact, noisy)):
            worst[i] = max(worst[i], distance(a, b))
    return worst


def _noisy(seed: int) -> Mode:
    return Mode(unsigned=True, noise=np.random.default_rng(seed))


def decided_by_rounding(old: Body, args: Sequence[Any], exact: bool) -> str | None:
    """What rounding alone decides in a program as it was written; None where nothing is.

    A comparison, an order or an integer that falls out otherwise in float64; or, unless the values
    are such that nothing is rounded, when every rounding is off by up to one more unit in the last
    place. A rewrite that moves a rounding may turn it round, and what follows is as far apart as
    what was chosen between: no contract says which it is.

    Args:
        old: the program.
        args: its arguments.
        exact: whether sums and products of the arguments are exact, so that noise would decide what
            rounding doesn't.
    """
    plain = _decisions(old, args, UNSIGNED)
    modes = [Mode(wide=True, unsigned=True), *(() if exact else map(_noisy, range(MORE_NOISY)))]
    for mode in modes:
        found = _decisions(old, args, mode)
        for (name, a), (_, b) in zip(plain, found):
            if a != b:
                how = "in float64" if mode.wide else "with noise in the last place"
                return f"the program's own {name} falls out otherwise {how}"
    return None


def _decisions(body: Body, args: Sequence[Any], mode: Mode) -> list[Decision]:
    evaluation = Evaluation(mode)
    evaluation.decisions = []
    evaluation.run(body, args)
    return evaluation.decisions


def distance(a: Any, b: Any) -> float:
    """The greatest difference; infinite where one is finite and the other is not."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    finite = np.isfinite(a)
    if a.size == 0 or not finite.any():
        return 0.0
    off = np.abs(np.where(finite, b - a, 0.0))
    return float(np.max(np.where(np.isnan(off), np.inf, off)))


Arrays = Sequence[Any]


def _compared(
    exact: Arrays, other: Arrays, plain: Arrays, found: Arrays, spreads: Sequence[float],
    share: float,
) -> Difference:  # fmt: skip
    for i, (e, o, p, f) in enumerate(zip(exact, other, plain, found, strict=True)):
        if p.dtype != f.dtype or p.shape != f.shape:
            return f"result {i} is {f.dtype}{list(f.shape)}, wanted {p.dtype}{list(p.shape)}"
        finite = np.abs(e[np.isfinite(e)]) if is_float(p.dtype) else np.abs(e.astype(np.float64))
        scale, spread = float(np.max(finite, initial=0.0)), spreads[i]
        apart = distance(e, o)
        # What is smaller than the type can tell from zero is zero to it, not to float64.
        tiny = float(jnp.finfo(p.dtype).tiny) if is_float(p.dtype) else 0.0
        if apart > share * spread + 1e-11 * scale + tiny:
            return (f"result {i}: in float64 the two are {apart:.3g} apart, where rounding to "
                    f"{p.dtype} makes {spread:.3g} of values up to {scale:.3g}")  # fmt: skip
        before, after = distance(e, p), distance(e, f)
        if after > 1.10 * before + 4 * spread + 1e-13 * scale + tiny:
            return (f"result {i}: off by {after:.3g}, the original by {before:.3g}; "
                    f"noise in its roundings makes {spread:.3g}")  # fmt: skip
    return None


Compare = Callable[[Body, Body, Sequence[Any], Contract], Difference]
