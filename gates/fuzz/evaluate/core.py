"""Walk a jaxpr: each operation by its rule, each body by what its equation does with it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ....compat import bodies, jaxprs, tracing
from ....compat.bodies import Role
from ....compat.jaxprs import Body, Eqn
from .collectives import COLLECTIVES, Mesh, Spread
from .decisions import Decision, decided
from .mode import PLAIN, Mode
from .promises import BrokenPromise
from .rules import RULES

for _module in ("elementwise", "layout", "indexing", "order", "products"):
    importlib.import_module(f".{_module}", __package__)

MOST_ITERATIONS = 1000
"""Of a while loop, before it is taken for one that doesn't end."""


class DoesNotEnd(Exception):
    """A while loop ran for too long."""


class Evaluation:
    """One evaluation of one program, and what could not be done by a rule."""

    def __init__(self, mode: Mode = PLAIN) -> None:
        self.mode = mode
        self.by_jax: dict[str, int] = {}
        """Equations handed to jax itself, by primitive."""
        self.decisions: list[Decision] | None = None
        """What floats decided, in order, where it is to be noted."""

    def run(self, closed: Body, args: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr on arrays."""
        with np.errstate(all="ignore"):
            spread = [[self.mode.settled(np.asarray(a))] for a in args]
            return [np.asarray(v[0]) for v in self._body(closed, spread, {})]

    def _body(self, body: Body, args: Sequence[Spread], mesh: Mesh) -> list[Spread]:
        jaxpr, count = jaxprs.opened(body), _devices(mesh)
        env: dict[Any, Spread] = {}
        for var, value in zip(jaxpr.constvars, jaxprs.consts(body), strict=True):
            env[var] = [self.mode.settled(np.asarray(value))] * count
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Spread:
            if jaxprs.is_literal(atom):
                value = np.asarray(atom.val, getattr(atom.aval, "dtype", None))
                return [self.mode.settled(value)] * count
            return env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(a) for a in eqn.invars], mesh)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
        special = _SPECIAL.get(eqn.primitive.name)
        if special is not None:
            return special(self, eqn, ins, mesh)
        name = eqn.primitive.name
        if name in COLLECTIVES:
            if not mesh:
                raise BrokenPromise(f"{name} where devices go different ways")
            return self._settled(COLLECTIVES[name](self.mode, eqn, mesh, ins))
        entered = bodies.carried(eqn).entered
        if len(entered) == 1 and entered[0].role is Role.CALL and name != "run_scoped":
            return self._body(entered[0].body, ins, mesh)
        if (
            self.mode.noise is None
            and ins
            and all(v[d] is v[0] for v in ins for d in range(len(v)))
        ):
            one = self._leaf(eqn, [v[0] for v in ins])
            return [[out] * _devices(mesh) for out in one]
        replay, each = self.mode.replay(), []
        for d in range(_devices(mesh)):
            replay()
            each.append(self._leaf(eqn, [v[d] for v in ins]))
        return [list(out) for out in zip(*each)]

    def _settled(self, outs: list[Spread]) -> list[Spread]:
        return [[self.mode.settled(np.asarray(v)) for v in out] for out in outs]

    def _leaf(self, eqn: Eqn, ins: Sequence[Any]) -> list[Any]:
        fn = RULES.get(eqn.primitive.name)
        try:
            outs = self._by_jax(eqn, ins) if fn is None else fn(self.mode, eqn, ins)
        except NotImplementedError:
            outs = self._by_jax(eqn, ins)
        outs = outs if isinstance(outs, list) else [outs]
        if self.decisions is not None:
            self.decisions += decided(eqn, ins, outs)
        return [self.mode.settled(np.asarray(v)) for v in outs]

    def _by_jax(self, eqn: Eqn, ins: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        self.by_jax[name] = self.by_jax.get(name, 0) + 1
        nominal = [self.mode.nominal(a.aval, x) for a, x in zip(eqn.invars, ins)]
        outs = tracing.rebind(eqn, [jax.numpy.asarray(x) for x in nominal])
        return [np.asarray(jax.device_get(v)) for v in outs]


def _devices(mesh: Mesh) -> int:
    return int(np.prod(list(mesh.values()), dtype=np.int64)) if mesh else 1


Special = Callable[[Evaluation, Eqn, list[Spread], Mesh], list[Spread]]


def _reduce(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    """`lax.reduce` with a combiner of its own: one element after another."""
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["body_jaxpr"]
    axes, count = tuple(eqn.params["dimensions"]), len(ins) // 2
    outs: list[Spread] = [[None] * _devices(mesh) for _ in range(count)]
    replay = run.mode.replay()
    for d in range(_devices(mesh)):
        replay()
        xs = [_leading(v[d], axes) for v in ins[:count]]
        shape = xs[0].shape[1:]
        totals = [np.broadcast_to(v[d], shape).reshape(-1) for v in ins[count:]]
        for at in range(xs[0].shape[0]):
            parts = [x[at].reshape(-1) for x in xs]
            # Combiners are made of elementwise operations, which take whole rows as well.
            args = [[t] for t in (*totals, *parts)]
            totals = [v[0] for v in run._body(body, args, {})]
        for out, total in zip(outs, totals):
            out[d] = np.asarray(total).reshape(shape)
    return outs


def _leading(x: Any, axes: tuple[int, ...]) -> Any:
    others = [i for i in range(x.ndim) if i not in axes]
    count = int(np.prod([x.shape[i] for i in axes], dtype=np.int64))
    return np.transpose(x, (*axes, *others)).reshape(count, *(x.shape[i] for i in others))


def _scan(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    num_consts, num_carry, _, num_ys = bodies.scan_counts(eqn)
    p, count = eqn.params, _devices(mesh)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    xs, length = ins[num_consts + num_carry :], p["length"]
    ys: list[list[Spread]] = []
    for i in reversed(range(length)) if p["reverse"] else range(length):
        parts = [[v[d][i] for d in range(count)] for v in xs]
        outs = run._body(p["jaxpr"], [*consts, *carry, *parts], mesh)
        carry = outs[:num_carry]
        ys.append(outs[num_carry:])
    ys = ys[::-1] if p["reverse"] else ys
    stacked: list[Spread] = []
    for j in range(num_ys):
        aval = eqn.outvars[num_carry + j].aval
        empty = run.mode.settled(np.zeros(aval.shape, aval.dtype))
        stacked.append([np.stack([y[j][d] for y in ys]) if ys else empty for d in range(count)])
    return [*carry, *stacked]


def _alone(value: Spread, device: int) -> Spread:
    return [value[device]]


def _while(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    tests, consts, carry = ins[:nc], ins[nc : nc + nb], ins[nc + nb :]
    for _ in range(MOST_ITERATIONS):
        (goes_on,) = run._body(p["cond_jaxpr"], [*tests, *carry], mesh)
        decided = {bool(np.any(v)) for v in goes_on}
        if decided == {False}:
            return carry
        if len(decided) > 1:
            return _each_alone(run, eqn, [*tests, *consts, *carry], mesh, _while)
        after = run._body(p["body_jaxpr"], [*consts, *carry], mesh)
        carry = [[_still(g, a, c) for g, a, c in zip(goes_on, *two)] for two in zip(after, carry)]
    raise DoesNotEnd(f"a while loop ran {MOST_ITERATIONS} times")


def _still(goes_on: Any, after: Any, before: Any) -> Any:
    """Under vmap, a lane that has ended keeps its values while others go on."""
    if np.ndim(goes_on) == 0:
        return after
    return np.where(
        goes_on.reshape(goes_on.shape + (1,) * (after.ndim - goes_on.ndim)), after, before
    )


def _each_alone(
    run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh, special: Special
) -> list[Spread]:
    """Device by device, where they go different ways: then no collective can stand there."""
    replay, each = run.mode.replay(), []
    for d in range(_devices(mesh)):
        replay()
        each.append(special(run, eqn, [_alone(v, d) for v in ins], {}))
    return [[v[0] for v in out] for out in zip(*each)]


def _cond(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    branches = eqn.params["branches"]
    which = {min(max(int(v), 0), len(branches) - 1) for v in ins[0]}
    if len(which) > 1:
        return _each_alone(run, eqn, ins, mesh, _cond)
    return run._body(branches[which.pop()], ins[1:], mesh)


def _platform_index(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    platforms = eqn.params["platforms"]
    at = next(i for i, names in enumerate(platforms) if names is None or "cpu" in names)
    return [[np.asarray(at, np.int32)] * _devices(mesh)]


def _shard_map(run: Evaluation, eqn: Eqn, ins: list[Spread], mesh: Mesh) -> list[Spread]:
    if mesh:
        raise NotImplementedError("a shard_map in a shard_map")
    p = eqn.params
    manual = p.get("newly_manual_axes", p.get("manual_axes"))
    inner = {a: n for a, n in p["mesh"].shape.items() if a in manual}
    args = [_scattered(v[0], spec, inner) for v, spec in zip(ins, p["in_specs"])]
    outs = run._body(p["jaxpr"], args, inner)
    return [
        [_gathered(v, spec, inner, var.aval)]
        for v, spec, var in zip(outs, p["out_specs"], eqn.outvars)
    ]


def _places(spec: Any, mesh: Mesh, device: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """Which part of an array of ``shape`` lies on a device."""
    at = dict(zip(mesh, np.unravel_index(device, tuple(mesh.values()))))
    parts = []
    for n, entry in zip(shape, (*spec, *[None] * len(shape))):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        axes = tuple(a for a in axes if a in mesh)
        index, count = 0, 1
        for a in axes:
            index, count = index * mesh[a] + int(at[a]), count * mesh[a]
        parts.append(slice(index * n // count, (index + 1) * n // count))
    return tuple(parts)


def _scattered(value: Any, spec: Any, mesh: Mesh) -> Spread:
    if all(entry is None for entry in spec):
        return [value] * _devices(mesh)
    return [value[_places(spec, mesh, d, value.shape)] for d in range(_devices(mesh))]


def _gathered(value: Spread, spec: Any, mesh: Mesh, aval: Any) -> Any:
    if all(entry is None for entry in spec):
        return value[0]
    whole = np.zeros(aval.shape, value[0].dtype)
    for d in reversed(range(_devices(mesh))):  # of replicas, the first device's counts
        whole[_places(spec, mesh, d, aval.shape)] = value[d]
    return whole


_SPECIAL: Mapping[str, Special] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "platform_index": _platform_index,
    "reduce": _reduce,
}
