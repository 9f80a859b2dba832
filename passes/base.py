"""What a pass is: its contract, its requirements, the sites it finds and what it says of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..compat.jaxprs import Atom, Eqn, Var
from ..lowering.cost.measurement import Measurement as Measurement
from ..matchers.dataflow import Dataflow
from ..matchers.demand import Demand
from ..matchers.graph import Scope, Value
from ..matchers.pattern import Mismatch
from .frozen import Request
from .suggestion import Suggestion


class Contract(Enum):
    """What a rewrite promises about values, from strict to loose."""

    BITWISE = "bitwise"
    """The same bits, NaN payloads and the sign of zero included."""
    VALUE = "value"
    """Equal as numbers: the sign of a zero, NaN payloads and quieting, and flushed subnormals may
    differ."""
    ROUNDING = "rounding"
    """Each value keeps one rounding, at a different point; the error is at most 1.10× as large."""

    def admits(self, other: Contract) -> bool:
        """Whether a pass of contract ``other`` may run where this contract was asked for."""
        order = list(Contract)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True)
class Reason:
    """Why a site was declined."""

    code: str
    """Stable, for machines and tests: ``unknown-range``."""
    sentence: str
    found: str
    wanted: str

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return {
            "code": self.code,
            "sentence": self.sentence,
            "found": self.found,
            "wanted": self.wanted,
        }

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.sentence} (found {self.found}; wanted {self.wanted})"


@dataclass(frozen=True)
class Match:
    """A candidate that has the pattern's structure."""

    scope: Scope
    index: int
    """The root equation: the last of the site's equations in its body."""
    captures: Mapping[str, Any]

    @property
    def eqn(self) -> Eqn:
        """The root equation."""
        return self.scope.eqns[self.index]


@dataclass(frozen=True)
class Requirement:
    """One named check: may this site be rewritten?"""

    code: str
    sentence: str
    """What must hold, for the docs."""
    check: Callable[[Match], Reason | None]


@dataclass(frozen=True)
class Replacement:
    """What to put in place of the root equation."""

    operands: tuple[Atom, ...]
    """In scope at the root equation, or at the last of those that go with it."""
    results: tuple[Var, ...]
    """Results of the equations replaced, in the order in which ``fn`` returns their values."""
    fn: Callable[..., Sequence[Any]] | None
    """Takes and returns arrays; None where the results are the operands as they are."""
    key: Hashable
    """Everything that ``fn`` depends on besides the types of the operands and results, and the
    params of the root and of the equations in ``also``."""
    wants: Value | None = None
    """A value of another body that has to be brought here first; the site is then matched anew, so
    that the rest of this replacement is never used."""
    also: tuple[int, ...] = ()
    """Further equations of the body, after the root, that go with it: all their results are among
    ``results``. What the operands need is then brought before the root."""


@dataclass(frozen=True)
class Example:
    """Arguments for a pass's ``before`` and ``after``, as shapes and as real values."""

    args: tuple[Any, ...]
    """`jax.ShapeDtypeStruct`s or arrays."""
    label: str = ""
    mesh: Mapping[str, int] | None = None
    """Extent by axis name of the mesh that ``before`` and ``after`` are traced under, all Auto."""
    most: int = 8
    """Of integers up to this size, positive and negative, both compute the same bits."""


@dataclass(frozen=True)
class Pass:
    """A rewrite: find candidates, check requirements, replace."""

    name: str
    contract: Contract
    summary: str
    """One sentence: before → after."""
    measure: str
    """What each application strictly lowers, so that rewriting ends."""
    roots: Callable[[], frozenset[Any]]
    """The primitives, as objects, at which a candidate may end."""
    find: Callable[[Scope, int], Match | Mismatch | None]
    """A match, a near miss, or None where the equation is no candidate at all."""
    requirements: tuple[Requirement, ...]
    profitable: Callable[[Match], Reason | None]
    replace: Callable[[Match], Replacement]
    before: Callable[..., Any]
    after: Callable[..., Any]
    examples: Callable[[], tuple[Example, ...]]
    alternatives: Callable[[Match], Mapping[str, Replacement | Reason]] | None = None
    """Every way to replace a site, by name: what to put in place, or why that way isn't open there.

    All of them keep the contract; ``replace`` is the one that the pass thinks best. None of a pass
    that knows one way only. Whoever measures costs takes the names from here, and compiles
    ``choosing(name)`` for each.
    """
    program: Callable[[Dataflow, Request], Whole | None] | None = None
    """For a pass that judges the whole program at once, before all others look for sites: what it
    finds. Such a pass has candidates of its own, which it hands to ``requirements``; ``find`` is
    not asked. None where it has nothing to say."""
    ways: tuple[str, ...] = ()
    """Every name that ``alternatives`` may give at some site."""
    suggest: str | Callable[[Match], Suggestion] | None = None
    """What to write in the source instead, so that there is nothing to rewrite."""
    mutants: Mapping[str, Callable[[Match, Replacement], Replacement | None]] = field(
        default_factory=dict
    )
    """Deliberately broken copies by name: what would be put in place of ``replace``'s. None where
    a copy differs in nothing at that site. `relower verify --mutants` must catch each."""
    yields_to: tuple[str, ...] = ()
    """Passes that go first: while one of them has a site, this one waits for the next round. What
    it replaces holds, or reads, what they replace."""
    by_name: bool = False
    """Runs only where it is asked for by name: today it may cost more than it saves."""

    def choosing(self, name: str) -> Pass:
        """This pass with one of its alternatives everywhere; where that isn't open, it declines.

        Raises:
          ValueError: the pass knows one way only, or none of this name.
        """
        alternatives = self.alternatives
        if alternatives is None:
            raise ValueError(f"{self.name} has no alternatives, found {name!r}; wanted none")
        if name not in self.ways:
            known = ", ".join(map(repr, self.ways))
            raise ValueError(f"{self.name} has no way {name!r}; wanted one of {known}")

        def closed(match: Match) -> Reason | None:
            if any(q.check(match) is not None for q in self.requirements):
                return None  # said already
            ways = alternatives(match)
            way = ways.get(name)
            if way is None:
                return Reason("no-such-way", f"there is no way called {name!r} here",
                              ", ".join(ways) or "none", name)  # fmt: skip
            return way if isinstance(way, Reason) else None

        def chosen(match: Match) -> Replacement:
            way = alternatives(match)[name]
            assert isinstance(way, Replacement)
            return way

        asked = Requirement("no-such-way", f"The way {name!r}, asked for, is open.", closed)
        return replace(
            self,
            requirements=(*self.requirements, asked),
            profitable=lambda match: None,
            replace=chosen,
        )


