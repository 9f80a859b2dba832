"""Judge a candidate's steps by the reference's, and by how far a replicate of it goes astray.

A figure's *spread* is the largest distance of a replicate from the reference. Of each leaf three
figures count: ``l2``, the relative L2 distance; ``cosine``, one minus the cosine; and ``scale``,
how far the projection onto the reference is from it. A gradient that is shrunk as a whole moves
``l2`` by as much as noise in low precision does, and ``scale`` by far more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .outputs import Array, Reading, wide

Status = Literal["holds", "broken", "undecided"]
FACTOR = 3.0
"""How many spreads a candidate may be away: a rewrite moves some roundings, a replicate all."""
_EPS_OF_SUMS = 2.0**-23
"""Products of long vectors are summed in float32 at best."""
BLIND_SCALAR = 0.1
BLIND_LEAF = 0.5
"""Limits from which on a figure shows nothing: half of a gradient could be wrong."""


@dataclass(frozen=True)
class Check:
    """One figure of one scalar or leaf: at the first step at which it is broken, else the worst."""

    of: str
    """``loss``, or ``grads/layers/wi``."""
    figure: str
    """``bits``, ``value``, ``exact``, ``relative``, ``l2``, ``cosine``, ``scale``, ``finite`` or
    ``shape``."""
    step: int
    """From 1."""
    found: float
    spread: float | None
    limit: float
    status: Status
    said: str = ""
    """What is wrong, where the figures don't say it."""

    @property
    def ratio(self) -> float:
        """How much of its limit the figure takes up."""
        return self.found / self.limit if self.limit else (0.0 if not self.found else np.inf)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what isn't finite is a string."""

        def number(x: float | None) -> float | str | None:
            return x if x is None or np.isfinite(x) else str(x)

        return {
            "of": self.of, "figure": self.figure, "step": self.step, "found": number(self.found),
            "spread": number(self.spread), "limit": number(self.limit), "status": self.status,
            "said": self.said,
        }  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What agreement means."""

    contract: Literal["bitwise", "value", "rounding"]
    factor: float = FACTOR


def judge(
    reference: Sequence[Reading],
    replicates: Sequence[Sequence[Reading]],
    candidate: Sequence[Reading],
    rule: Rule,
) -> list[Check]:
    """Each figure at the first step at which it is broken, or else at its worst.

    What is broken later may only follow from what was before, through the parameters.
    """
    found: list[Check] = []
    for step, (ref, cand) in enumerate(zip(reference, candidate, strict=True), 1):
        reps = [r[step - 1] for r in replicates]
        found += _group(step, "", ref.scalars, cand.scalars, [r.scalars for r in reps], rule)
        found += _group(step, "grads/", ref.grads, cand.grads, [r.grads for r in reps], rule)
        found += _group(step, "params/", ref.params, cand.params, [r.params for r in reps], rule)
    worst: dict[tuple[str, str], Check] = {}
    for check in found:
        key = check.of, check.figure
        known = worst.get(key)
        if known is None or (known.status != "broken" and _severity(check) > _severity(known)):
            worst[key] = check
    return list(worst.values())


def first_and_worst(checks: Iterable[Check]) -> list[Check]:
    """Those of the earliest step first, and of one step what takes up most of its limit."""
    return sorted(checks, key=lambda c: (c.step, -c.ratio))


def zeros(reference: Sequence[Reading], candidate: Sequence[Reading]) -> list[str]:
    """Gradient leaves that are zero in both, at every step: of these nothing was compared."""
    names = reference[0].grads
    return [
        name for name in names
        if all(name in c.grads and not np.any(r.grads[name]) and not np.any(c.grads[name])
               for r, c in zip(reference, candidate, strict=True))
    ]  # fmt: skip


def _severity(check: Check) -> tuple[int, float]:
    order = {"holds": 0, "undecided": 1, "broken": 2}
    return order[check.status], check.ratio


def _group(
    step: int,
    prefix: str,
    ref: Mapping[str, Array],
    cand: Mapping[str, Array],
    reps: Sequence[Mapping[str, Array]],
    rule: Rule,
) -> list[Check]:
    found: list[Check] = []
    for name in dict.fromkeys((*ref, *cand)):
        of = f"{prefix}{name}".rstrip("/")
        if name not in ref or name not in cand:
            side = "candidate" if name in ref else "reference"
            found.append(_wrong(of, "shape", step, f"the {side} has no such leaf"))
            continue
        r, c = ref[name], cand[name]
        if (r.shape, r.dtype) != (c.shape, c.dtype):
            said = f"{c.dtype}{list(c.shape)} in place of {r.dtype}{list(r.shape)}"
            found.append(_wrong(of, "shape", step, said))
            continue
        others = [rep[name] for rep in reps]
        finite = _finite(of, step, r, c)
        if finite is not None:
            found.append(finite)
        elif name == "tokens_kept" and not prefix:
            found.append(_exact(of, "exact", step, r, c, np.array_equal(r, c)))
        elif rule.contract == "bitwise":
            found.append(_exact(of, "bits", step, r, c, r.tobytes() == c.tobytes()))
        elif rule.contract == "value" or not _is_float(r):
            figure = "value" if rule.contract == "value" else "exact"
            found.append(_exact(of, figure, step, r, c, np.array_equal(r, c)))
        elif prefix:
            found += _leaf(of, step, wide(r), wide(c), [wide(x) for x in others], _eps(r), rule)
        else:
            found.append(_scalar(of, step, r, c, others, rule))
    return found


def _is_float(x: Array) -> bool:
    """Whether it holds floats; numpy itself doesn't know bfloat16 and float8 as such."""
    return bool(np.issubdtype(x.dtype, np.inexact)) or x.dtype.name.startswith(("bfloat", "float"))


