"""Ways to break a rewrite: each makes, of what was put in place, one deliberately wrong copy.

What is changed is one value on its way: an operand, a result, an input or an output. So a mutant
is a program of the same types, and is run as the rewrite itself is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.bodies import Role
from ...compat.jaxprs import Eqn
from ...passes.engine.fragments import Cut
from .evaluate import bind, is_float

Values = list[Any]
Change = Callable[[Values], Values]


@dataclass(frozen=True)
class Mutation:
    """One change to a rewrite."""

    name: str
    eqn: Eqn | None = None
    """The equation that is changed, told by identity; None for inputs and outputs."""
    inputs: Change | None = None
    outputs: Change | None = None
    run: Callable[[Eqn, Values], Values] | None = None
    """What the changed equation computes."""
    guard: bool = False
    """Whether it may change nothing here: a clamp of what is within bounds anyway, or a rounding
    of what was widened."""


def mutations(whole: Cut, put: Sequence[Eqn], most: int) -> list[Mutation]:
    """The changes to make to a rewrite: those of inputs and outputs, and some of equations.

    Args:
        whole: the rewrite, with what is run before it.
        put: the equations of the rewrite alone.
        most: about how many.
    """
    ends = [*_of_outputs(whole), *_of_inputs(whole)]
    inside = list(_of_equations(put))
    room = max(most - len(ends), most // 2)
    if len(inside) > room:
        inside = [inside[i * len(inside) // room] for i in range(room)]
    return [*ends, *inside]


def _at(slot: int, change: Callable[[Any], Any]) -> Change:
    def changed(values: Values) -> Values:
        return [change(v) if i == slot else v for i, v in enumerate(values)]

    return changed


def _swap(a: int, b: int) -> Change:
    def changed(values: Values) -> Values:
        values = list(values)
        values[a], values[b] = values[b], values[a]
        return values

    return changed


def narrowed(x: Any) -> Any:
    """Rounded to bfloat16 and back."""
    return lax.reduce_precision(x, 8, 7)


def interleaved(x: Any) -> Any:
    """Halves of the last dimension laid out in turns: [a0|a1|b0|b1] as [a0|b0|a1|b1]."""
    n = x.shape[-1]
    parts = x.reshape(*x.shape[:-1], 2, 2, n // 4)
    return jnp.swapaxes(parts, -3, -2).reshape(x.shape)


def halves_swapped(x: Any) -> Any:
    """The halves of the last dimension in each other's place."""
    return jnp.roll(x, x.shape[-1] // 2, axis=-1)


def _longest(shape: Sequence[int]) -> int:
    return int(np.argmax(shape))


def _of_outputs(after: Cut) -> Iterator[Mutation]:
    avals = [a.aval for a in after.outputs]
    for i, aval in enumerate(avals):
        shape, name = aval.shape, f"output {i}"
        if is_float(aval.dtype):
            yield Mutation(f"{name} shrunk by 0.5 %", outputs=_at(i, _shrunk))
            if aval.dtype == np.float32:
                yield Mutation(f"{name} rounded to bfloat16", outputs=_at(i, narrowed), guard=True)
            if shape and shape[-1] >= 4 and shape[-1] % 4 == 0:
                yield Mutation(f"{name}: halves interleaved", outputs=_at(i, interleaved))
        elif aval.dtype != np.bool_:
            yield Mutation(f"{name} one too great", outputs=_at(i, lambda x: x + 1))
        if shape and max(shape) > 1:
            axis = _longest(shape)
            roll = lambda x, d=axis: jnp.roll(x, 1, axis=d)
            flip = lambda x, d=axis: jnp.flip(x, axis=d)
            yield Mutation(f"{name} shifted by one along axis {axis}", outputs=_at(i, roll))
            yield Mutation(f"{name} reversed along axis {axis}", outputs=_at(i, flip))
            if shape[-1] > 1 and shape[-1] % 2 == 0:
                yield Mutation(f"{name}: halves swapped", outputs=_at(i, halves_swapped))
        if len(shape) >= 2 and shape[-1] == shape[-2] > 1:
            turned = lambda x: jnp.swapaxes(x, -1, -2)
            yield Mutation(f"{name} transposed", outputs=_at(i, turned))
    for a, b in _alike(avals):
        yield Mutation(f"outputs {a} and {b} swapped", outputs=_swap(a, b))


def _shrunk(x: Any) -> Any:
    return (x.astype(jnp.float32) * np.float32(0.995)).astype(x.dtype)


def _of_inputs(after: Cut) -> Iterator[Mutation]:
    read = {a for e in after.eqns for a in e.invars if jaxprs.is_var(a)}
    avals = [v.aval if v in read else None for v in after.inputs]
    for i, aval in enumerate(avals):
        if aval is None or not is_float(aval.dtype):
            continue
        if aval.dtype == np.float32:
            yield Mutation(f"input {i} rounded to bfloat16", inputs=_at(i, narrowed), guard=True)
        if aval.shape and aval.shape[-1] >= 4 and aval.shape[-1] % 4 == 0:
            yield Mutation(f"input {i}: halves interleaved", inputs=_at(i, interleaved))
    for a, b in _alike(avals):
        yield Mutation(f"inputs {a} and {b} swapped", inputs=_swap(a, b))


def _alike(avals: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Neighbouring values of one type."""
    last: dict[tuple[Any, ...], int] = {}
    for i, aval in enumerate(avals):
        if aval is None:
            continue
        key = tuple(aval.shape), aval.dtype
        if key in last:
            yield last[key], i
        last[key] = i


def leaves(eqns: Sequence[Eqn]) -> Iterator[Eqn]:
    """The equations that `evaluate` asks a rule about: those inside of calls, too."""
    for eqn in eqns:
        entered = compat_bodies.carried(eqn).entered
        if len(entered) == 1 and entered[0].role is Role.CALL:
            yield from leaves(jaxprs.opened(entered[0].body).eqns)
        elif not entered:
            yield eqn


_ORDERED = set("sub div rem pow atan2 lt le gt ge shift_left shift_right_logical concatenate "
               "shift_right_arithmetic dot_general".split())  # fmt: skip
_OPPOSITE = {"max": lax.min, "min": lax.max, "add": lax.sub, "add_any": lax.sub, "and": lax.bitwise_or,
             "or": lax.bitwise_and, "lt": lax.ge, "ge": lax.lt, "eq": lax.ne, "ne": lax.eq,
             "le": lax.gt, "gt": lax.le}  # fmt: skip
_NOTHING = {"optimization_barrier", "name", "copy", "copy_p", "pvary", "assume_range"}
"""What has no meaning to lose: the identity, to whoever computes."""
_GUARDS = {"max", "min", "clamp", "and", "select_n", "rem"}
_COUNTED = set("add sub mul div rem shift_left shift_right_logical shift_right_arithmetic and lt le "
               "gt ge eq ne max min".split())  # fmt: skip


def _of_equations(put: Sequence[Eqn]) -> Iterator[Mutation]:
    seen: set[int] = set()
    for number, eqn in enumerate(leaves(put)):
        if id(eqn) in seen:
            continue
        seen.add(id(eqn))
        name, ins = eqn.primitive.name, [a.aval for a in eqn.invars]
        label = f"{name} ({number})"
        if name in _NOTHING or len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "dtype"):
            continue
        out, guard = eqn.outvars[0].aval, name in _GUARDS
        same = len({(tuple(a.shape), a.dtype) for a in ins}) == 1
        if name in _ORDERED and len(ins) >= 2 and same and (name != "dot_general" or _square(out)):
            backwards = lambda e, ops: list(bind(e, ops[::-1]))
            yield Mutation(f"{label}: operands swapped", eqn, run=backwards, guard=guard)
        if name == "select_n" and len(ins) == 3:
            other = lambda e, ops: list(bind(e, [ops[0], ops[2], ops[1]]))
            yield Mutation(f"{label}: cases swapped", eqn, run=other, guard=guard)
        if name in _OPPOSITE and len(ins) == 2:
            turned = lambda e, ops, f=_OPPOSITE[name]: [f(*_arrays(e, ops))]
            yield Mutation(f"{label} turned into its opposite", eqn, run=turned, guard=guard)
        if name in _COUNTED:
            yield from _constants(eqn, label, guard)
        for slot, aval in enumerate(ins):
            literal = jaxprs.is_literal(eqn.invars[slot])
            if (aval.shape, aval.dtype) == (out.shape, out.dtype) and not literal:
                dropped = lambda e, ops, i=slot: [ops[i]]
                yield Mutation(f"{label} dropped", eqn, run=dropped, guard=guard)
                break
        if name == "iota" and jnp.issubdtype(out.dtype, jnp.integer):
            late = lambda e, ops: [v + 1 for v in bind(e, ops)]
            yield Mutation(f"{label} from one", eqn, run=late)


def _square(out: Any) -> bool:
    return len(out.shape) >= 2 and out.shape[-1] == out.shape[-2]


def _arrays(eqn: Eqn, operands: Values) -> Values:
    return [jnp.asarray(v, a.aval.dtype) for v, a in zip(operands, eqn.invars, strict=True)]


def _constants(eqn: Eqn, label: str, guard: bool) -> Iterator[Mutation]:
    for slot, atom in enumerate(eqn.invars):
        integer = jnp.issubdtype(getattr(atom.aval, "dtype", np.float32), jnp.integer)
        if not jaxprs.is_literal(atom) or not integer:
            continue
        for step in (1, -1):

            def moved(e: Eqn, ops: Values, i: int = slot, step: int = step) -> Values:
                ops = _arrays(e, ops)
                ops[i] = ops[i] + jnp.asarray(step, ops[i].dtype)
                return list(bind(e, ops))

            yield Mutation(f"{label}: constant {atom.val} {step:+d}", eqn, run=moved, guard=guard)
