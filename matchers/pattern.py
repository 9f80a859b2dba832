"""Pattern combinators over the dataflow view, which explain a mismatch.

A pattern names every param of the equation it matches: compared, captured, or ignored with a
reason. A param that it doesn't name is a mismatch, so a new param in a new jax version makes a
pass decline rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..compat import jaxprs
from ..compat.jaxprs import Atom
from .graph import Scope, Value


@dataclass(frozen=True)
class Mismatch:
    """Where and why a pattern stopped matching."""

    path: tuple[str, ...]
    """From the root pattern inwards, as in ``("select_n", "operand 0", "lt")``."""
    found: str
    wanted: str

    @property
    def depth(self) -> int:
        """How far the match had come: the deeper, the nearer the miss."""
        return len(self.path)

    def __str__(self) -> str:
        """One line."""
        where = " → ".join(self.path) or "root"
        return f"at {where}: found {self.found}, wanted {self.wanted}"


Captures = dict[str, Any]


class Pattern(Protocol):
    """Anything that matches an atom in a scope."""

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """None where it matches, having filled ``captures``."""

    def describe(self) -> str:
        """What the pattern wants, in words."""


def _within(step: str, mismatch: Mismatch) -> Mismatch:
    return Mismatch((step, *mismatch.path), mismatch.found, mismatch.wanted)


def describe_atom(scope: Scope, atom: Atom) -> str:
    """An atom in words: its literal value, or what computes it."""
    value = scope.resolve(atom)
    if jaxprs.is_literal(value.atom):
        return f"the literal {value.atom.val}"
    producer = value.scope.producer(value.atom)
    if producer is None:
        return f"an input of type {value.atom.aval.str_short()}"
    return f"a result of {producer.eqn.primitive.name} of type {value.atom.aval.str_short()}"


@dataclass(frozen=True)
class Bind:
    """Any value; the same value wherever the name occurs again."""

    name: str

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """Capture the value, or compare it with the one captured before."""
        value = scope.resolve(atom)
        if captures.setdefault(self.name, value) == value:
            return None
        first = captures[self.name]
        wanted = f"the same value as {self.name}, {describe_atom(first.scope, first.atom)}"
        return Mismatch((), describe_atom(scope, atom), wanted)

    def describe(self) -> str:
        """The name."""
        return self.name


@dataclass(frozen=True)
class Constant:
    """A value known to be one constant in every element; zeros of either sign are equal."""

    value: Any

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """Compare the constant known as a fact."""
        del captures
        known = scope.fact(atom).constant
        if known is not None and known.value == self.value:
            return None
        return Mismatch((), describe_atom(scope, atom), self.describe())

    def describe(self) -> str:
        """The constant."""
        return f"the constant {self.value}"


@dataclass(frozen=True)
class Where:
    """A pattern with a condition on the value's fact."""

    inner: Pattern
    condition: Callable[[Scope, Atom], bool]
    wanted: str

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """The inner pattern first, then the condition."""
        mismatch = self.inner.match(scope, atom, captures)
        if mismatch is not None:
            return mismatch
        if self.condition(scope, atom):
            return None
        return Mismatch((), f"{describe_atom(scope, atom)}, {scope.fact(atom)}", self.wanted)

    def describe(self) -> str:
        """The inner pattern and the condition."""
        return f"{self.inner.describe()}, {self.wanted}"


@dataclass(frozen=True)
class Op:
    """The result of an equation of one primitive, seen through calls."""

    primitive: Any
    """Compared as an object."""
    operands: tuple[Pattern, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    """Params that must have these values."""
    capture: Mapping[str, str] = field(default_factory=dict)
    """Params to capture, under these names; equal wherever a name occurs again."""
    ignore: Mapping[str, str] = field(default_factory=dict)
    """Params that don't matter, each with the reason why."""
    result: int = 0

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """Match the producer of ``atom``."""
        producer = scope.producer(atom)
        if producer is None:
            return Mismatch((), describe_atom(scope, atom), self.describe())
        if producer.result != self.result:
            return Mismatch((), f"result {producer.result}", f"result {self.result}")
        return self.match_equation(producer.scope, producer.index, captures)

    def match_equation(self, scope: Scope, index: int, captures: Captures) -> Mismatch | None:
        """Match an equation itself."""
        eqn = scope.eqns[index]
        if eqn.primitive is not self.primitive:
            return Mismatch((), eqn.primitive.name, self.primitive.name)
        step = self.primitive.name
        mismatch = self._match_params(eqn.params, captures)
        if mismatch is None and len(eqn.invars) != len(self.operands):
            wanted = f"{len(self.operands)} operands"
            mismatch = Mismatch((), f"{len(eqn.invars)} operands", wanted)
        if mismatch is not None:
            return _within(step, mismatch)
        for position, (pattern, atom) in enumerate(zip(self.operands, eqn.invars, strict=True)):
            mismatch = pattern.match(scope, atom, captures)
            if mismatch is not None:
                return _within(step, _within(f"operand {position}", mismatch))
        return None

    def _match_params(self, params: Mapping[str, Any], captures: Captures) -> Mismatch | None:
        for name, value in params.items():
            if name in self.ignore:
                continue
            if name in self.capture:
                if captures.setdefault(self.capture[name], value) != value:
                    wanted = f"{captures[self.capture[name]]}, as elsewhere in the pattern"
                    return Mismatch((f"param {name}",), repr(value), wanted)
            elif name not in self.params:
                wanted = "only params that the pattern names"
                return Mismatch((f"param {name}",), repr(value), wanted)
            elif self.params[name] != value:
                return Mismatch((f"param {name}",), repr(value), repr(self.params[name]))
        missing = [n for n in (*self.params, *self.capture) if n not in params]
        if missing:
            return Mismatch((f"param {missing[0]}",), "no such param", "a value")
        return None

    def describe(self) -> str:
        """As a call."""
        return f"{self.primitive.name}({', '.join(p.describe() for p in self.operands)})"


@dataclass(frozen=True)
class OneOf:
    """The first of several patterns that matches; explains the nearest miss."""

    patterns: tuple[Pattern, ...]

    def match(self, scope: Scope, atom: Atom, captures: Captures) -> Mismatch | None:
        """Try each on a copy of the captures."""
        nearest: Mismatch | None = None
        for pattern in self.patterns:
            trial = dict(captures)
            mismatch = pattern.match(scope, atom, trial)
            if mismatch is None:
                captures.update(trial)
                return None
            if nearest is None or mismatch.depth > nearest.depth:
                nearest = mismatch
        return nearest or Mismatch((), describe_atom(scope, atom), "one of no patterns")

    def describe(self) -> str:
        """The alternatives."""
        return " or ".join(p.describe() for p in self.patterns)


def commuted(primitive: Any, a: Pattern, b: Pattern, **options: Any) -> OneOf:
    """A two-operand op whose operands may stand either way round."""
    return OneOf(
        (Op(primitive, (a, b), **options), Op(primitive, (b, a), **options)),
    )


__all__ = ["Bind", "Captures", "Constant", "Mismatch", "OneOf", "Op", "Pattern", "Value", "Where",
           "commuted", "describe_atom"]  # fmt: skip
