"""Collectives, on the values of all devices of a mesh at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import Mode, is_float

Mesh = Mapping[Any, int]
"""Sizes of the manual axes by name, in the order in which devices are numbered, slowest first."""
Spread = list[Any]
"""One value per device."""
Collective = Callable[[Mode, Eqn, Mesh, list[Spread]], list[Spread]]

COLLECTIVES: dict[str, Collective] = {}


def _names(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def groups(mesh: Mesh, axes: Sequence[Any]) -> list[list[int]]:
    """Devices that differ along ``axes`` only, ordered by their place along these."""
    sizes, names = tuple(mesh.values()), list(mesh)
    places = np.arange(int(np.prod(sizes, dtype=np.int64))).reshape(sizes)
    along = [names.index(a) for a in axes]
    others = [d for d in range(len(names)) if d not in along]
    count = int(np.prod([sizes[d] for d in along], dtype=np.int64))
    found: list[list[int]] = np.transpose(places, (*others, *along)).reshape(-1, count).tolist()
    return found


def _enter(*names: str) -> Callable[[Collective], Collective]:
    def enter(fn: Collective) -> Collective:
        COLLECTIVES.update(dict.fromkeys(names, fn))
        return fn

    return enter


def _grouped(eqn: Eqn) -> None:
    if eqn.params.get("axis_index_groups") is not None:
        raise NotImplementedError(f"{eqn.primitive.name} with axis_index_groups")


def _total(mode: Mode, aval: Any, values: Sequence[Any]) -> Any:
    """A sum in device order: narrow floats in float32, rounded once."""
    total = mode.working(values[0]) if is_float(aval.dtype) else values[0]
    for value in values[1:]:
        total = total + (mode.working(value) if is_float(aval.dtype) else value)
        if mode.noise is not None and is_float(aval.dtype):
            total = mode._disturbed(total.dtype, total)
    return mode.computed(aval, total)


@_enter("psum", "psum_invariant", "pmax", "pmin", "psum2", "pmax_invariant")
def _reduced(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    _grouped(eqn)
    axes = _names(eqn.params["axes"])
    outs = []
    for value, var in zip(ins, eqn.outvars):
        out: Spread = [None] * len(value)
        replay = mode.replay()
        for group in groups(mesh, axes):
            replay()
            several = [value[d] for d in group]
            if "sum" in eqn.primitive.name:
                made = _total(mode, var.aval, several)
            else:
                fn: Any = np.maximum if "max" in eqn.primitive.name else np.minimum
                made = mode.computed(var.aval, fn.reduce(np.stack(several)))
            for d in group:
                out[d] = made
        outs.append(out)
    return outs


@_enter("all_gather", "all_gather_invariant", "all_gather_reduced")
def _all_gather(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    _grouped(eqn)
    p, (value,) = eqn.params, ins
    out: Spread = [None] * len(value)
    for group in groups(mesh, _names(p["axis_name"])):
        several = [value[d] for d in group]
        join = np.concatenate if p["tiled"] else np.stack
        made = join(several, p["all_gather_dimension"])
        for d in group:
            out[d] = made
    return [out]


@_enter("reduce_scatter", "unreduced_reduce_scatter")
def _reduce_scatter(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    _grouped(eqn)
    p, (value,), aval = eqn.params, ins, eqn.outvars[0].aval
    out: Spread = [None] * len(value)
    replay = mode.replay()
    for group in groups(mesh, _names(p["axis_name"])):
        replay()
        total = _total(mode, aval, [value[d] for d in group])
        parts = np.split(total, len(group), p["scatter_dimension"])
        for d, part in zip(group, parts):
            out[d] = part if p["tiled"] else np.squeeze(part, p["scatter_dimension"])
    return [out]


@_enter("all_to_all")
def _all_to_all(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    _grouped(eqn)
    p, (value,) = eqn.params, ins
    split, concat = p["split_axis"], p["concat_axis"]
    out: Spread = [None] * len(value)
    for group in groups(mesh, _names(p["axis_name"])):
        for i, d in enumerate(group):
            if p["tiled"]:
                parts = [np.split(value[e], len(group), split)[i] for e in group]
                out[d] = np.concatenate(parts, concat)
            else:
                out[d] = np.stack([np.take(value[e], i, split) for e in group], concat)
    return [out]


@_enter("ppermute")
def _ppermute(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    (value,) = ins
    out = [np.zeros_like(v) for v in value]
    for group in groups(mesh, _names(eqn.params["axis_name"])):
        for source, target in eqn.params["perm"]:
            out[group[target]] = value[group[source]]
    return [out]


@_enter("axis_index")
def _axis_index(mode: Mode, eqn: Eqn, mesh: Mesh, ins: list[Spread]) -> list[Spread]:
    out: Spread = [None] * int(np.prod(list(mesh.values()), dtype=np.int64))
    for group in groups(mesh, _names(eqn.params["axis_name"])):
        for i, d in enumerate(group):
            out[d] = np.asarray(i, np.int32)
    return [out]
