"""Run a cut-out site against what it replaced, and judge it by the pass's contract."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...passes.base import Contract
from . import places
from .compare import Errors, Place, difference
from .derivative import Derivative, derivative
from .evaluate import Rule, Unrunnable, is_complex, is_float
from .fillings import fill, filled
from .inputs import NoInputs, Theme
from .problem import OF_REWRITE, Problem, build
from .promised import breaks_its_own, narrowed, not_held, ties_turned, watch
from .record import Piece
from .themes import EXACT, FINITE, ROUNDED, SPOILED, each_special, each_value
from .verdict import Checked, Counterexample, Verdict

Array = Any
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_SEEDS = 32
"""Seeds over which errors are averaged before a rewrite is said to round worse."""


@dataclass(frozen=True)
class Limits:
    """How much may be spent on one site."""

    seconds: float = 60.0
    bytes: int = 1 << 30
    work: int = 20_000_000_000
    """Multiplications and additions of matrix products in one run."""
    seeds: int = 2
    """Times each theme is filled anew."""


class OverLimit(Exception):
    """A site is too large to run at these shapes; the message says by what."""


class NothingSaid(NoInputs):
    """The original breaks a promise of its own on every input."""


@dataclass(frozen=True)
class Broken:
    """The first input on which a contract is broken."""

    place: Place | str
    theme: str
    arrays: tuple[Array, ...]
    of: str = "values"
    cotangents: tuple[Array, ...] = ()


@dataclass
class Tally:
    """What was run of one problem."""

    runs: int = 0
    derivatives: int = 0
    ratios: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """Of the runs, those that say nothing: there the original breaks a promise of its own."""


PROMISE = "promise"
"""Of what a violation may be, beside values and derivatives."""
Level = tuple[int, bool]
"""Steps back to the producers that are run with a site, and whether after those of floats, too."""


def check_piece(piece: Piece, contract: Contract, limits: Limits) -> tuple[Checked, Level | None]:
    """The verdict on a site, and with which of its producers it was run.

    Where the two sides differ on inputs that obey all that is known of each, or the rewrite reads
    what the original doesn't, the site is run again with more and more of its producers: what holds
    between its inputs in the program then holds in each run.
    """
    end = time.monotonic() + limits.seconds
    broken: tuple[Broken, Problem, Level] | None = None
    reasons: dict[str, None] = {}
    deepest, tried = piece.ancestry.depth, set[frozenset[int]]()
    levels = _levels(deepest)
    while levels:
        depth, floats = levels.pop(0)
        try:
            problem = build(piece, depth, floats)
            if all(0 in a.aval.shape for a in problem.before.outputs):
                return Checked(Verdict.UNKNOWN, "no elements to compare"), None
            if problem.unshared and (depth < deepest or not floats):
                reasons[_unshared(problem)] = None
                continue
            if problem.taken in tried:
                continue
            tried.add(problem.taken)
            _within(problem, limits)
            found, tally = run(problem, contract, limits, end)
        except (Unrunnable, NoInputs, OverLimit) as error:
            reasons[str(error)] = None
            broken = None if isinstance(error, NothingSaid) else broken
            continue
        if found is None:
            return _verified(problem, tally), (depth, floats)
        broken = found, problem, (depth, floats)
        if levels and time.monotonic() > end:
            # Whether it differs in the program, all of its producers say.
            levels, end = levels[-1:], time.monotonic() + limits.seconds
    if broken is None:
        why = "; ".join(list(reasons)[-2:]) or "nothing could be run"
        return Checked(Verdict.UNKNOWN, why), None
    found, problem, level = broken
    if problem.unshared:
        why = f"{_unshared(problem)}; on independent values the two sides differ"
        return Checked(Verdict.UNKNOWN, why), None
    if deepest and level != (deepest, True) and _only_too_large(reasons):
        large = next(r for r in reasons if "limit" in r)
        why = f"differs on inputs that its producers may never make: {large}"
        return Checked(Verdict.UNKNOWN, why), None
    from .smallest import smallest

    return violation(problem, smallest(problem, contract, found)), level


def _levels(deepest: int) -> list[Level]:
    """How many steps back to go, and whether after what makes floating point values."""
    depths = [*(d for d in DEPTHS if d < deepest), deepest]
    exact = [(d, False) for d in depths]
    return [*exact[:1], (OF_REWRITE, True), *exact[1:], *((d, True) for d in depths)]


def _only_too_large(reasons: dict[str, None]) -> bool:
    return any("limit" in r for r in reasons)


def _unshared(problem: Problem) -> str:
    return f"the rewrite reads {', '.join(problem.unshared)}, which the original doesn't"


def _verified(problem: Problem, tally: Tally) -> Checked:
    if not tally.runs:
        return Checked(Verdict.UNKNOWN, "no input was run")
    return Checked(
        Verdict.VERIFIED,
        runs=tally.runs,
        derivatives=tally.derivatives,
        producers=problem.producers,
        shapes=types(problem),
        ratios=tally.ratios,
        notes=tally.notes,
    )


def violation(problem: Problem, found: Broken) -> Checked:
    """The verdict on a site that breaks its contract."""
    from .smallest import written

    said = tuple(f"{t}: {written(a)}" for t, a in zip(types(problem), found.arrays))
    example = Counterexample(found.theme, str(found.place), found.arrays, said, found.of)
    what = {"values": "the values differ", PROMISE: "the rewrite breaks a promise that it makes"}
    return Checked(
        Verdict.VIOLATION,
        f"{what.get(found.of, 'the derivatives differ')} ({found.theme}): {found.place}",
        producers=problem.producers,
        shapes=types(problem),
        counterexample=example,
    )


def types(problem: Problem) -> tuple[str, ...]:
    """The types of a problem's inputs."""
    return tuple(v.aval.str_short(short_dtypes=True) for v in problem.before.inputs)