@dataclass(frozen=True)
class Measured:
    """How to decide by compiling; ``choose="measured"`` takes the defaults."""

    target: str = "TPU7x:2x2x1"
    """Kind and topology; figures are for one device of it."""
    limit: float | None = 300.0
    """Seconds for each compilation; None waits for ever."""
    memory_limit: int | None = 16 * 2**30
    """Bytes of host memory for each compilation; None sets none."""
    cache: bool = True
    """Look for what the compiler said of the same fragment before, and keep what it says."""
    decide: bool = True
    """Let the figures decide; False only measures what the rules of thumb do."""


@dataclass(frozen=True)
class Whole:
    """What a pass that judges a whole program made of it."""

    candidates: tuple[Match, ...]
    demand: Demand | None
    """What the program still needs; None where nothing is to be taken out."""
    dispensable: Callable[[Scope, int], bool]
    """Whether an equation that nothing read before either is to be taken out too."""
    describe: Callable[[Match, Site], FrozenLeaf]
    """What to report of a candidate beside its site."""


class Status(Enum):
    """The verdict on a site."""

    APPLIED = "applied"
    DECLINED = "declined"


@dataclass(frozen=True)
class Site:
    """One place where a pass found its pattern, or nearly did."""

    pass_name: str
    status: Status
    reasons: tuple[Reason, ...]
    """Every unmet requirement; empty where applied."""
    primitive: str
    shape: str
    """The root's first result, as in ``i32[81920]``."""
    source: str | None
    """``file.py:line`` of the user's code."""
    scope: str
    """Name-stack path."""
    calls: int = 1
    """How often the site is run, through all calls of its body; loops counted once."""
    equation: int = field(default=0, compare=False, repr=False)
    """Tells equations of one line apart while a program is rewritten."""
    lines: tuple[str, ...] = field(default=(), compare=False)
    """The lines that equations were taken from, where that was asked for."""
    addresses: tuple[str, ...] = field(default=(), compare=False)
    """What `optimize` knows each of its equations by, as called from each line (`disable`)."""
    around: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The equations around it, where addresses were asked for; `>` marks its own."""
    measured: Measurement | None = field(default=None, compare=False)
    """The figures that decided, where passes were asked to measure."""
    suggestion: Suggestion | None = field(default=None, compare=False)
    """What to write in the source instead, where that was asked for."""

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for two verdicts of a pass on one place in different rounds."""
        return self.pass_name, self.primitive, self.shape, self.source, self.scope


@dataclass(frozen=True)
class FrozenLeaf:
    """A parameter whose gradient is frozen, or looks so."""

    path: str | None
    """In the user's tree; None where it isn't clear whose gradient it is."""
    type: str
    """The gradient's where it is made, as in ``f32[4096,512]``."""
    way: str
    """``declared`` or ``recognised``."""
    status: Status
    source: str | None
    """Where the gradient is made."""
    flops: int
    """Of the products that make it: saved where applied, kept for its readers where declined."""
    collective_bytes: int
    """Operands of its collectives, on one device; likewise."""
    accumulator_bytes: int
    """What loops carry of it; likewise."""
    operations: tuple[tuple[str, int], ...]
    """Equations that make it and move it on, by primitive."""
    readers: tuple[str, ...]
    """What reads it, as in ``square at train.py:40``."""
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "type": self.type,
            "way": self.way,
            "status": self.status.value,
            "source": self.source,
            "flops": self.flops,
            "collective_bytes": self.collective_bytes,
            "accumulator_bytes": self.accumulator_bytes,
            "operations": dict(self.operations),
            "readers": list(self.readers),
            "reasons": [r.to_json() for r in self.reasons],
        }


class PassNotApplicable(Exception):
    """A pass asked for by name found no site; names every unmet requirement."""


class SiteDeclined(Exception):
    """Raised while substituting: the site must stay as it is."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.blamed: tuple[Accepted, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """A site about to be rewritten."""

    match: Match
    replacement: Replacement
    rewrite: Pass = field(repr=False)
