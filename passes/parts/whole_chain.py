"""Run a chain of equations once on the whole of an array instead of on each of its parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...compat import jaxprs, tracing
from ...matchers.along import on_whole
from ...matchers.chain import Call, Cut, Input, Node, Shared, Step
from ...matchers.graph import Value


def leaves(root: Node) -> list[Value]:
    """The values that a chain reads, without literals, each once."""
    found: dict[Value, None] = {}
    seen: set[int] = set()
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Cut | Shared):
            if not jaxprs.is_literal(node.value.atom):
                found[node.value] = None
        elif isinstance(node, Step):
            stack.extend(reversed(node.operands))
        elif isinstance(node, Call):
            stack.extend(o for o in reversed(node.operands) if o is not None)
            stack.append(node.inner)
    return list(found)


def signature(root: Node, values: Sequence[Value]) -> Hashable:
    """Equal for chains that do the same to as many values; equations count as objects."""
    places = {value: i for i, value in enumerate(values)}
    numbers: dict[int, int] = {}
    done: list[Hashable] = []

    def number(node: Node | None) -> int:
        if node is None:
            return -1
        if id(node) not in numbers:
            said = _said(node, places, number)
            numbers[id(node)] = len(done)
            done.append(said)
        return numbers[id(node)]

    number(root)
    return tuple(done)


def _said(
    node: Node, places: Mapping[Value, int], number: Callable[[Node | None], int]
) -> Hashable:
    if isinstance(node, Input):
        return "input", node.position
    if isinstance(node, Step):
        below = tuple(map(number, node.operands))
        return "step", node.eqns, node.result, node.axis, node.size, below
    if isinstance(node, Call):
        below = tuple(map(number, (node.inner, *node.operands)))
        return "call", node.eqns, node.axes, node.result, node.axis, node.sizes, below
    atom = node.value.atom
    literal = jaxprs.is_literal(atom)
    value = (str(atom.aval), np.asarray(atom.val).tobytes()) if literal else places[node.value]
    return ("cut", value, node.axis, node.starts, node.limits) if isinstance(node, Cut) else value


def run(root: Node, values: Mapping[Value, Any]) -> Any:
    """The result of a chain on the whole.

    Args:
      root: the chain.
      values: the arrays that it reads (`leaves`).
    """
    return _Run(values).value(root)


class _Run:
    def __init__(self, values: Mapping[Value, Any], inputs: Sequence[Any] = ()) -> None:
        self.values = values
        self.inputs = inputs
        self._done: dict[Any, Any] = {}

    def value(self, node: Node) -> Any:
        if isinstance(node, Input):
            return self.inputs[node.position]
        if isinstance(node, Step):
            return self._step(node)[node.result]
        if id(node) not in self._done:
            self._done[id(node)] = self._make(node)
        return self._done[id(node)]

    def _make(self, node: Cut | Shared | Call) -> Any:
        if isinstance(node, Call):
            return self._call(node)
        atom = node.value.atom
        x = self._literal(atom) if jaxprs.is_literal(atom) else self.values[node.value]
        if isinstance(node, Shared):
            return x
        whole = node.limits == tuple(x.shape) and not any(node.starts)
        return x if whole else lax.slice(x, node.starts, node.limits)

    def _literal(self, atom: Any) -> Any:
        return atom.val

    def _step(self, node: Step) -> list[Any]:
        """All results of an equation: a barrier of several values stays one.

        A body that is called twice has the same equations both times, of other operands.
        """
        key = (*map(id, node.eqns), node.axis, *map(id, node.operands))
        if key not in self._done:
            eqn = node.eqns[0]
            operands = [self.value(o) for o in node.operands]
            params = eqn.params if node.axis is None else on_whole(eqn, node.axis, node.size)
            found = eqn.primitive.bind(*operands, **params)
            self._done[key] = list(found) if eqn.primitive.multiple_results else [found]
        return self._done[key]  # type: ignore[no-any-return]

    def _call(self, node: Call) -> Any:
        given = [o for o in node.operands if o is not None]
        operands = [self.value(o) for o in given]
        slots = [i for i, o in enumerate(node.operands) if o is not None]
        parts = _Parts(node, slots)

        def on_whole(*wholes: Any) -> Any:
            filled = [a.val if jaxprs.is_literal(a) else None for a in node.eqns[0].invars]
            for slot, whole in zip(slots, wholes, strict=True):
                filled[slot] = whole
            return _Run(self.values, filled).value(node.inner)

        if "jvp_jaxpr_fun" in node.eqns[0].params:
            return _with_jvp(on_whole, parts)(*operands)
        return _with_vjp(on_whole, parts)(*operands)


class _Parts:
    """The calls that a `Call` stands for, one for each part: their rules are its derivative."""

    def __init__(self, node: Call, slots: Sequence[int]) -> None:
        self.node = node
        self.slots = slots
        self.axes = [node.axes[i] for i in slots]
        self.count = len(node.sizes)

    def call(self, part: int) -> Callable[..., Any]:
        node, eqn = self.node, self.node.eqns[part]

        def run(*operands: Any) -> Any:
            return tracing.run_equation(eqn, self.slots, operands)[node.result]

        return run

    def cut(self, x: Any, axis: int | None, part: int) -> Any:
        if axis is None:
            return x
        start = sum(self.node.sizes[:part])
        return lax.slice_in_dim(x, start, start + self.node.sizes[part], axis=axis)

    def operands(self, wholes: Sequence[Any], part: int) -> list[Any]:
        return [self.cut(w, axis, part) for w, axis in zip(wholes, self.axes, strict=True)]

    def join(self, parts: Sequence[Any]) -> Any:
        return lax.concatenate(list(parts), self.node.axis)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact))


def _with_jvp(fn: Callable[..., Any], parts: _Parts) -> Callable[..., Any]:
    called: Any = jax.custom_jvp(fn)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        done = []
        for part in range(parts.count):
            given = parts.operands(primals, part)
            moved = [
                parts.cut(t, axis, part) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
                for x, t, axis in zip(given, tangents, parts.axes, strict=True)
            ]
            done.append(jax.jvp(parts.call(part), given, moved))
        return parts.join([d[0] for d in done]), parts.join([d[1] for d in done])

    called.defjvp(rule)
    return called  # type: ignore[no-any-return]


def _with_vjp(fn: Callable[..., Any], parts: _Parts) -> Callable[..., Any]:
    called: Any = jax.custom_vjp(fn)

    def forward(*wholes: Any) -> tuple[Any, Any]:
        done = []
        for part in range(parts.count):
            done.append(jax.vjp(parts.call(part), *parts.operands(wholes, part)))
        return parts.join([d[0] for d in done]), [d[1] for d in done]

    def backward(backs: Sequence[Any], cotangent: Any) -> tuple[Any, ...]:
        found = [back(parts.cut(cotangent, parts.node.axis, i)) for i, back in enumerate(backs)]
        return tuple(
            _joined(list(each), axis) for each, axis in zip(zip(*found), parts.axes, strict=True)
        )

    called.defvjp(forward, backward)
    return called  # type: ignore[no-any-return]


def _joined(cotangents: list[Any], axis: int | None) -> Any:
    """Of an operand: its parts' side by side, or, where all parts shared it, their sum."""
    if cotangents[0].dtype == jax.dtypes.float0:
        return None
    if axis is not None:
        return lax.concatenate(cotangents, axis)
    total = cotangents[0]
    for other in cotangents[1:]:
        total = total + other
    return total
