"""Whether a rewrite's products are of lower precision than those whose place they take.

A CPU multiplies in full whatever is asked for, so no run shows it: on a TPU, float32 at default
precision is rounded to bfloat16 first. So what both sides ask for is read off their equations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.jaxprs import Eqn
from .record import Piece

_PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
_RANKS = {None: 0, lax.Precision.DEFAULT: 0, lax.Precision.HIGH: 1, lax.Precision.HIGHEST: 2}
_NAMES = ("DEFAULT", "HIGH", "HIGHEST")


@dataclass(frozen=True)
class Asked:
    """What the products of one side ask for."""

    ranks: dict[Any, list[int]]
    """Of products of operands that a lower precision rounds, by what they multiply."""
    algorithms: frozenset[str]
    """Those that are named, which have no order."""
    kernels: bool
    """Whether there are kernels, whose products aren't read."""

    @property
    def all(self) -> list[int]:
        """The ranks of every product."""
        return [r for ranks in self.ranks.values() for r in ranks]


def lowered(piece: Piece) -> str | None:
    """How the rewrite asks for less than what it replaces does; None where it doesn't.

    A rewrite of what has no product asks for what it wants: it takes no product's place.
    """
    before, after = asked(piece.before.eqns), asked(piece.after.eqns)
    if not before.all or not after.all:
        return None
    if min(after.all) < min(before.all):
        return _said(min(before.all), min(after.all))
    for kind, ranks in before.ranks.items():
        found = after.ranks.get(kind, [])
        for a, b in zip(sorted(found), sorted(ranks), strict=False):
            if len(found) == len(ranks) and a < b:
                return _said(b, a)
    return None


def _said(before: int, after: int) -> str:
    return (
        f"the rewrite multiplies at precision {_NAMES[after]}, and what it replaces at "
        f"{_NAMES[before]}: a CPU shows no difference, a TPU rounds operands"
    )


def not_compared(piece: Piece) -> tuple[str, ...]:
    """Notes on products whose precision can't be held against the original's."""
    before, after = asked(piece.before.eqns), asked(piece.after.eqns)
    notes = []
    if before.algorithms != after.algorithms and (before.all or before.algorithms) and (
        after.all or after.algorithms
    ):  # fmt: skip
        sides = (", ".join(sorted(s.algorithms)) or "none" for s in (before, after))
        notes.append("precision not comparable: algorithms {} became {}".format(*sides))
    if after.kernels and max(before.all, default=0) > 0:
        notes.append(
            f"precision not compared: {_NAMES[min(before.all)]} before, a kernel after"
        )  # fmt: skip
    return tuple(notes)


def asked(eqns: Sequence[Eqn]) -> Asked:
    """What products ask for, those in bodies included and those in kernels not."""
    ranks: dict[Any, list[int]] = defaultdict(list)
    algorithms: set[str] = set()
    kernels = False
    for eqn in _outside_kernels(eqns):
        kernels |= eqn.primitive.name == "pallas_call"
        if eqn.primitive.name not in _PRODUCTS or not any(map(_is_rounded, eqn.invars[:2])):
            continue
        given = eqn.params["precision"]
        pair = given if isinstance(given, tuple) else (given,)
        named = [str(p) for p in pair if _rank(p) is None]
        algorithms.update(named)
        if not named:
            ranks[_kind(eqn)].append(min(r for p in pair if (r := _rank(p)) is not None))
    return Asked(dict(ranks), frozenset(algorithms), kernels)


def _rank(precision: Any) -> int | None:
    """Where a precision stands; None for a named algorithm."""
    if precision is lax.DotAlgorithmPreset.DEFAULT:
        return 0
    known = precision is None or isinstance(precision, lax.Precision)
    return _RANKS[precision] if known else None


def _is_rounded(atom: Any) -> bool:
    """Whether a lower precision rounds a product's operand: floats beyond bfloat16."""
    dtype = atom.aval.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    return bool(jnp.issubdtype(dtype, jnp.floating)) and (
        jnp.finfo(dtype).nmant > jnp.finfo(jnp.bfloat16).nmant
    )


def _kind(eqn: Eqn) -> Any:
    """What is multiplied, and how: products of one kind may stand for each other."""
    types = tuple((tuple(np.shape(a.aval)), str(a.aval.dtype)) for a in (*eqn.invars, *eqn.outvars))
    numbers = [str(v) for k, v in sorted(eqn.params.items()) if "dimension_numbers" in k]
    return eqn.primitive.name, types, tuple(numbers)


def _outside_kernels(eqns: Sequence[Eqn]) -> Iterator[Eqn]:
    for eqn in eqns:
        yield eqn
        for entered in compat_bodies.carried(eqn).entered:
            if entered.role is not compat_bodies.Role.KERNEL:
                yield from _outside_kernels(jaxprs.opened(entered.body).eqns)
