"""Whether the facts that rewrites lean on hold where the whole program runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...compat import jaxprs
from ...compat.jaxprs import Body, Var
from ...matchers.fact import Fact
from ...matchers.fact_check import words
from .check import Limits, first_line
from .inputs import obeys
from .problem import cost
from .record import Kept, Recorder
from .whole import arguments, run


@dataclass(frozen=True)
class Leaning:
    """What a rewrite takes as known of one value."""

    fact: Fact
    by: str
    """The rewrite: its pass, and where its site is."""


def leaned_on(kept: Iterable[Kept]) -> dict[Var, list[Leaning]]:
    """What rewrites take as known of the values at their edges, in each context of a body."""
    found: dict[Var, list[Leaning]] = {}
    for one in kept:
        if one.piece is None:
            continue
        by = f"{one.rewrite.name} at {one.match.scope.whereabouts(one.match.eqn)}"
        for var, alias in one.piece.ancestry.aliases.items():
            fact = one.piece.ancestry.facts.get(alias) if jaxprs.is_var(alias) else None
            if words(fact, var.aval):
                assert fact is not None
                found.setdefault(var, []).append(Leaning(fact, by))
    return found


def held_of(recorder: Recorder, leaves: Sequence[Any], limits: Limits) -> dict[str, Any]:
    """Whether what rewrites lean on holds in runs of the program: on ``leaves`` if they are arrays.

    Returns:
        As `held`.
    """
    kept = [one for several in recorder.kept.values() for one in several]
    if recorder.program is None:
        return {"held": 0, "total": 0, "runs": 0, "made_up": False, "broken": [],
                "why": "nothing was rewritten"}  # fmt: skip
    runs, made_up = arguments(recorder.program, leaves, limits.seeds)
    return held(recorder.program, leaned_on(kept), runs, limits.bytes, made_up=made_up)


def held(
    body: Body,
    facts: Mapping[Var, Sequence[Leaning]],
    runs: Sequence[Sequence[Any]],
    most: int,
    *,
    made_up: bool = False,
) -> dict[str, Any]:
    """Whether facts held in runs of the program as it was before any rewrite.

    Args:
        body: the program.
        facts: by variable; of a body that is run in several contexts, one of its facts must hold.
        runs: arguments of each run.
        most: bytes that one run may take.
        made_up: whether the arguments are, since none were given.

    Returns:
        ``held``, ``total`` of those that were looked at, ``runs``, whether these were ``made_up``,
        ``broken`` in words, and ``why`` nothing follows, or None.
    """
    seen: dict[Var, str | None] = {}

    def watch(var: Var, value: Any) -> None:
        if var in facts and seen.get(var) is None:
            said = [obeys(np.asarray(value), one.fact) for one in facts[var]]
            if None in said:
                seen[var] = None
                return
            by = ", ".join(dict.fromkeys(one.by for one in facts[var]))
            known = words(facts[var][0].fact, var.aval)
            seen[var] = f"{known}: {said[0]}; taken as known by {by}"

    why = None
    _, size = cost(jaxprs.opened(body).eqns)
    if size > most:
        why = f"a run of the program takes {size:,} bytes, above the limit of {most:,}"
    done = 0
    for arrays in () if why else runs:
        try:
            run(body, arrays, watch)
            done += 1
        except Exception as error:
            why = f"the program can't be run: {type(error).__name__}: {first_line(error)}"
            break
    broken = [f"{v.aval.str_short(short_dtypes=True)} {said}" for v, said in seen.items() if said]
    if why is None and facts and not seen:
        why = "no value that a rewrite leans on was met"
    return {"held": len(seen) - len(broken), "total": len(seen), "runs": done, "made_up": made_up,
            "broken": broken, "why": why}  # fmt: skip


def facts_of(kept: Sequence[Kept]) -> tuple[str, ...]:
    """What was known of a site's inputs beyond their types, in words."""
    found: dict[str, None] = {}
    for one in kept:
        if one.piece is not None:
            for var in dict.fromkeys((*one.piece.before.inputs, *one.piece.after.inputs)):
                said = words(one.piece.ancestry.facts.get(var), var.aval)
                if said:
                    found[f"{var.aval.str_short(short_dtypes=True)} {said}"] = None
    return tuple(found)