def _within(problem: Problem, limits: Limits) -> None:
    if problem.bytes > limits.bytes:
        raise OverLimit(f"it takes {problem.bytes:,} bytes, above the limit of {limits.bytes:,}")
    if problem.work > limits.work:
        raise OverLimit(
            f"it takes {problem.work:,} multiplications and additions, above the limit of "
            f"{limits.work:,}"
        )


def run(
    problem: Problem, contract: Contract, limits: Limits, end: float
) -> tuple[Broken | None, Tally]:
    """Both sides on every theme; the first input that shows a difference.

    Raises:
        Unrunnable: the original itself can't be run, or not precisely.
        NoInputs: nothing can be made that obeys what is known, or says anything.
    """
    tally = Tally()
    themes = FINITE if contract is Contract.ROUNDING else EXACT
    fillings = itertools.chain(
        filled(problem, places.of_values(problem), 1),
        filled(problem, themes, limits.seeds),
        filled(problem, each_value(problem.ranges), 1),
    )
    indices = (filled(small, themes[:3], limits.seeds) for small in narrowed(problem))
    fillings = itertools.chain(fillings, *indices)
    if contract is not Contract.ROUNDING:
        sizes = [i.size for i in problem.inputs if is_float(i.dtype) or is_complex(i.dtype)]
        fillings = itertools.chain(fillings, filled(problem, each_special(sizes), 1))
    for theme, arrays in fillings:
        broken = values_differ(problem, contract, theme.name, arrays, tally)
        tally.runs += 1
        if broken is not None:
            return broken, tally
        if time.monotonic() > end:
            tally.notes += (f"stopped after {limits.seconds:g} s with {tally.runs} inputs",)
            break
    if tally.runs and tally.left_out == tally.runs:
        raise NothingSaid("on every input the original breaks a promise that it makes itself")
    tally.runs -= tally.left_out
    tally.notes += not_held(problem)
    if contract is Contract.ROUNDING:
        from .magnitudes import far_from_one
        from .wide import wide_differs

        tally.notes += _spread(problem)
        broken, ratios = rounded(problem, "values", tally, end)
        tally.ratios = ratios
        within = places.of_errors(problem)
        broken = broken or rounded(problem, "values", tally, end, within, least=1)[0]
        broken = broken or far_from_one(problem, tally, end)
        broken = broken or wide_differs(problem, tally, end, limits.seeds)
        if broken is not None:
            return broken, tally
    from .judge_derivative import derivatives_differ

    return derivatives_differ(problem, contract, tally, limits, end), tally


def values_differ(
    problem: Problem,
    contract: Contract,
    theme: str,
    arrays: Sequence[Array],
    tally: Tally | None = None,
) -> Broken | None:
    """Whether one input shows a difference that its contract doesn't allow, or a broken promise."""
    before = problem.run(problem.before, arrays)
    seen = watch(problem)
    after = _after(problem, arrays, None if problem.mutation else seen.rule)
    if isinstance(after, str):
        return Broken(after, theme, tuple(arrays))
    place: Place | str | None = difference(before, after, contract, problem.arithmetic)
    turn = ties_turned(problem) if place is None else None
    if turn is not None:
        after = _after(problem, arrays, turn)
        place = after if isinstance(after, str) else (
            difference(before, after, contract, problem.arithmetic))  # fmt: skip
        place = None if place is None else f"with the order that a sort leaves open turned, {place}"
    if place is None and not seen.found:
        return None
    if seen.of_program or breaks_its_own(problem, arrays):
        if tally is not None:
            tally.left_out += 1
        return None
    if place is not None:
        return Broken(place, theme, tuple(arrays))
    return Broken(next(iter(seen.found.values())), theme, tuple(arrays), PROMISE)


def _after(
    problem: Problem, arrays: Sequence[Array], first: Rule | None = None
) -> list[Array] | str:
    """The rewrite's outputs; where it fails and the original doesn't, how."""
    try:
        return problem.run(problem.after, arrays, first)
    except Unrunnable:
        raise
    except Exception as error:
        return f"the rewrite fails: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of a message that says anything."""
    return next((s.strip() for s in str(error).splitlines() if s.strip()), "")[:200]


