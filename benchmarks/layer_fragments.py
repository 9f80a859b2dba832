"""Traced programs of one device, cut into fragments that the compiler's analysis survives.

Whole layers of a large model are beyond it. So a program is laid flat (calls and rematerialised
parts in place), what nothing reads is dropped, and equations that follow one another and come from
one function of the user's are a fragment. Fragments that are equal are one. Many are compiled side
by side as one program, each from inputs of its own to outputs of its own, so that nothing is fused
across; where the analysis dies on such a program it is halved, down to single fragments and then
to single equations.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import relower.passes.registry  # noqa: F401  # so that its frames are known as relower's
from relower.compat import jaxprs, source, tracing
from relower.compat.compiler import compile_settings, module_bytes
from relower.lowering.compile import StagedModule
from relower.lowering.cost.cache import user_cache
from relower.lowering.cost.ladder import measure
from relower.lowering.cost.model import Cost
from relower.lowering.errors import InputError
from relower.lowering.fragment import Fragment, Port, by_hand_on, stage_fragment
from relower.lowering.process import Limits
from relower.lowering.targets import mesh_context

TARGET = "TPU7x:2x2x1"
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr",
         "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}  # fmt: skip
COLLECTIVES = frozenset(
    ("all_gather", "all_to_all", "pmax", "ppermute", "psum", "psum2", "psum_invariant",
     "reduce_scatter")
)  # fmt: skip
"""They have no cycles on a core: bytes over links are estimated apart."""
MARKS = frozenset(("optimization_barrier", "name", "assume_range"))
"""They compute nothing; a barrier between two fragments is one already."""
TOGETHER, BYTES = 24, 24 * 2**30
"""Of fragments that are compiled side by side: how many, and their inputs and outputs."""


@dataclass(frozen=True)
class Step:
    """An equation of the flat program."""

    eqn: Any
    part: str
    """``forward``, ``again`` (rematerialised) or ``backward``."""
    where: str
    """``file.py:function``, of the user's."""


@dataclass(frozen=True)
class Piece:
    """A fragment: equations, what they read, and which of their results are read elsewhere."""

    steps: tuple[Step, ...]
    fragment: Fragment
    key: str
    """Equal for equal fragments."""
    bytes: int
    """Of inputs and outputs, on one device."""

    @property
    def alone(self) -> bool:
        """Whether to compile it by itself, for the analysis may die on it or take long."""
        return any(_is_hard(step.eqn) for step in self.steps)

    def __str__(self) -> str:
        """Where it is from."""
        first = self.steps[0]
        names = ", ".join(dict.fromkeys(s.eqn.primitive.name for s in self.steps))
        return f"{first.part} {first.where}: {names[:60]}"


@dataclass(frozen=True)
class Figure:
    """What one execution of a fragment costs."""

    cycles: float = 0.0
    ops: int = 0
    ops_of: int = 0
    bytes: int = 0
    bytes_of: int = 0
    flops: int = 0
    flops_of: int = 0
    missing: tuple[str, ...] = ()
    """What has no figure."""

    def __add__(self, other: Figure) -> Figure:
        """Both, one after the other."""
        return Figure(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))


def _is_hard(eqn: Any) -> bool:
    name = eqn.primitive.name
    small = eqn.outvars and str(getattr(eqn.outvars[0].aval, "dtype", "")) == "bfloat16"
    return name in ("triangular_solve", "ragged_dot_general", "custom_vmap_call", "scan", "sort",
                    "top_k", "pallas_call") or (name == "logistic" and small)  # fmt: skip


def flat(body: Any) -> tuple[list[Step], list[Any]]:
    """The equations of a `jax.shard_map`'s body with its calls in place, and its results."""
    steps: list[Step] = []

    def into(inner: Any, given: Sequence[Any], scope: str, called: str) -> list[Any]:
        opened = jaxprs.opened(inner)
        env = dict(zip(opened.invars, given, strict=True))
        env.update(zip(opened.constvars, jaxprs.consts(inner)))
        for eqn in opened.eqns:
            read = [a if jaxprs.is_literal(a) else env[a] for a in eqn.invars]
            stack = f"{scope}/{source.name_stack(eqn)}"
            where = _where(eqn) or called  # jax traces its own functions once for all callers
            key = CALLS.get(eqn.primitive.name)
            if key is not None:
                results = into(eqn.params[key], read, stack, where)
            elif eqn.primitive.name in MARKS:
                results = read
            else:
                results = [jaxprs.new_var(v.aval) for v in eqn.outvars]
                steps.append(Step(eqn.replace(invars=read, outvars=results), _part(stack), where))
            env.update(zip(eqn.outvars, results, strict=True))
        return [a if jaxprs.is_literal(a) else env[a] for a in opened.outvars]

    inputs = [jaxprs.new_var(v.aval) for v in jaxprs.invars(body)]
    outputs = into(body, inputs, "", "?")
    return _read(steps, outputs), outputs


