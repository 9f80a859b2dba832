"""shared_lhs_dot: GEMMs of one operand with the parts of one array become one GEMM.

before:  ``w0, w1 = split(w, 2, -1); ragged_dot(x, w0, sizes), ragged_dot(x, w1, sizes)``
after:   ``split(ragged_dot(x, w, sizes), 2, -1)``

It helps because x is read once, and because the parts of a weight need not be copied out of it: a
grouped GEMM is a kernel, which reads its operands as wholes. Then gmm_swiglu may take the GEMM. A
forward computes the same products. In a backward of narrow floats, x's cotangent becomes one GEMM
that adds up in float32 where there were two whose results were rounded and added, which is the one
rounding that moves. Where the operands are as wide as the sum, that sum would be longer and less
exact (1.31 to 1.48 times the error, of two halves of 48 columns): there, x's cotangent stays one
GEMM for each part, and GEMMs that a SwiGLU reads are left to gmm_swiglu, which takes them in one
kernel as they are. It costs nothing but the parts of the result, which are read as slices.

Dense GEMMs are known too, but left as they are: XLA reads a part of a weight where it lies, and
takes what reads a result into the GEMM that makes it. Of bf16[8192,4096] times two halves of
bf16[4096,2048], two GEMMs take 285,085 estimated TPU7x cycles and no temporaries, and one with its
result cut takes 306,311 and 33.6 MB (libtpu 0.0.52).

The parts may stand in any order and be of any sizes, as long as they are all of the array. Calls of
megablox' `gmm` are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compat import vma
from ..compat.jaxprs import Eqn
from ..compat.primitives import primitive
from ..matchers.graph import Scope
from ..matchers.grouped_gemm import unnamed_param
from ..matchers.origin import reach
from ..matchers.pattern import Mismatch
from ..matchers.shared_lhs import Group, differing_params, find_shared_lhs, gemms, result_axis
from ..matchers.swiglu import alike, find_swiglu
from .base import Contract, Example, Match, Pass, Reason, Replacement, Requirement
from .parts.split_gemm import added_up_wider, split_gemm

_DENSE = frozenset({"dimension_numbers", "precision", "preferred_element_type", "out_sharding"})


def _find(scope: Scope, index: int) -> Match | Mismatch | None:
    group = find_shared_lhs(scope, index)
    if group is None:
        return None
    eqn = scope.eqns[index]
    name = _unnamed(eqn)
    if name is not None:
        return Mismatch((eqn.primitive.name, f"param {name}"), repr(eqn.params[name]), "none such")
    return Match(scope, index, {"group": group})


def _unnamed(eqn: Eqn) -> str | None:
    if eqn.primitive is primitive("dot_general_p"):
        return min(set(eqn.params) - _DENSE, default=None)
    return unnamed_param(eqn)


def _group(match: Match) -> Group:
    found: Group = match.captures["group"]
    return found


def _eqns(match: Match) -> list[Eqn]:
    return [match.scope.eqns[p.index] for p in _group(match).parts]


def _params(match: Match) -> Reason | None:
    first, *others = _eqns(match)
    for other in others:
        for name, (one, two) in differing_params(first, other).items():
            return Reason("params", f"the GEMMs have different {name}", f"{one} and {two}",
                          "equal ones")  # fmt: skip
    return None


def _casts(match: Match) -> Reason | None:
    found = {p.casts for p in _group(match).parts}
    if len(found) == 1:
        return None
    said = " and ".join(sorted(str([str(c) for c in casts]) for casts in found))
    return Reason("casts", "the parts are converted differently", said, "equal conversions")


def _axis(match: Match) -> Reason | None:
    axes = {p.axis for p in _group(match).parts}
    if len(axes) > 1:
        return Reason("axis", "the parts are cut along different axes", str(sorted(axes)), "one")
    if result_axis(match.eqn, next(iter(axes))) is not None:
        return None
    return Reason("axis", "the axis that is cut is not one of the results'",
                  f"axis {next(iter(axes))} of the right operand",
                  "an axis that is neither contracted nor of the batch or groups")  # fmt: skip


def _whole(match: Match) -> Reason | None:
    parts = _group(match).by_place
    size = parts[0].whole.atom.aval.shape[parts[0].axis]
    ends = [0, *(p.stop for p in parts)]
    if [p.start for p in parts] == ends[:-1] and ends[-1] == size:
        return None
    found = ", ".join(f"{p.start}:{p.stop}" for p in parts)
    return Reason("not-all", "the parts leave a gap or overlap", found, f"all of 0:{size}, once")


def _sharding(match: Match) -> Reason | None:
    found = [e.params.get("out_sharding") for e in _eqns(match)]
    specs = [getattr(getattr(e.invars[1].aval, "sharding", None), "spec", ()) for e in _eqns(match)]
    axis = _group(match).parts[0].axis
    split = [s for s in specs if len(s) > axis and s[axis] is not None]
    if not any(f is not None for f in found) and not split:
        return None
    return Reason("sharding", "a part of the result would be another device's",
                  str(split or found), "an axis that isn't split, none stated")  # fmt: skip


def _replace(match: Match) -> Replacement:
    parts, eqn = _group(match).parts, match.eqn
    places = _group(match).by_place
    axis = result_axis(eqn, parts[0].axis)
    assert axis is not None
    sizes = [p.stop - p.start for p in places]
    order = [places.index(p) for p in parts]
    casts, params = parts[0].casts, dict(eqn.params)
    varying = vma.varying(eqn.invars[1].aval)

    def gemm(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **params)

    def one(lhs: Any, whole: Any, *rest: Any) -> Sequence[Any]:
        for dtype in casts:
            whole = lax.convert_element_type(whole, dtype)
        whole = vma.pvary(whole, varying - vma.varying(jax.typeof(whole)))
        if added_up_wider(lhs.dtype):
            # split, and not slices: its transpose joins, those of slices add zeros to every part.
            found = lax.split(gemm(lhs, whole, *rest), sizes, axis)
        else:
            found = split_gemm(gemm, sizes, (parts[0].axis, axis))(lhs, whole, *rest)
        return [found[i] for i in order]

    # Of weights that a loop doesn't change, jax cuts the parts before the loop.
    whole = reach(match.scope, parts[0].whole)
    operands = (eqn.invars[0], eqn.invars[1] if whole is None else whole, *eqn.invars[2:])
    results = tuple(e.outvars[0] for e in _eqns(match))
    key = (tuple((p.start, p.stop) for p in parts), casts, varying, eqn.primitive)
    wants = parts[0].whole if whole is None else None
    also = tuple(p.index for p in parts[1:])
    return Replacement(operands, results, one, key, wants=wants, also=also)


def _profitable(match: Match) -> Reason | None:
    if match.eqn.primitive is primitive("dot_general_p"):
        return Reason("dense", "XLA reads parts of a weight in place, and fuses what follows",
                      "dense GEMMs", "grouped ones")  # fmt: skip
    if added_up_wider(match.eqn.invars[0].aval.dtype):
        return None
    for part in _group(match).parts:
        site = find_swiglu(match.scope, part.index)
        if site is not None and site.up is not None and alike(match.scope, site.gate, site.up):
            return Reason("swiglu", "one GEMM with the derivatives of several hides gate and up "
                          "from gmm_swiglu", str(match.eqn.invars[0].aval.dtype),
                          "narrower floats, or GEMMs that no SwiGLU reads")  # fmt: skip
    return None


def before(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows ``[m, k]`` of groups of these sizes, weights ``[groups, k, 2 · n]``."""
    gate, up = jnp.split(w, 2, axis=-1)
    return lax.ragged_dot(x, gate, sizes), lax.ragged_dot(x, up, sizes)


def after(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by one GEMM."""
    gate, up = jnp.split(lax.ragged_dot(x, w, sizes), 2, axis=-1)
    return gate, up


PASS = Pass(
    name="shared_lhs_dot",
    contract=Contract.ROUNDING,
    summary="grouped GEMMs of one x with the parts of one w → one, split",
    measure="dot_generals and ragged_dot_generals",
    suggest="multiply by the whole weight once, and split the result",
    roots=gemms,
    find=_find,
    requirements=(
        Requirement("params", "The GEMMs differ in their right operands only.", _params),
        Requirement("casts", "The parts are converted alike.", _casts),
        Requirement("axis", "The parts are cut along one axis that the results have.", _axis),
        Requirement("not-all", "The parts are all of the array, each element once.", _whole),
        Requirement("sharding", "That axis is not split over devices.", _sharding),
    ),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((16, 4), jnp.float32),
                jax.ShapeDtypeStruct((3, 4, 6), jnp.float32),
                np.array([5, 0, 8], np.int32),
            ),
            "two halves",
        ),
    ),
)
