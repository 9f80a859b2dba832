"""Take outputs out of a Pallas kernel that makes several, together with what only they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import bodies, edit, jaxprs
from .bodies import Flow, Role
from .jaxprs import Body, Eqn, Var
from .kernel_needs import Frame, Search
from .source import source_line


@dataclass(frozen=True)
class Part:
    """A kernel without some of its outputs."""

    eqn: Eqn
    operands: tuple[bool, ...]
    """Which operands are left."""
    results: tuple[bool, ...]
    """Which results are left."""
    bodies: tuple[tuple[Body, Body], ...]
    """The bodies that lost something, each with what it was, inner ones first."""


def is_kernel(eqn: Eqn) -> bool:
    """Whether an equation runs a Pallas kernel on Refs."""
    entered = bodies.carried(eqn).entered
    return len(entered) == 1 and entered[0].role is Role.KERNEL


def without(eqn: Eqn, needed: Sequence[bool]) -> Part | str:
    """The kernel that makes the needed results only, or why there is none.

    Grid, blocks and everything that makes the needed results stay as they are. Operands and scratch
    that nothing reads any more go too.

    Args:
      eqn: a call of a Pallas kernel.
      needed: of each result, whether it is to be made; one at least.
    """
    refused = _refused(eqn, needed)
    if refused:
        return refused
    layout = _Layout.of(eqn)
    search = Search(layout.roots(needed))
    frame = search.whole(eqn.params["jaxpr"])
    refs = jaxprs.invars(eqn.params["jaxpr"])
    for position, (ref, keep) in enumerate(zip(refs[layout.outputs], needed, strict=True)):
        reader = search.refs.get(ref)
        if not keep and reader is not None:
            where = source_line(reader) or "an unknown line"
            if where == source_line(eqn):
                where += " (the call: jax keeps no line of what a backward rule does)"
            return f"result {position}, which {reader.primitive.name} at {where} touches for others"
    return _Rebuilder(eqn, layout, needed).part(frame)


def _refused(eqn: Eqn, needed: Sequence[bool]) -> str | None:
    params = eqn.params
    if jaxprs.true_effects(eqn) or _has_side_effects(params["compiler_params"]):
        return "a kernel with side effects"
    if params["mesh"] is not None:
        return "a kernel on a mesh of cores"
    if jaxprs.constvars(params["jaxpr"]):
        return "a kernel that closes over references"
    for operand, result in params["input_output_aliases"]:
        if not needed[result]:
            return f"result {result}, which is written in the place of operand {operand}"
    return None


def _backends(compiler_params: Any) -> Iterable[Any]:
    """A kernel's compiler params: of one backend, or of several by their names."""
    return compiler_params.values() if isinstance(compiler_params, dict) else [compiler_params]


def _has_side_effects(compiler_params: Any) -> bool:
    found = (getattr(p, "has_side_effects", False) for p in _backends(compiler_params))
    return any(getattr(f, "name", f) not in (False, "PURE") for f in found)


@dataclass(frozen=True)
class _Layout:
    """Where a kernel's body takes which of its references: slices of its inputs."""

    index: slice
    inputs: slice
    outputs: slice
    scratch: slice
    bounds: int
    """Operands in front of all others, which the body doesn't see."""
    aliases: tuple[tuple[int, int], ...]
    refs: tuple[Var, ...]

    @classmethod
    def of(cls, eqn: Eqn) -> _Layout:
        mapping, refs = eqn.params["grid_mapping"], tuple(jaxprs.invars(eqn.params["jaxpr"]))
        index = mapping.num_index_operands
        inputs = index + mapping.num_inputs
        outputs = inputs + mapping.num_outputs
        ranges = slice(0, index), slice(index, inputs), slice(inputs, outputs), slice(outputs, None)
        aliases = tuple(eqn.params["input_output_aliases"])
        return cls(*ranges, mapping.num_dynamic_grid_bounds, aliases, refs)

    def roots(self, needed: Sequence[bool]) -> Iterable[Var]:
        """References whose last values are a needed result."""
        yield from (r for r, keep in zip(self.refs[self.outputs], needed, strict=True) if keep)
        yield from (self.refs[operand] for operand, result in self.aliases if needed[result])


