"""Compiles a staged program and climbs down the ladder to the best figures it can get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..compile import Compiled, CompileFailed, StagedModule, compile_staged
from ..process import Limits
from ..scratch import scratch
from ..words import agreeing, plural
from . import bundles as final_bundles
from . import profile
from .cache import Answer, CostCache, key_of
from .census import COLLECTIVES, collectives, counts
from .chip import chip_of
from .estimate import Figures, op_costs, unknown_loops
from .hlo import HloModule, read_hlo
from .model import Cost, Memory, OpCost, Rung
from .versions import versions

_SALVAGEABLE = ("crash", "time", "memory")


def measure(
    staged: StagedModule,
    *,
    limits: Limits | None = None,
    bundles: bool = False,
    analysis: bool = True,
    cache: CostCache | None = None,
) -> Cost:
    """The cost of a program.

    It is compiled with the compiler's static analysis on. Where that kills or outlasts its
    process, the program is compiled once more without, and what the analysis had written is kept.

    Args:
        staged: from `stage_module`.
        limits: of each compilation.
        bundles: whether to count final bundles although there are cycles.
        analysis: whether to try the compiler's static analysis at all.
        cache: where the compiler's answer may be found, and is kept; None compiles.

    Raises:
        CompileFailed: not even the plain compilation gave a program.
    """
    chip_of(staged.target)
    limits = limits or Limits()
    key = "" if cache is None else key_of(staged, bundles, analysis)
    answer = None if cache is None else cache.find(key, limits)
    if answer is None:
        way = climb if analysis else without_analysis
        answer = way(staged, limits, bundles)
        if cache is not None:
            cache.store(key, answer)
    if answer.failure is not None:
        raise answer.failure.of(staged.name)
    assert answer.compiled is not None
    assert answer.figures is not None
    notes = [*answer.notes, *staged.notes, *(cache.troubles if cache is not None else ())]
    return build_cost(staged, answer.compiled, answer.figures, notes)


def climb(staged: StagedModule, limits: Limits, bundles: bool) -> Answer:
    """Compiles a program as far up the ladder as it goes; a failure is an answer too."""
    with scratch() as parent:
        profiles, dump = Path(parent, "profiles"), Path(parent, "bundles")
        profiles.mkdir()
        dump.mkdir()
        extra = final_bundles.flags(dump) if bundles else []
        failures: list[CompileFailed] = []
        try:
            compiled = compile_staged(staged, flags=[profile.flag(profiles), *extra], limits=limits)
            return Answer(compiled, Figures("profile", {}, final_bundles.read_bundles(dump)))
        except CompileFailed as error:
            if error.kind not in _SALVAGEABLE:
                lasting = error.kind == "rejected"
                return Answer(None, None, failure=error, lasting=lasting)
            failures.append(error)
        salvaged, broken = profile.read_profiles(profiles)
        notes = [f"no profile of the whole program: {failures[0].cause}"]
        if broken:
            which = f"{plural(broken, 'file')} of the analysis {agreeing(broken, 'is', 'are')}"
            notes.append(f"{which} cut short: left out")
        compiled_plain, failure = _plain(staged, dump, limits, failures)
        counted = final_bundles.read_bundles(dump)
        figures = Figures(_rung(salvaged, counted), salvaged, counted)
        limited = any(f.kind in ("time", "memory") for f in failures)
        return Answer(
            compiled_plain,
            figures if failure is None else None,
            tuple(notes),
            failure,
            limits if limited else None,
            lasting=not any(f.accident for f in failures),
        )


def without_analysis(staged: StagedModule, limits: Limits, bundles: bool) -> Answer:
    """Compiles a program once, for its counts and memory."""
    with scratch() as folder:
        dump = Path(folder)
        flags = final_bundles.flags(dump) if bundles else []
        try:
            compiled = compile_staged(staged, flags=flags, limits=limits)
        except CompileFailed as error:
            limited = limits if error.kind in ("time", "memory") else None
            lasting = error.kind not in ("missing", "target") and not error.accident
            return Answer(None, None, failure=error, limited=limited, lasting=lasting)
        counted = final_bundles.read_bundles(dump)
        notes = ("no cycles: the static analysis wasn't asked for",)
        return Answer(compiled, Figures(_rung({}, counted), {}, counted), notes)


def _plain(
    staged: StagedModule, dump: Path, limits: Limits, failures: list[CompileFailed]
) -> tuple[Compiled | None, CompileFailed | None]:
    """Without analysis; the final bundles with it, unless dumping them is what fails.

    What fails on the way is added to ``failures``.
    """
    for flags in (final_bundles.flags(dump), []):
        try:
            return compile_staged(staged, flags=flags, limits=limits), None
        except CompileFailed as error:
            failures.append(error)
            if error.kind != "crash":
                break
    return None, failures[-1]


def _rung(salvaged: dict[str, int], counted: dict[str, int]) -> Rung:
    if salvaged:
        return "salvaged"
    return "bundles" if counted else "counts"


def build_cost(
    staged: StagedModule, compiled: Compiled, figures: Figures, notes: list[str]
) -> Cost:
    """The cost of a compiled program, from the figures of one rung."""
    module = read_hlo(compiled.hlo)
    chip = chip_of(staged.target)
    ops = op_costs(module, chip, figures)
    kinds, sorts = counts(module)
    rung = figures.rung
    if rung in ("profile", "salvaged") and not any(op.rung == rung for op in ops):
        rung = "bundles" if any(op.bundles for op in ops) else "counts"
        notes = [*notes, "no cycles: the static analysis gives none for any of its operations"]
    return Cost(
        name=staged.name,
        target=staged.target,
        chip=chip,
        rung=rung,
        ops=ops,
        memory=_memory(compiled),
        counts=kinds,
        sorts=sorts,
        collectives=collectives(module, chip),
        notes=(*notes, *_left_out(module, ops)),
        versions=versions(),
        seconds=compiled.seconds,
    )


def _memory(compiled: Compiled) -> Memory:
    found = {name: max(0, int(value)) for name, value in compiled.memory.items()}
    summed = found["arguments"] + found["outputs"] - found["alias"] + found["temp"]
    return Memory(**{**found, "peak": found["peak"] or summed})


def _left_out(module: HloModule, ops: tuple[OpCost, ...]) -> list[str]:
    found = []
    loops = unknown_loops(module)
    if loops:
        found.append(
            f"{len(loops)} of the program's loops {agreeing(len(loops), 'runs', 'run')} an unknown "
            f"number of times "
            f"({', '.join(loops[:3])}{', …' if len(loops) > 3 else ''}): left out of totals"
        )
    if any(op.times == 0 for op in ops):
        found.append("of a conditional's branches the costliest is counted")
    sparse = [op for op in ops if op.sparse]
    if sparse:
        calls = plural(len(sparse), "call")
        have = agreeing(len(sparse), "has", "have")
        found.append(f"{calls} of the SparseCore {have} no cycles on any rung")
    aside = [
        op
        for op in ops
        if op.overlapped and not op.sparse and not op.kind.endswith(("-done", "-update"))
    ]
    if aside:
        moved = sum(op.hbm_bytes * (1 if op.times is None else op.times) for op in aside)
        found.append(
            f"{_named(aside)} that {agreeing(len(aside), 'runs', 'run')} beside other instructions "
            f"{agreeing(len(aside), 'has', 'have')} no cycles ({plural(moved, 'HBM byte')})"
        )
    return found


def _named(aside: Sequence[OpCost]) -> str:
    """``2 copies and 1 collective``."""
    copies = sum(op.kind.startswith("copy") for op in aside)
    together = sum(op.kind.removesuffix("-start") in COLLECTIVES for op in aside)
    rest = len(aside) - copies - together
    parts = [
        plural(count, one, many)
        for count, one, many in (
            (copies, "copy", "copies"),
            (together, "collective", "collectives"),
            (rest, "other operation", "other operations"),
        )
        if count
    ]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if parts[:-1] else parts[0]
