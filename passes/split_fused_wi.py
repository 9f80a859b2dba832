"""split_fused_wi: parts of one array that go through the same chain and are joined again.

before:  ``concatenate([f(w[:, :m]), f(w[:, m:])])``, any number of parts, any chain ``f``
after:   ``f(w)``

Each equation of the chain works along the axis of the cut place by place: elementwise operations
with operands in lock-step or equal for all parts, conversions, reductions of which no order matters
and broadcasts over other axes (the per-channel scales of a fake quantisation), reshapes and
transposes that keep the axis, barriers (two become one), sums over devices, all_gathers and
psum_scatters along other axes, sharding constraints that leave the axis whole; also in calls, those
with derivatives of their own included: differentiated later, the whole has the parts' own rules. In
a backward pass the parts are cotangents, which concat_cotangents joins first.

The compiler doesn't do it. For bf16[8, 4096, 2048] in halves of float8 with scales by column, TPU7x
takes 318,275 estimated cycles and 134 MB of temporary memory before, 190,968 and none after; from
float32, 509,235 and 268 MB before, 318,275 and none after (libtpu 0.0.52).

A gradient taken of the rewritten function adds no padded halves up, so a zero in it may have the
other sign than before; and that of an operand which the parts share is one sum over the whole,
where it was a sum over each part, and is rounded otherwise. A gradient taken first and rewritten
then has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat.jaxprs import Atom
from ..compat.primitives import primitive
from ..matchers.along import Stop
from ..matchers.cuts import cut_from_one
from ..matchers.graph import OUTPUT, Scope, Value
from ..matchers.lockstep import Chain, chain_of
from ..matchers.origin import reach
from .base import Contract, Example, Match, Pass, Reason, Replacement
from .parts.told import told
from .parts.whole_chain import leaves, run, signature

_REQUIREMENTS = {
    "cut": ("the parts don't lie side by side in one array",
            "The parts are slices of one array, each from where the one before ends."),
    "different-ops": ("the parts go through different operations",
                      "All parts go through the same operations."),
    "together": ("one operation makes the parts, as one that another rewrite has put there does",
                 "Each part goes through operations of its own."),
    "different-params": ("an operation isn't the same on every part",
                         "Operations differ in nothing but the size along the axis."),
    "unsupported-op": ("an operation isn't known to work on each part by itself",
                       "Each operation is known to work along the axis place by place."),
    "float-sum": ("a sum of floats may be taken in another order over a wider array",
                  "Reductions give the same in any order."),
    "operands": ("an operand differs from part to part and is no part of one array",
                 "Other operands are parts of one array too, or equal for all parts and the axis."),
    "equal-operand": ("an array along the axis is the same for every part",
                      "What all parts share doesn't vary along the axis."),
    "reshape": ("a reshape doesn't keep the axis", "Reshapes keep the axis as it is."),
    "barrier": ("a barrier ties the parts to something else", "Barriers hold parts only."),
    "collective-axis": ("a collective runs along the axis of the cut",
                        "Collectives run along other axes."),
    "sharding": ("a sharding splits the axis, so that a device would hold a piece of the whole",
                 "Shardings leave the axis whole."),
    "context": ("equations were traced in different contexts",
                "All was traced in the context of the concatenation."),
    "kept": ("a part of the chain stands in a function given to relower.keep",
             "Nothing of the chain is kept as it is."),
    "too-long": ("the chain is too long to be looked through", "The chain has an end in sight."),
    "out-of-reach": ("the chain reads a value of a body inside",
                     "What the chain reads is in scope at the concatenation, or outside of it."),
}  # fmt: skip


def _chain(scope: Scope, index: int) -> Chain:
    key = "split_fused_wi", index
    known: Chain | None = scope.memo.get(key)
    if known is None:
        eqn = scope.eqns[index]
        known = scope.memo[key] = chain_of(scope, eqn.invars, int(eqn.params["dimension"]))
        if any(e.ctx != eqn.ctx for e in known.contexts):
            known.root, known.failure = None, Stop("context", "another context", "one context")
    return known


def _find(scope: Scope, index: int) -> Match | None:
    eqn = scope.eqns[index]
    if len(eqn.invars) < 2 or set(eqn.params) != {"dimension"}:
        return None
    chain = _chain(scope, index)
    reasons: dict[str, Stop] = {}
    operands: dict[Value, Atom] = {}
    wants: Value | None = None
    if chain.failure is not None:
        if not cut_from_one(scope, eqn.invars):
            return None  # no near miss: a concatenation like any other
        reasons[chain.failure.code] = chain.failure
    elif chain.root is not None:
        for value in leaves(chain.root):
            atom = reach(scope, value)
            if atom is not None:
                operands[value] = atom
            elif value.scope in _around(scope):
                wants = value
            else:
                reasons["out-of-reach"] = Stop("out-of-reach", "a value of a body inside",
                                               "a value in scope")  # fmt: skip
    found = {"chain": chain, "reasons": reasons, "operands": operands, "wants": wants}
    return Match(scope, index, found)


def _around(scope: Scope) -> list[Scope]:
    return [caller.scope for caller in scope.route() or ()]


def _going(scope: Scope) -> set[int]:
    """The equations of all chains that end here in a concatenation, which goes too."""
    known: set[int] | None = scope.memo.get("split_fused_wi")
    if known is None:
        roots = [i for i in scope.live if scope.eqns[i].primitive is primitive("concatenate_p")]
        chains = {i: _chain(scope, i) for i in roots}
        known = {i for i, chain in chains.items() if chain.root is not None}
        known |= {i for chain in chains.values() if chain.root is not None
                  for where, i in chain.passed if where == id(scope)}  # fmt: skip
        scope.memo["split_fused_wi"] = known
    return known


def _profitable(match: Match) -> Reason | None:
    """Nothing of the chain may be left for other readers, or it would be worked out twice."""
    scope = match.scope
    going = _going(scope)
    for where, index in sorted(match.captures["chain"].passed):
        readers = [] if where != id(scope) else [
            r for v in scope.eqns[index].outvars for r in scope.readers(v) if r not in going
        ]  # fmt: skip
        if readers:
            name = "an output" if readers[0] == OUTPUT else scope.eqns[readers[0]].primitive.name
            return Reason("read-elsewhere", "a part is read elsewhere, so it would be computed all"
                          " the same", f"{scope.eqns[index].primitive.name} read by {name}",
                          "parts that are read by the chain alone")  # fmt: skip
    return None


def _replace(match: Match) -> Replacement:
    chain, operands = match.captures["chain"], match.captures["operands"]
    values = list(operands)

    def whole(*given: Any) -> Sequence[Any]:
        return [run(chain.root, dict(zip(values, given, strict=True)))]

    atoms = tuple(operands[v] for v in values)
    wants = match.captures["wants"]
    key = signature(chain.root, values) if wants is None else None
    return Replacement(atoms, tuple(match.eqn.outvars), whole, key, wants)


def fake_quantised(w: jax.Array) -> jax.Array:
    """``w``, ``[in, out]``, rounded to float8 with a scale for each column."""
    scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 448.0
    return lax.optimization_barrier((w / scale).astype(jnp.float8_e4m3fn).astype(w.dtype) * scale)


def before(x: jax.Array, wi: jax.Array) -> jax.Array:
    """``x @ [gate | up]``, each half of ``wi`` quantised by itself."""
    half = wi.shape[1] // 2
    gate, up = fake_quantised(wi[:, :half]), fake_quantised(wi[:, half:])
    return x @ jnp.concatenate([gate, up], axis=1)


def after(x: jax.Array, wi: jax.Array) -> jax.Array:
    """The same, quantised as a whole: the scales are those of the columns."""
    return x @ fake_quantised(wi)


PASS = Pass(
    name="split_fused_wi",
    contract=Contract.BITWISE,
    summary="concatenate of f(part) for the parts of one array → f(array)",
    measure="concatenations",
    suggest="keep the fused weight whole through this chain; split it where it is read",
    roots=lambda: frozenset({primitive("concatenate_p")}),
    find=_find,
    requirements=told(_REQUIREMENTS, lambda m: m.captures["reasons"]),
    profitable=_profitable,
    replace=_replace,
    before=before,
    after=after,
    examples=lambda: (
        Example(
            (
                jax.ShapeDtypeStruct((16, 64), jnp.float32),
                jax.ShapeDtypeStruct((64, 32), jnp.float32),
            ),
            "quantised halves",
        ),
    ),
)
