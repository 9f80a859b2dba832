"""What a verification says of each site, and of all together, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...lowering.words import plural


class Verdict(Enum):
    """What became of a site."""

    VERIFIED = "VERIFIED"
    """Both sides kept the contract on every input."""
    VIOLATION = "VIOLATION"
    """They didn't on one."""
    UNKNOWN = "UNKNOWN"
    """It could not be run, or nothing follows from what was run."""


@dataclass(frozen=True)
class Counterexample:
    """Inputs on which a rewrite breaks its contract."""

    theme: str
    place: str
    """Where the two differ, and both values."""
    arrays: tuple[Any, ...] = field(repr=False)
    """One for each input of the site."""
    inputs: tuple[str, ...] = ()
    """Their types, and short ones whole."""
    of: str = "values"
    """``values``, ``derivative`` or ``promise``."""


@dataclass(frozen=True)
class Checked:
    """What running one cut-out site showed."""

    verdict: Verdict
    reason: str = ""
    runs: int = 0
    """Inputs on which both sides were run."""
    derivatives: int = 0
    """Inputs on which derivatives were compared as well."""
    producers: int = 0
    """Equations before the site that were run with it, since it rests on how inputs belong
    together."""
    shapes: tuple[str, ...] = ()
    """Types of the inputs at which it was run."""
    shrunk: bool = False
    """Whether these are smaller than the program's."""
    ratios: tuple[float, float] | None = None
    """Greatest error and norm of errors as multiples of the original's, for ROUNDING."""
    notes: tuple[str, ...] = ()
    counterexample: Counterexample | None = None


@dataclass(frozen=True)
class MutantScore:
    """What became of one deliberately broken copy."""

    name: str
    killed: bool
    how: str
    """What gave it away; of a survivor nothing, of an equivalent one why it is the same."""
    equivalent: bool = False


