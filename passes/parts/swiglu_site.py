"""What a SwiGLU over grouped GEMMs leaves to be read, and the kernel's call in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...compat.jaxprs import Var
from ...compat.tracing import call_again
from ...kernels.grouped_swiglu.api import grouped_swiglu
from ...matchers.graph import OUTPUT, Scope
from ...matchers.grouped_gemm import GroupedGemm, grouped_gemm
from ...matchers.logistic import Spelling
from ...matchers.swiglu import SwiGlu, Traced, is_needed
from ..base import Replacement
from .grouped_checks import one_precision

_SILU: dict[Spelling, Callable[[jax.Array], jax.Array]] = {
    Spelling.LOGISTIC: jax.nn.silu,
    Spelling.RECIPROCAL: lambda x: x * (1 / (1 + jnp.exp(-x))),
    Spelling.QUOTIENT: lambda x: x / (1 + jnp.exp(-x)),
}


@dataclass(frozen=True)
class Needs:
    """What of a site is read besides the product."""

    with_gemm: bool
    """Whether gate or up is."""
    others: tuple[int, ...]
    """Equations that read the GEMM's whole result, `OUTPUT` for the body's outputs."""
    vanishing: tuple[int, ...]
    """Equations whose names nothing would carry any more."""


def gemms(scope: Scope, site: SwiGlu) -> tuple[GroupedGemm, GroupedGemm]:
    """The gate's and the up's, which may be one."""
    assert site.up is not None
    found = [grouped_gemm(scope.eqns[t.gemm]) for t in (site.gate, site.up)]
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def needs_of(scope: Scope, site: SwiGlu) -> Needs:
    """What is still read once the product comes from elsewhere."""
    assert site.up is not None
    traced = (site.gate, site.up)
    gone = frozenset({site.product, site.result})
    read = any(is_needed(scope, t.part, gone) for t in traced)
    names = {n for t in traced for n in t.names}
    vanishing = {n for n in names if not is_needed(scope, scope.eqns[n].outvars[0], gone)}
    vanishing |= {n for t in traced for n in t.whole_names}
    path = frozenset(i for t in traced for i in t.path)
    wholes = [scope.eqns[i].outvars[0] for i in path if i not in _cuts(traced)]
    wholes += [scope.eqns[t.gemm].outvars[0] for t in traced if t.half is not None]
    others = {r for v in wholes for r in scope.readers(v) if r not in path and (
        r == OUTPUT or any(is_needed(scope, o, gone) for o in scope.eqns[r].outvars)
    )}  # fmt: skip
    return Needs(read, tuple(sorted(others)), tuple(sorted(vanishing)))


def _cuts(traced: Sequence[Traced]) -> set[int]:
    return {t.cut for t in traced if t.cut is not None}


def replacement_of(scope: Scope, site: SwiGlu) -> Replacement:
    """The kernel's call at the first GEMM, in place of what is read."""
    assert site.up is not None
    first, second = gemms(scope, site)
    fused = site.gate.half is not None
    weights = (first.rhs,) if fused else (first.rhs, second.rhs)
    wanted = needs_of(scope, site).with_gemm
    parts = _parts(scope, site) if wanted else {}
    rest = {i for i in (site.gate.gemm, site.up.gemm, site.result) if i != site.first}
    also = tuple(sorted(rest | (_cuts((site.gate, site.up)) if wanted else set())))
    results = tuple(v for i in (site.first, *also) for v in scope.eqns[i].outvars)
    out = scope.eqns[site.result].outvars[0]
    product = scope.eqns[site.product].outvars[0].aval.dtype
    kinds = [(v is out, parts.get(v), v.aval.shape, v.aval.dtype) for v in results]
    activation = activation_of(site, product, out.aval.dtype)
    root = scope.eqns[site.first]

    def gemm(*operands: Any) -> Any:
        (found,) = call_again(root, [o for o in operands if o is not None])
        return found

    def run(lhs: Any, sizes: Any, *rest: Any) -> Sequence[Any]:
        given, offset = rest[: len(weights)], [*rest[len(weights) :]]
        done = grouped_swiglu(
            lhs, given[0] if fused else (given[0], given[1]), sizes,
            group_offset=offset[0] if offset else None,
            gate_first=site.gate.half != 1, transpose_rhs=first.transpose_rhs,
            gemm=gemm if first.is_kernel else None, gemm_dtype=first.dtype,
            out_dtype=out.aval.dtype, with_gemm=wanted,
            precision=one_precision(first), activation=activation,
        )  # fmt: skip
        return [_value(done, *kind) for kind in kinds]

    offset = () if first.group_offset is None else (first.group_offset,)
    operands = (first.lhs, first.group_sizes, *weights, *offset)
    key = (site.gate.half, wanted, site.silu_dtype, site.spelling, site.casts, product,
           tuple(kinds))  # fmt: skip
    return Replacement(operands, results, run, key, also=also)


def _parts(scope: Scope, site: SwiGlu) -> dict[Var, int]:
    """Which of the kernel's results stands for a variable."""
    assert site.up is not None
    found: dict[Var, int] = {}
    for number, traced in ((1, site.gate), (2, site.up)):
        found[traced.part] = number
    return found


def _value(
    done: Sequence[jax.Array], is_product: bool, part: int | None, shape: Any, dtype: Any
) -> jax.Array:
    if is_product:
        return done[0]
    if part is not None:
        return done[part].astype(dtype)
    return lax.full(shape, 0, dtype)  # nobody reads it: it goes with what read it


def activation_of(
    site: SwiGlu, product: Any, out: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The activation as the program has it, in the types of the program: its derivative is meant.

    Args:
      site: the product.
      product: its type.
      out: the type of its one reader's cast, or the same.
    """

    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        activated = _SILU[site.spelling](gate.astype(site.silu_dtype))
        for dtype in reversed(site.casts):
            activated = activated.astype(dtype)
        return (activated * up.astype(product)).astype(out)

    return activation
