"""Find the site, or the few, with which a check fails and without which it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..lowering.errors import InputError
from ..lowering.words import plural
from ..passes.disable import Disabled
from ..passes.optimize import explain, optimize

MOST_CHECKS = 200

Outcome = Literal["found", "holds", "fails-without", "flaky", "unfinished"]
Check = Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Bisection:
    """What a bisection came to."""

    outcome: Outcome
    """``found``; ``holds``: the check holds with all sites on; ``fails-without``: it fails with all
    of them off; ``flaky``: the same sites failed once and held once; ``unfinished``: out of
    checks."""
    sites: tuple[str, ...]
    """Addresses of the fewest sites found that make the check fail together."""
    checks: int
    """How often the check was run."""
    among: int
    """Sites that apply."""
    said: str
    """One line about it, with what the check raised."""
    rest_holds: bool | None = None
    """Whether the check holds with these off and all else on; None where it wasn't asked."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"outcome": self.outcome, "sites": list(self.sites), "checks": self.checks,
                "among": self.among, "said": self.said, "rest_holds": self.rest_holds}  # fmt: skip


def bisect(
    fn: Callable[..., Any],
    check: Check,
    *args: Any,
    most: int = MOST_CHECKS,
    progress: Callable[[int, int], None] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Bisection:
    """The fewest sites of ``optimize(fn)`` with which ``check`` fails.

    By delta debugging: halves of the sites that fail are looked into, then what remains without a
    part, until no single one can be left out. Sites that only come up behind another are tried
    with it.

    Args:
      fn: the function.
      check: gets the optimized function; fails if it raises, or returns something false but None.
      *args: arguments of ``fn``, for which its sites are found; shapes will do.
      most: the most runs of ``check``.
      progress: called with runs so far and sites that are left.
      options: what `optimize` is to be told: ``passes``, ``contract`` and so on.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      InputError: the check returned what is neither true nor false.
    """
    told = dict(options or {})
    report = explain(fn, *args, **told, **kwargs)
    sites = [address for site in report.applied for address in site.addresses]
    told.pop("disable", None)
    off = frozenset((options or {}).get("disable", ()))
    search = _Search(lambda only: _trial(fn, told, only, off), check, most, progress, len(sites))
    return search.run(sites)


def _trial(
    fn: Callable[..., Any], told: Mapping[str, Any], only: frozenset[str], off: frozenset[str]
) -> Callable[..., Any]:
    names = frozenset(a for a in off if "@" not in a)
    kept = frozenset(a for a in only if a not in off and a.partition("@")[0] not in names)
    whole: dict[str, Any] = {**told, "disable": Disabled(only=kept)}
    return optimize(fn, **whole)


class _OutOfChecks(Exception):
    pass


@dataclass
class _Search:
    make: Callable[[frozenset[str]], Callable[..., Any]]
    check: Check
    most: int
    progress: Callable[[int, int], None] | None
    left: int
    checks: int = 0
    fault: str = ""
    """What the check said when it last failed."""
    known: dict[frozenset[str], bool] = field(default_factory=dict)

    def fails(self, sites: Iterable[str], again: bool = False) -> bool:
        """Whether the check fails with these sites alone."""
        chosen = frozenset(sites)
        if not again and chosen in self.known:
            return self.known[chosen]
        if self.checks >= self.most:
            raise _OutOfChecks
        self.checks += 1
        if self.progress is not None:
            self.progress(self.checks, self.left)
        made = self.make(chosen)
        try:
            said = self.check(made)
        except Exception as error:
            self.fault = _one_line(error)
            failed = True
        else:
            failed = said is not None and not _truth(said)
            self.fault = "the check returned something false" if failed else self.fault
        self.known.setdefault(chosen, failed)
        return failed

    def run(self, sites: Sequence[str]) -> Bisection:
        least = tuple(sites)
        try:
            if not sites:
                return self._done(
                    "holds", (), sites, "no site applies: nothing can break the check"
                )
            if self.fails(()):
                return self._done("fails-without", (), sites, f"with all off: {self.fault}")
            if not self.fails(sites):
                if self.fails(sites, again=True):
                    return self._done("flaky", (), sites, "with all on it held, then failed")
                return self._done("holds", (), sites, "it holds with every site on")
            least = self._minimal(list(sites))
            fault = self.fault
            if not self.fails(least, again=True):
                return self._done("flaky", least, sites, "these failed once, and held once")
            if self.fails((), again=True):
                return self._done("flaky", least, sites, "with all off it held, then failed")
            rest = [site for site in sites if site not in least]
            return self._done("found", least, sites, self.fault or fault, not self.fails(rest))
        except _OutOfChecks:
            return self._done(
                "unfinished", least, sites, f"stopped after {plural(self.checks, 'check')}"
            )

    def _done(
        self,
        outcome: Outcome,
        least: Sequence[str],
        sites: Sequence[str],
        said: str,
        rest_holds: bool | None = None,
    ) -> Bisection:
        return Bisection(outcome, tuple(least), self.checks, len(sites), said, rest_holds)

    def _minimal(self, sites: list[str]) -> tuple[str, ...]:
        """Of sites that fail together, those of which none can be left out."""
        parts = 2
        while len(sites) > 1:
            self.left = len(sites)
            size = -(-len(sites) // parts)
            chunks = [sites[i : i + size] for i in range(0, len(sites), size)]
            smaller = next((c for c in chunks if self.fails(c)), None)
            if smaller is not None:
                sites, parts = smaller, 2
                continue
            rest = ([s for s in sites if s not in c] for c in chunks)
            smaller = next((r for r in rest if r and self.fails(r)), None)
            if smaller is not None:
                sites, parts = smaller, max(parts - 1, 2)
                continue
            if parts >= len(sites):
                break
            parts = min(2 * parts, len(sites))
        self.fails(sites)
        return tuple(sites)


def _truth(said: Any) -> bool:
    """What a check returned, as true or false.

    Raises:
        InputError: it is neither, as an array of several elements.
    """
    try:
        return bool(said)
    except Exception as error:
        shape = getattr(said, "shape", None)
        of = "" if shape is None else f" of shape {tuple(shape)}"
        raise InputError(
            f"the check returned a value of type {type(said).__name__}{of}, which is neither true "
            "nor false; wanted True or False, as of numpy.array_equal or .all(), or None where it "
            "raises if it fails"
        ) from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__
