"""What `optimize` found and did, as a value: sites, coverage, rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..lowering.words import UNADDRESSED
from .base import FrozenLeaf, Site, Status
from .frozen_tree import frozen_tree

SCHEMA = "relower.report/1"


@dataclass(frozen=True)
class NotEnteredGroup:
    """Bodies of one kind that were not entered."""

    primitive: str
    param: str
    reason: str
    count: int


@dataclass(frozen=True)
class Report:
    """Every site found, applied or declined with reasons, and what was not looked into."""

    name: str
    """The function's name."""
    passes: tuple[str, ...]
    """The passes that ran, in order of preference."""
    sites: tuple[Site, ...]
    coverage: tuple[NotEnteredGroup, ...]
    equations: int
    """Live equations visited, each body counted once."""
    bodies: int
    """Distinct bodies visited, each in one context."""
    rounds: int
    """Rounds of matching and substituting until nothing more applied."""
    ended: bool = True
    """Whether nothing more applied; False where the bound on rounds was hit before that."""
    frozen: tuple[FrozenLeaf, ...] = ()
    """Frozen parameters, in the order of the user's tree."""
    superseded: tuple[str, ...] = ()
    """Passes that had a candidate at a site which a preferred pass took."""
    expressions: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)
    """Expressions of the source that sites were traced from, with the edits that would make the
    sites unnecessary or why there are none; where suggestions were asked for."""
    notes: tuple[str, ...] = ()
    """Bounds hit and anything else a reader must know."""

    @property
    def applied(self) -> tuple[Site, ...]:
        """The sites that were rewritten."""
        return tuple(s for s in self.sites if s.status is Status.APPLIED)

    @property
    def declined(self) -> tuple[Site, ...]:
        """The sites that a pass left alone, with reasons; another may have rewritten it."""
        return tuple(s for s in self.sites if s.status is Status.DECLINED)

    def counts(self) -> dict[str, int]:
        """Sites rewritten, by pass: an equation called several times from one line counts once."""
        return dict(Counter(s.pass_name for s in self.applied))

    def taken_by(self, site: Site) -> str | None:
        """The pass that rewrote what another one declined; None if none did.

        Told by the place: primitive, type, line and scope. Where as many equations there were not
        rewritten, or the other pass declined one too, it isn't said.
        """
        if site.status is not Status.DECLINED:
            return None
        there = [s for s in self.sites if s.place[1:] == site.place[1:]]
        for done in (s for s in there if s.status is Status.APPLIED):
            own = [s for s in there if s.pass_name == done.pass_name]
            whole = all(s.status is Status.APPLIED for s in own)
            if whole and sum(s.calls for s in own) >= site.calls:
                return done.pass_name
        return None

    def tally(self) -> dict[str, int]:
        """Sites ``applied``, ``declined`` and ``taken``, each site once.

        Taken is what one pass declined and another rewrote, so that it was not left as it is.
        """
        taken = sum(self.taken_by(s) is not None for s in self.declined)
        left = len(self.declined) - taken
        return {"applied": len(self.applied), "declined": left, "taken": taken}

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a schema name for readers to check."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "passes": list(self.passes),
            **self.tally(),
            "sites": [
                {
                    "pass": s.pass_name,
                    "status": s.status.value,
                    "primitive": s.primitive,
                    "type": s.shape,
                    "source": s.source,
                    "scope": s.scope,
                    "calls": s.calls,
                    "addresses": list(s.addresses),
                    "around": list(s.around),
                    "taken_by": self.taken_by(s),
                    "reasons": [r.to_json() for r in s.reasons],
                    **({} if not s.lines else {"lines": list(s.lines)}),
                    **({} if s.measured is None else {"measured": asdict(s.measured)}),
                    **({} if s.suggestion is None else {"suggestion": s.suggestion.to_json()}),
                }
                for s in self.sites
            ],
            "frozen": [leaf.to_json() for leaf in self.frozen],
            "coverage": [
                {
                    "primitive": g.primitive,
                    "param": g.param,
                    "reason": g.reason,
                    "count": g.count,
                }
                for g in self.coverage
            ],
            "equations": self.equations,
            "bodies": self.bodies,
            "rounds": self.rounds,
            "superseded": list(self.superseded),
            **({"expressions": list(self.expressions)} if self.expressions else {}),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A plain-text table, a site a paragraph."""
        n = self.tally()
        taken = (
            f", {n['taken']} declined by one pass and rewritten by another" if n["taken"] else ""
        )
        lines = [f"{self.name}: {n['applied']} applied, {n['declined']} declined{taken}"]
        for block, times in Counter(map(self._paragraph, self.sites)).items():
            # A pass that matches what it puts there has one site again in each round.
            lines.append(block[0] if times == 1 else f"{block[0]}, {times} times")
            lines.extend(block[1:])
        lines.extend("  " + line for line in frozen_tree([f.to_json() for f in self.frozen]))
        lines.extend(
            f"  not entered: {g.count} × {g.primitive}.{g.param}: {g.reason}" for g in self.coverage
        )
        lines.extend(f"  note: {n}" for n in self.notes)
        return "\n".join(lines)

    def _paragraph(self, s: Site) -> tuple[str, ...]:
        calls = f", run by {s.calls} equations" if s.calls > 1 else ""
        taken = self.taken_by(s)
        calls += "" if taken is None else f", which {taken} rewrote"
        lines = [
            f"  {s.status.value:8} {s.pass_name}  {s.primitive} → {s.shape}{calls}",
            f"           {s.source or 'unknown line'}  {s.scope}",
            *(f"           {address}" for address in s.addresses),
        ]
        if any(address.endswith("#?") for address in s.addresses):
            lines.append(f"           {UNADDRESSED}")
        lines.extend(f"           {r.code}: {r}" for r in s.reasons)
        lines.extend([f"           {s.measured}"] if s.measured is not None else [])
        if s.suggestion is not None:
            lines.append(f"           in the source: {s.suggestion.sentence}")
        return tuple(lines)