@dataclass(frozen=True)
class SiteVerdict:
    """One applied site."""

    key: str
    """The site's first address, as `optimize(disable=…)` takes it."""
    pass_name: str
    contract: str
    primitive: str
    type: str
    source: str | None
    scope: str
    calls: int
    checked: Checked
    facts: tuple[str, ...] = ()
    """What was taken as known of the site's inputs."""
    mutants: tuple[MutantScore, ...] = ()
    repro: str | None = None
    """The script that shows a violation, where one was saved."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        c = self.checked
        example = c.counterexample
        return {
            "site": self.key,
            "pass": self.pass_name,
            "contract": self.contract,
            "primitive": self.primitive,
            "type": self.type,
            "source": self.source,
            "scope": self.scope,
            "calls": self.calls,
            "verdict": c.verdict.value,
            "reason": c.reason,
            "runs": c.runs,
            "derivatives": c.derivatives,
            "producers": c.producers,
            "shapes": list(c.shapes),
            "shrunk": c.shrunk,
            "error_ratios": None if c.ratios is None else list(c.ratios),
            "notes": list(c.notes),
            "facts": list(self.facts),
            "counterexample": None
            if example is None
            else {
                "theme": example.theme,
                "of": example.of,
                "place": example.place,
                "inputs": list(example.inputs),
            },
            "repro": self.repro,
            "mutants": [
                {"name": m.name, "killed": m.killed, "equivalent": m.equivalent, "how": m.how}
                for m in self.mutants
            ],
        }


MADE_UP = (
    "the program was run on made-up arguments, for none or not all were given as arrays: what is "
    "read from them holds or fails of these alone. Give arrays as they occur"
)


def remarks(facts: Mapping[str, Any]) -> list[str]:
    """What to know of a check of facts beside those that are broken."""
    ran = facts["made_up"] and facts["runs"]
    return [*([MADE_UP] if ran else []), *([facts["why"]] if facts["why"] is not None else [])]


@dataclass(frozen=True)
class Evidence:
    """What was shown of a program's rewrites."""

    name: str
    sites: tuple[SiteVerdict, ...]
    facts: Mapping[str, Any] | None = None
    """What the check of facts in whole runs found; None where none was made."""
    notes: tuple[str, ...] = ()
    mutated: bool = False
    """Whether mutants were asked for."""
    ended: bool = True
    """Whether the passes came to an end; else sites were left that nobody has seen."""

    def count(self, verdict: Verdict) -> int:
        """How many sites ended so."""
        return sum(s.checked.verdict is verdict for s in self.sites)

    @property
    def shrunk(self) -> int:
        """How many sites were verified at smaller shapes than the program's, which shows less."""
        return sum(s.checked.shrunk and s.checked.verdict is Verdict.VERIFIED for s in self.sites)

    @property
    def killed(self) -> tuple[int, int]:
        """Mutants caught, and all but those that are the same program."""
        real = [m for s in self.sites for m in s.mutants if not m.equivalent]
        return sum(m.killed for m in real), len(real)

    @property
    def survivors(self) -> tuple[tuple[str, str], ...]:
        """Site and name of each mutant that was not caught."""
        return tuple(
            (s.key, m.name)
            for s in self.sites
            for m in s.mutants
            if not m.killed and not m.equivalent
        )

    @property
    def verdict(self) -> Verdict:
        """VERIFIED only if there are sites and each is; a violation comes before what is open."""
        broken = self.facts is not None and bool(self.facts["broken"])
        if self.count(Verdict.VIOLATION) or self.survivors or broken:
            return Verdict.VIOLATION
        verified = self.count(Verdict.VERIFIED)
        idle = self.mutated and not self.killed[1]
        unsure = self.facts is not None and self.facts["why"] is not None
        if not self.ended or not self.sites or verified < len(self.sites) or idle or unsure:
            return Verdict.UNKNOWN
        return Verdict.VERIFIED

    @property
    def exit_code(self) -> int:
        """0 all verified, 1 a violation or a surviving mutant, 2 something is open."""
        return {Verdict.VERIFIED: 0, Verdict.VIOLATION: 1, Verdict.UNKNOWN: 2}[self.verdict]

    def line(self) -> str:
        """The score in one line."""
        n = len(self.sites)
        broken = self.facts is not None and bool(self.facts["broken"])
        parts = [f"{self.count(Verdict.VERIFIED)} of {plural(n, 'site')} verified"]
        if broken:
            parts[0] += " on inputs that obey all facts"
        if self.shrunk:
            parts.append(f"{self.shrunk} of these at shrunk shapes only")
        for verdict, word in ((Verdict.VIOLATION, "violated"), (Verdict.UNKNOWN, "unknown")):
            if self.count(verdict):
                parts.append(f"{self.count(verdict)} {word}")
        if self.mutated:
            killed, total = self.killed
            parts.append(f"{killed} of {total} mutants killed")
        return ", ".join([*parts, *self._facts()])

    def _facts(self) -> list[str]:
        if self.facts is None:
            return []
        if self.facts["broken"]:
            total = plural(self.facts["total"], "fact")
            return [f"{len(self.facts['broken'])} of {total} broken in the program"]
        if self.facts["why"] is not None:
            return ["facts not checked"]
        made_up = " on made-up arguments" if self.facts["made_up"] else ""
        return [f"{self.facts['held']} of {plural(self.facts['total'], 'fact')} held{made_up}"]

    def to_json(self) -> dict[str, Any]:
        """Plain data; the schema is ``verify`` in docs/json.schema.json."""
        killed, total = self.killed
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "exit_code": self.exit_code,
            "score": self.line(),
            "verified": self.count(Verdict.VERIFIED),
            "violations": self.count(Verdict.VIOLATION),
            "unknown": self.count(Verdict.UNKNOWN),
            "mutants": {"killed": killed, "total": total} if self.mutated else None,
            "survivors": [{"site": site, "name": name} for site, name in self.survivors],
            "facts": None if self.facts is None else dict(self.facts),
            "sites": [s.to_json() for s in self.sites],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A plain-text list, a site a paragraph."""
        lines = [f"{self.name}: {self.verdict.value}: {self.line()}"]
        said: Counter[tuple[str, ...]] = Counter()
        for s in self.sites:
            line = f"  {s.checked.verdict.value:9} {s.key}  {s.primitive} → {s.type}"
            notes = (n for n in s.checked.notes if not n.startswith("no deriv"))
            said[line, s.checked.reason, *notes] += 1
        for (line, *more), times in said.items():
            lines.append(line if times == 1 else f"{line}, {times} times")
            lines.extend(f"            {text}" for text in more if text)
        if self.facts is not None:
            lines.extend(f"  facts: {text}" for text in self.facts["broken"])
            lines.extend(f"  facts: {text}" for text in remarks(self.facts))
        lines.extend(f"  note: {n}" for n in self.notes)
        return "\n".join(lines)