def _eps(x: Array) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(x.dtype).eps)


def _wrong(of: str, figure: str, step: int, said: str) -> Check:
    return Check(of, figure, step, np.inf, None, 0.0, "broken", said)


def _finite(of: str, step: int, r: Array, c: Array) -> Check | None:
    """NaN and infinities: none in the candidate that the reference hasn't; and none is best."""
    if not _is_float(r):
        return None
    left, right = wide(r), wide(c)
    bad, worse = ~np.isfinite(left), ~np.isfinite(right)
    if not bad.any() and not worse.any():
        return None
    if np.array_equal(np.where(bad, left, 0), np.where(worse, right, 0), equal_nan=True):
        said = f"{bad.sum()} of {bad.size} values aren't finite in the reference either"
        return Check(of, "finite", step, 0.0, None, 0.0, "undecided", said)
    said = f"{worse.sum()} of {worse.size} values aren't finite, {bad.sum()} in the reference"
    return _wrong(of, "finite", step, said)


def _exact(of: str, figure: str, step: int, r: Array, c: Array, same: bool) -> Check:
    if same:
        return Check(of, figure, step, 0.0, None, 0.0, "holds")
    left, right = np.atleast_1d(r), np.atleast_1d(c)
    differ = left != right
    count = int(differ.sum())
    if not count:
        said = "equal as numbers; the sign of a zero or a NaN's payload differs"
        return _wrong(of, figure, step, said)
    at = tuple(int(i) for i in np.argwhere(differ)[0])
    place = "" if r.shape == () else f"{count:,} of {r.size:,} differ, first at {list(at)}: "
    return _wrong(of, figure, step, f"{place}{right[at]} in place of {left[at]}")


def _scalar(of: str, step: int, r: Array, c: Array, others: Sequence[Array], rule: Rule) -> Check:
    base, eps = abs(float(r)), _eps(r)
    near = [_relative(float(x), float(r), base) for x in others]
    spread = max(near, default=0.0)
    limit = rule.factor * max(spread, eps)
    return _bounded(of, "relative", step, _relative(float(c), float(r), base), spread, limit,
                    BLIND_SCALAR)  # fmt: skip


def _relative(a: float, b: float, base: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / base if base else np.inf


def _leaf(
    of: str,
    step: int,
    r: Array,
    c: Array,
    others: Sequence[Array],
    eps: float,
    rule: Rule,
) -> list[Check]:
    mine = _figures(r, c)
    near = [_figures(r, x) for x in others]
    l2, cosine, scale = (max((n[i] for n in near), default=0.0) for i in range(3))
    l2 = max(l2, eps)
    # Noise has no direction: a share 1 / √n of its length lies along the leaf, with n as many
    # elements as the leaf's length is made of.
    scale = max(scale, l2 / np.sqrt(_elements(r)), _EPS_OF_SUMS)
    k = rule.factor
    return [
        _bounded(of, "l2", step, mine[0], l2, k * l2, BLIND_LEAF),
        _bounded(of, "cosine", step, mine[1], cosine, k**2 * max(cosine, l2**2), BLIND_LEAF),
        _bounded(of, "scale", step, mine[2], scale, k * scale, BLIND_LEAF),
    ]


def _elements(r: Array) -> float:
    """Of how many elements a leaf consists, those weighing little counted little."""
    squares = np.square(np.abs(r / (np.max(np.abs(r)) or 1.0)))
    total = float(np.sum(squares))
    return max(total**2 / (float(np.sum(squares**2)) or 1.0), 1.0)


def _figures(r: Array, x: Array) -> tuple[float, float, float]:
    """Distance, one minus the cosine, and scale of ``x`` by ``r``."""
    a, b = r.ravel(), x.ravel()
    norm, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if norm == 0:
        return (0.0, 0.0, 0.0) if other == 0 else (np.inf, np.inf, np.inf)
    inner = float(np.real(np.vdot(a / norm, b)))
    cosine = 1.0 if other == 0 else 1.0 - inner / other
    return float(np.linalg.norm(b - a)) / norm, max(cosine, 0.0), abs(inner / norm - 1.0)


def _bounded(
    of: str, figure: str, step: int, found: float, spread: float, limit: float, blind: float
) -> Check:
    if not np.isfinite(limit):
        said = "a replicate of the reference isn't finite, or not zero where it is"
        return Check(of, figure, step, found, spread, limit, "undecided", said)
    if not found <= limit:
        return Check(of, figure, step, found, spread, limit, "broken")
    if limit >= blind:
        said = "the reference's own replicates go too far astray to show anything"
        return Check(of, figure, step, found, spread, limit, "undecided", said)
    return Check(of, figure, step, found, spread, limit, "holds")
