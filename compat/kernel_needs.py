"""Which operations of a Pallas kernel are needed, from the Refs whose last values count.

The order of reads and writes doesn't matter: an operation is needed that writes a Ref whose values
a needed operation reads. Only plain reads, writes and sums into a Ref are ever found not to be.
Whatever else touches a Ref is needed (copies, semaphores, `run_scoped`, prints), and with it every
Ref that it touches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import bodies, edit, jaxprs
from .bodies import Flow, Role
from .jaxprs import Atom, Body, Eqn, Var


@dataclass(eq=False)
class Frame:
    """What is needed of one body, in one call of it."""

    body: Body
    outer: Mapping[Var, Var]
    """The kernel's references, by the names that the body knows them under."""
    live: set[int] = field(default_factory=set)
    """Needed equations."""
    read: set[Var] = field(default_factory=set)
    """Values that these read."""
    inner: dict[int, list[Frame]] = field(default_factory=dict)
    """Of equations whose bodies can lose something, the frames of these."""


class Search:
    """What a kernel needs, from the references whose last values count."""

    def __init__(self, roots: Iterable[Var]) -> None:
        """Start from the references whose last values count."""
        self.refs: dict[Var, Eqn | None] = dict.fromkeys(roots)
        """References whose values count, each with the first operation found to touch it."""
        self._changed = True

    def whole(self, body: Body) -> Frame:
        """The frame of a kernel's body; afterwards, `refs` is complete."""
        frame = Frame(body, {v: v for v in jaxprs.invars(body)})
        while self._changed:
            self._changed = False
            self._visit(frame)
        return frame

    def _visit(self, frame: Frame) -> None:
        eqns = jaxprs.opened(frame.body).eqns
        for index in reversed(range(len(eqns))):
            eqn = eqns[index]
            inner = _frames(eqn, frame) if index not in frame.inner else frame.inner[index]
            if inner:
                frame.inner[index] = inner
                self._enter(frame, index, eqn, inner)
            elif self._is_needed(frame, eqn):
                self._need(frame, index, eqn, eqn.invars)

    def _is_needed(self, frame: Frame, eqn: Eqn) -> bool:
        if any(v in frame.read for v in eqn.outvars):
            return True
        refs = _refs(eqn)
        if not refs and not jaxprs.true_effects(eqn):
            return False
        if eqn.primitive in _reads() and refs == [0]:
            return False
        if eqn.primitive in _writes() and refs == [0]:
            return frame.outer.get(eqn.invars[0]) in {None, *self.refs}
        return True

    def _enter(self, frame: Frame, index: int, eqn: Eqn, inner: list[Frame]) -> None:
        """Through a call, a branch or a loop: of a needed one, all results and carries are."""
        entered = bodies.carried(eqn).entered
        for f in inner:
            self._visit(f)
        if not any(f.live for f in inner) and not any(v in frame.read for v in eqn.outvars):
            return
        kept = [eqn.invars[0]] if entered[0].role is Role.BRANCH else []
        for f, e in zip(inner, entered, strict=True):
            outputs = {a for a in jaxprs.opened(f.body).outvars if jaxprs.is_var(a)}
            self._changed |= not outputs <= f.read
            f.read |= outputs
            for port, var in zip(e.inputs, jaxprs.invars(f.body), strict=True):
                if port.flow is Flow.CARRY or (var in f.read and not is_ref(var)):
                    assert port.outer is not None
                    kept.append(eqn.invars[port.outer])
        self._need(frame, index, eqn, kept)

    def _need(self, frame: Frame, index: int, eqn: Eqn, atoms: Iterable[Atom]) -> None:
        if index not in frame.live:
            frame.live.add(index)
            self._changed = True
        for atom in atoms:
            if not jaxprs.is_var(atom):
                continue
            if is_ref(atom):
                root = frame.outer.get(atom)
                if root is not None and root not in self.refs:
                    self.refs[root] = eqn
                    self._changed = True
            elif atom not in frame.read:
                frame.read.add(atom)
                self._changed = True


def _frames(eqn: Eqn, frame: Frame) -> list[Frame]:
    """Of an equation whose bodies can lose reads and writes, a frame for each; else nothing."""
    entered = bodies.carried(eqn).entered
    if not entered or not edit.can_narrow(eqn):
        return []
    found = []
    for e in entered:
        outer = {}
        for port, var in zip(e.inputs, jaxprs.invars(e.body), strict=True):
            if is_ref(var):
                root = None if port.outer is None else frame.outer.get(eqn.invars[port.outer])
                if root is None or port.flow is not Flow.SAME:
                    return []
                outer[var] = root
        found.append(Frame(e.body, outer))
    return found


def is_ref(atom: Atom) -> bool:
    """Whether a variable is a reference."""
    from jax._src.state.types import AbstractRef

    return isinstance(atom.aval, AbstractRef)


def _refs(eqn: Eqn) -> list[int]:
    """Which operands are references; a result that is one makes the equation no plain one."""
    found = [i for i, a in enumerate(eqn.invars) if is_ref(a)]
    return [*found, -1] if any(map(is_ref, eqn.outvars)) else found


@functools.cache
def _reads() -> frozenset[Any]:
    pallas = sys.modules["jax._src.pallas.primitives"]
    return frozenset({_state("get_p"), pallas.load_p})


@functools.cache
def _writes() -> frozenset[Any]:
    pallas = sys.modules["jax._src.pallas.primitives"]
    return frozenset({_state("swap_p"), _state("addupdate_p"), pallas.swap_p})


def _state(name: str) -> Any:
    from jax._src.state import primitives

    return getattr(primitives, name)