class _Rebuilder:
    """Makes the smaller kernel of what a search has found."""

    def __init__(self, eqn: Eqn, layout: _Layout, needed: Sequence[bool]) -> None:
        self._eqn, self._layout, self._needed = eqn, layout, tuple(needed)
        self._bodies: list[tuple[Body, Body]] = []

    def part(self, frame: Frame) -> Part:
        layout, eqn = self._layout, self._eqn
        before = {a for e in jaxprs.opened(frame.body).eqns for a in e.invars if jaxprs.is_var(a)}
        eqns = self._eqns(frame)
        after = {a for e in eqns for a in e.invars if jaxprs.is_var(a)}
        stays = [ref in after or ref not in before for ref in layout.refs]
        stays[layout.index] = [True] * len(layout.refs[layout.index])
        stays[layout.outputs] = self._needed
        fixed = {operand for operand, _ in layout.aliases}
        if _per_operand(eqn.params["compiler_params"]):
            fixed.update(range(layout.inputs.stop))
        stays = [keep or i in fixed for i, keep in enumerate(stays)]
        operands = (*(True,) * layout.bounds, *stays[: layout.inputs.stop])
        refs = [ref for ref, keep in zip(layout.refs, stays, strict=True) if keep]
        params = dict(eqn.params)
        params["jaxpr"] = self._body(frame.body, refs, eqns)
        params["grid_mapping"] = self._grid_mapping(stays)
        params["out_avals"] = _kept(params["out_avals"], self._needed)
        params["input_output_aliases"] = tuple(
            (sum(stays[:operand]), sum(self._needed[:result])) for operand, result in layout.aliases
        )
        smaller = eqn.replace(
            params=params,
            invars=list(_kept(eqn.invars, operands)),
            outvars=list(_kept(eqn.outvars, self._needed)),
        )
        return Part(smaller, operands, self._needed, tuple(self._bodies))

    def _grid_mapping(self, stays: Sequence[bool]) -> Any:
        layout, mapping = self._layout, self._eqn.params["grid_mapping"]
        blocks = stays[layout.inputs.start : layout.outputs.stop]
        return dataclasses.replace(
            mapping,
            block_mappings=_kept(mapping.block_mappings, blocks),
            scratch_avals=_kept(mapping.scratch_avals, stays[layout.scratch]),
            num_inputs=sum(stays[layout.inputs]),
            num_outputs=sum(stays[layout.outputs]),
        )

    def _eqns(self, frame: Frame) -> list[Eqn]:
        eqns = jaxprs.opened(frame.body).eqns
        return [
            self._nested(eqns[i], frame.inner[i]) if i in frame.inner else eqns[i]
            for i in sorted(frame.live)
        ]

    def _nested(self, eqn: Eqn, frames: list[Frame]) -> Eqn:
        """A call, a branch or a loop without the references and values that its bodies lost."""
        entered = bodies.carried(eqn).entered
        inside = [self._eqns(f) for f in frames]
        kept = {0} if entered[0].role is Role.BRANCH else set()
        for e, f, eqns in zip(entered, frames, inside, strict=True):
            read = {a for q in eqns for a in q.invars if jaxprs.is_var(a)}
            read.update(a for a in jaxprs.opened(f.body).outvars if jaxprs.is_var(a))
            for port, var in zip(e.inputs, jaxprs.invars(f.body), strict=True):
                if port.flow is Flow.CARRY or var in read:
                    assert port.outer is not None
                    kept.add(port.outer)
        operands = [i in kept for i in range(len(eqn.invars))]
        narrower = {}
        for e, f, eqns in zip(entered, frames, inside, strict=True):
            inputs = [
                var
                for port, var in zip(e.inputs, jaxprs.invars(f.body), strict=True)
                if port.outer is not None and operands[port.outer]
            ]
            narrower[e.key] = self._body(f.body, inputs, eqns)
        if all(narrower[e.key] is e.body for e in entered):
            return eqn
        smaller = edit.narrowed(eqn, operands, [True] * len(eqn.outvars), narrower)
        return smaller.replace(effects=jaxprs.effects_on(eqn.effects, smaller.invars))

    def _body(self, body: Body, inputs: Sequence[Var], eqns: Sequence[Eqn]) -> Body:
        old = jaxprs.opened(body)
        pairs = (inputs, old.invars), (eqns, old.eqns)
        if all(len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
               for a, b in pairs):  # fmt: skip
            return body
        new = jaxprs.stating_own_effects(jaxprs.rebuild(body, invars=inputs, eqns=eqns))
        self._bodies.append((new, body))
        return new


def _per_operand(compiler_params: Any) -> bool:
    """Whether a compiler's params speak of operands by their places."""
    several = _backends(compiler_params)
    return any(getattr(p, "allow_input_fusion", None) is not None for p in several)


def _kept(values: Iterable[Any], keep: Iterable[bool]) -> tuple[Any, ...]:
    return tuple(v for v, k in zip(values, keep, strict=True) if k)