def _spread(problem: Problem) -> tuple[str, ...]:
    """Whether a NaN or an infinity reaches further than it did, which no rounding contract says."""
    broken = values_differ(problem, Contract.ROUNDING, SPOILED.name, fill(problem, SPOILED, 0))
    if broken is None or broken.of == PROMISE:
        return ()
    return (f"a NaN or an infinity reaches further than before: {broken.place}",)


Fill = Callable[[Problem, Sequence[Theme], int, int], Iterator[tuple[Theme, list[Array]]]]
Both = Callable[[Sequence[Array]], tuple[list[Array], list[Array] | str]]
Exact = Callable[[Sequence[Array]], list[Array]]


def values_of(problem: Problem, arrays: Sequence[Array]) -> tuple[list[Array], list[Array] | str]:
    """Both sides' outputs; where the rewrite fails, how."""
    return problem.run(problem.before, arrays), _after(problem, arrays)


def _values(problem: Problem) -> tuple[Both, Exact]:
    return (lambda arrays: values_of(problem, arrays)), problem.exactly


def _of_derivative(problem: Problem, theme: Theme) -> tuple[Both, Exact]:
    found = derivative(problem)
    assert isinstance(found, Derivative)
    found = replace(found, real=theme.real_cotangents)
    return found.both, found.exactly


def rounded(
    problem: Problem,
    of: str,
    tally: Tally,
    end: float,
    themes: Sequence[Theme] = ROUNDED,
    inputs: Fill | None = None,
    least: int = 4,
) -> tuple[Broken | None, tuple[float, float] | None]:
    """Whether errors stay within the bound, as run here or else with each sum rounded once.

    In which order a matrix product adds up, no operation says, and a CPU's is not a TPU's.
    Inputs are those of `filled` or another; of each theme no fewer seeds than the least.
    """
    how = inputs or filled, least
    found = _errors(problem, of, tally, end, themes, *how)
    if found[0] is None or not isinstance(found[0].place, str) or found[1] is None:
        return found
    again = _errors(replace(problem, summed=True, compiled={}), of, tally, end, themes, *how)
    if again[0] is None:
        tally.notes += (f"{of} as this CPU adds: {found[0].place}; with each sum rounded once the "
                        "bound holds",)  # fmt: skip
        return again
    return found


def _errors(
    problem: Problem,
    of: str,
    tally: Tally,
    end: float,
    themes: Sequence[Theme],
    inputs: Fill,
    least: int,
) -> tuple[Broken | None, tuple[float, float] | None]:
    """Whether errors stay within the bound, averaged over more and more seeds until they do."""
    worst: tuple[float, float] | None = None
    for theme in themes:
        values = of == "values"
        both, exactly = _values(problem) if values else _of_derivative(problem, theme)
        errors: dict[int, Errors] = {}
        seeds, first = least, 0
        arrays: list[Array] = []
        while True:
            for _, arrays in inputs(problem, [theme], seeds - first, first):
                before, after = both(arrays)
                if isinstance(after, str):
                    return Broken(after, theme.name, tuple(arrays), of), worst
                exact = exactly(arrays)
                tally.runs += of == "values"
                tally.derivatives += of != "values"
                broken = _add(errors, before, after, exact)
                if broken is not None:
                    return Broken(broken, theme.name, tuple(arrays), of), worst
                if time.monotonic() > end and all(e.holds for e in errors.values()):
                    break  # one run of a large site may take seconds
            holds = all(e.holds for e in errors.values())
            if holds or seeds >= MOST_SEEDS or any(e.is_hopeless for e in errors.values()):
                break
            first, seeds = seeds, min(2 * seeds, MOST_SEEDS)
        for i, e in errors.items():
            if not e.holds:
                where = (
                    f"output {i}: greatest error {e.ratios[0]:.3f} times, norm {e.ratios[1]:.3f} "
                    f"times the original's over {e.runs} inputs; at most 1.10"
                )
                return Broken(where, theme.name, tuple(arrays), of), e.ratios
            worst = e.ratios if worst is None else tuple(map(max, worst, e.ratios))  # type: ignore[assignment]
        if time.monotonic() > end:
            tally.notes += (f"errors of {of} were averaged until the time ran out",)
            break
    return None, worst


def _add(
    errors: dict[int, Errors], before: list[Array], after: list[Array], exact: list[Array]
) -> Place | None:
    for i, (b, a, e) in enumerate(zip(before, after, exact, strict=True)):
        if e.dtype != np.float64 or b.dtype == e.dtype == np.int64:
            place = difference([b], [a], Contract.BITWISE, False)
            if place is not None:
                return replace(place, output=i)
            continue
        place = difference([b], [a], Contract.ROUNDING, True)
        if place is not None:
            return replace(place, output=i)
        errors[i] = errors.get(i, Errors()).plus(b, a, e)
    return None
