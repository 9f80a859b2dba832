"""The routing part of the example's layer, cut at named values into fragments to be profiled alone.

The compiler's analysis doesn't survive the whole of it once it is rewritten. So the function is
traced whole, plain and by `relower.optimize` with every pass, and each of the two programs is cut
at the same values: a fragment computes one of them from others. What a pass did to it, it did with
the whole in view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import relower
from relower.compat import jaxprs

EXPERTS, TOP_K = 512, 10


def routing_values(logits: jax.Array, d_weights: jax.Array) -> dict[str, jax.Array]:
    """All that the example's layer computes of its routing, forward and backward, once each.

    Out are the router's matrix product, and everything that has the width of a token: the rows'
    way to the experts and back, whose transposes are scatter-adds of rows in the example and
    gathers after the passes.

    Args:
        logits: f32[tokens, experts].
        d_weights: f32[tokens, TOP_K], the cotangent of the weights.

    Returns:
        Values by name, those of forward first.
    """
    probabilities, pull_logits = jax.vjp(lambda x: jax.nn.softmax(x, axis=-1), logits)
    top, pull_probabilities, ids = jax.vjp(
        lambda x: tuple(lax.top_k(x, TOP_K)), probabilities, has_aux=True
    )
    weights, pull_top = jax.vjp(lambda x: x / jnp.sum(x, axis=-1, keepdims=True), top)
    slots = ids.reshape(-1)
    order = jnp.argsort(slots)
    (d_top,) = pull_top(d_weights)
    (d_probabilities,) = pull_probabilities(d_top)
    return {
        "probabilities": probabilities,
        "top": top,
        "ids": ids,
        "slots": slots,
        "weights": weights,
        "order": order,
        "tokens": order // TOP_K,
        "inverse": jnp.argsort(order),
        "sizes": jnp.bincount(slots, length=EXPERTS),
        "d_top": d_top,
        "d_probabilities": d_probabilities,
        "d_logits": pull_logits(d_probabilities)[0],
    }


@dataclass(frozen=True)
class Fragment:
    """What computes some of the named values, all others given."""

    name: str
    targets: tuple[str, ...]
    times: int
    """How often a step of the example runs it in each layer."""


FRAGMENTS = (
    # A layer is rematerialised: backward, its forward runs again.
    Fragment("softmax", ("probabilities",), 2),
    Fragment("top_k", ("top", "ids"), 2),
    Fragment("weights", ("weights",), 2),
    Fragment("ids in one row", ("slots",), 2),
    Fragment("order", ("order",), 2),
    Fragment("tokens of rows", ("tokens",), 2),
    Fragment("inverse", ("inverse",), 2),
    Fragment("group sizes", ("sizes",), 2),
    Fragment("weights, transposed", ("d_top",), 1),
    Fragment("top_k, transposed", ("d_probabilities",), 1),
    Fragment("softmax, transposed", ("d_logits",), 1),
)


class Cut:
    """One traced program, plain or rewritten, and its fragments."""

    def __init__(self, fn: Callable[..., dict[str, Any]], args: Sequence[Any]) -> None:
        self.closed = jax.make_jaxpr(fn)(*args)
        body = jaxprs.opened(self.closed)
        names = list(jax.eval_shape(routing_values, *args))  # a dict's leaves come sorted
        self._named = dict(zip(sorted(names), body.outvars, strict=True))
        self._inputs = dict(zip(("logits", "d_weights"), body.invars, strict=True))
        self._made = {v: i for i, eqn in enumerate(body.eqns) for v in eqn.outvars}
        self._eqns = body.eqns
        self._consts = dict(zip(body.constvars, jaxprs.consts(self.closed)))

    def fragment(self, targets: Sequence[str]) -> tuple[Callable[..., Any], list[Any]]:
        """A function that computes some values from whichever others it needs; these as types."""
        wanted = [self._named[name] for name in targets]
        given = {v for n, v in self._named.items() if n not in targets} | set(self._inputs.values())
        needed: set[int] = set()
        operands: dict[Any, None] = {}
        pending = list(wanted)
        while pending:
            var = pending.pop()
            if jaxprs.is_literal(var) or var in self._consts:
                continue
            if var in given and not any(var is w for w in wanted):
                operands[var] = None
            elif self._made[var] not in needed:
                needed.add(self._made[var])
                pending.extend(self._eqns[self._made[var]].invars)
        eqns = [self._eqns[i] for i in sorted(needed)]

        def run(*values: Any) -> list[Any]:
            env = {**self._consts, **dict(zip(operands, values, strict=True))}
            read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]
            for eqn in eqns:
                found = eqn.primitive.bind(
                    *map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params)
                )
                found = found if eqn.primitive.multiple_results else [found]
                env.update(zip(eqn.outvars, found))
            return [env[v] for v in wanted]

        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
        return run, types


def cuts(tokens: int) -> tuple[Cut, Cut]:
    """The routing part as it is, and rewritten by every pass."""
    args = (
        jax.ShapeDtypeStruct((tokens, EXPERTS), jnp.float32),
        jax.ShapeDtypeStruct((tokens, TOP_K), jnp.float32),
    )
    rewritten = relower.optimize(routing_values, contract="rounding")
    return Cut(routing_values, args), Cut(rewritten, args)