def _part(stack: str) -> str:
    if "rematted_computation" in stack:
        return "again"
    return "backward" if "transpose(" in stack else "forward"


def _where(eqn: Any) -> str | None:
    place = source.source_place(eqn)
    if place is None:
        return None
    return f"{Path(place[0].rpartition(':')[0]).name}:{place[1]}"


def _read(steps: Sequence[Step], outputs: Sequence[Any]) -> list[Step]:
    """The steps whose results are read."""
    wanted = {a for a in outputs if jaxprs.is_var(a)}
    kept = []
    for step in reversed(steps):
        if step.eqn.effects or not wanted.isdisjoint(step.eqn.outvars):
            kept.append(step)
            wanted.update(a for a in step.eqn.invars if jaxprs.is_var(a))
    return kept[::-1]


class Layer:
    """One program of one device, as pieces."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        (split,) = _shard_maps(jax.make_jaxpr(fn)(*args))
        self.steps, outputs = flat(split.params["jaxpr"])
        self.mesh = split.params["mesh"]
        self._index = {id(s): i for i, s in enumerate(self.steps)}
        self._last = {a: i for i, s in enumerate(self.steps) for a in s.eqn.invars
                      if jaxprs.is_var(a)}  # fmt: skip
        self._last |= {a: len(self.steps) for a in outputs if jaxprs.is_var(a)}
        self._constants = self._from_nothing()
        self.collectives = sum(s.eqn.primitive.name in COLLECTIVES for s in self.steps)

    def _from_nothing(self) -> dict[Any, list[Step]]:
        """Values made of literals alone, and how: a fragment that reads one makes it anew."""
        found: dict[Any, list[Step]] = {}
        for step in self.steps:
            reads = [a for a in step.eqn.invars if jaxprs.is_var(a)]
            if all(a in found for a in reads) and step.eqn.primitive.name != "axis_index":
                how = [s for a in reads for s in found[a]] + [step]
                how = list({id(s): s for s in how}.values())
                if len(how) <= 8:
                    found.update((v, how) for v in step.eqn.outvars)
        return found

    def pieces(self) -> Iterator[Piece]:
        """Steps that follow one another and come from one function, collectives left out."""
        held: list[Step] = []
        for step in self.steps:
            if step.eqn.outvars and step.eqn.outvars[0] in self._constants:
                continue
            apart = bool(held) and (held[0].part, held[0].where) != (step.part, step.where)
            hard = _is_hard(step.eqn) or bool(held and _is_hard(held[-1].eqn))
            if held and (apart or hard or step.eqn.primitive.name in COLLECTIVES):
                yield self.piece(held)
                held = []
            if step.eqn.primitive.name not in COLLECTIVES:
                held.append(step)
        if held:
            yield self.piece(held)

    def piece(self, run: Sequence[Step]) -> Piece:
        """Some steps that follow one another, as a function of what they read."""
        made = {v for s in run for v in s.eqn.outvars}
        reads = [a for s in run for a in s.eqn.invars if jaxprs.is_var(a) and a not in made]
        anew = {id(s): s for a in reads if a in self._constants for s in self._constants[a]}
        inputs = list(dict.fromkeys(a for a in reads if a not in self._constants))
        last = max(self._index[id(s)] for s in run)
        outputs = [v for s in run for v in s.eqn.outvars if self._last.get(v, -1) > last]
        eqns = [s.eqn for s in (*anew.values(), *run)]

        def port(var: Any) -> Port:
            return Port(tuple(var.aval.shape), var.aval.dtype, tuple(self.mesh.axis_names))

        def fn(*values: Any) -> Sequence[Any]:
            return tracing.evaluate_alone(eqns, inputs, outputs, values)

        fragment = Fragment(fn, tuple(map(port, inputs)), tuple(map(port, outputs)), self.mesh,
                            tuple(self.mesh.axis_names), check_vma=False)  # fmt: skip
        staged = stage_fragment(fragment, TARGET, "the fragment")
        key = hashlib.sha256(staged.module).hexdigest()
        size = sum(v.aval.size * v.aval.dtype.itemsize for v in (*inputs, *outputs))
        return Piece(tuple(run), fragment, key, size)


def _shard_maps(closed: Any) -> list[Any]:
    found = []
    for eqn in jaxprs.opened(closed).eqns:
        if eqn.primitive.name == "shard_map":
            found.append(eqn)
        elif eqn.primitive.name in CALLS:
            found += _shard_maps(eqn.params[CALLS[eqn.primitive.name]])
    return found


@dataclass
class Bench:
    """Compiles pieces, each once."""

    limit: float
    tell: Callable[[str], None]
    layers: dict[str, Layer] = field(default_factory=dict)
    """By the key of a piece, the layer it can be cut further in."""
    figures: dict[str, Figure] = field(default_factory=dict)
    unnamed: float = 0.0
    """Cycles of operations that the compiler made without saying for which piece."""

    def measure(self, pieces: Sequence[Piece], layer: Layer) -> None:
        """Figures for all pieces that have none yet."""
        new = {p.key: p for p in pieces if p.key not in self.figures}
        batch: list[Piece] = []
        for piece in sorted(new.values(), key=lambda p: p.alone):
            size = sum(p.bytes for p in batch) + piece.bytes
            if batch and (piece.alone or len(batch) == TOGETHER or size > BYTES):
                self._batch(batch, layer)
                batch = []
            batch.append(piece)
        if batch:
            self._batch(batch, layer)

    def _batch(self, batch: Sequence[Piece], layer: Layer) -> None:
        try:
            cost = self._cost(batch)
            why = None if cost.rung == "profile" or not cost.total().ops_of else f"rung {cost.rung}"
            why = why and "; ".join((why, *cost.notes[:1]))
        except InputError as error:
            cost, why = None, str(error)
        if cost is not None and why is None:
            parts = [_figure(cost.within(f"piece{i}")) for i in range(len(batch))]
            parts = [_figure(cost)] if len(batch) == 1 else parts
            self.figures.update((p.key, f) for p, f in zip(batch, parts))
            self.unnamed += cost.total().cycles - sum(f.cycles for f in parts)
            self.tell(f"{len(batch)} pieces, {cost.total().cycles:,.0f} cycles, {batch[0]}")
        elif len(batch) > 1:
            self.tell(f"halved, {len(batch)} pieces: {why}")
            self._batch(batch[: len(batch) // 2], layer)
            self._batch(batch[len(batch) // 2 :], layer)
        elif len(batch[0].steps) > 1:
            self.tell(f"cut, {batch[0]}: {why}")
            steps, half = batch[0].steps, len(batch[0].steps) // 2
            parts = [layer.piece(steps[:half]), layer.piece(steps[half:])]
            self.measure(parts, layer)
            self.figures[batch[0].key] = self.figures[parts[0].key] + self.figures[parts[1].key]
        else:
            name = batch[0].steps[0].eqn.primitive.name
            work = Figure(ops_of=1, bytes_of=batch[0].bytes, missing=(f"{name}: {why}",))
            self.figures[batch[0].key] = work
            self.tell(f"no figure, {batch[0]}: {why}")

    def _cost(self, batch: Sequence[Piece]) -> Cost:
        """Pieces side by side; one alone too."""
        first = batch[0].fragment

        def fn(*values: Any) -> Sequence[Any]:
            found: list[Any] = []
            at = 0
            for i, piece in enumerate(batch):
                own = values[at : at + len(piece.fragment.inputs)]
                at += len(own)
                with jax.named_scope(f"piece{i}"):
                    found += piece.fragment.fn(*own)
            return found

        every = Fragment(fn, tuple(q for p in batch for q in p.fragment.inputs),
                         tuple(q for p in batch for q in p.fragment.outputs), first.mesh,
                         first.manual, check_vma=False)  # fmt: skip
        split, args = by_hand_on(every, first.mesh)
        with mesh_context(first.mesh):
            lowered = jax.jit(split).trace(*args).lower(lowering_platforms=("tpu",))
        staged = StagedModule(module_bytes(lowered), compile_settings(lowered), TARGET, "pieces")
        return measure(staged, limits=Limits(self.limit, 12 * 2**30), cache=user_cache())


def _figure(cost: Cost) -> Figure:
    total = cost.total("profile")
    missing = Counter(op.kind for op in cost.ops
                      if (op.sparse or not op.overlapped) and op.total is None)  # fmt: skip
    return Figure(total.cycles, total.ops, total.ops_of, total.bytes, total.bytes_of, total.flops,
                  total.flops_of, tuple(missing.elements()))  # fmt: skip


def short(reason: str) -> str:
    """A reason without what differs from case to case."""
    return re.sub(r"\s*\(\S+:\d+\)$", "", reason)[:90]
