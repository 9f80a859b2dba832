"""One program against every mutant and every variation of its module, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...compat.lowered import calling_convention, hoisted_constants
from ...compat.mlir import ir, mosaic_version
from ...lowering.case import Case
from ...lowering.lower import stage
from ...lowering.normalize import Normal
from ...lowering.program import LEVELS, Program, Stamp
from ...lowering.targets import DEFAULT_TARGET, make_mesh, parse_target
from . import (
    collective_mutants,
    constant_mutants,
    entry_mutants,
    kernel_mutants,
    noise,
    operation_mutants,
    order_mutants,
)
from .draft import Draft, Staged
from .liveness import Liveness
from .mutant import Mutant, Variation
from .score import Row
from .verdicts import compared, fault_of

MUTANTS: tuple[Mutant, ...] = (
    *operation_mutants.MUTANTS,
    *constant_mutants.MUTANTS,
    *order_mutants.MUTANTS,
    *collective_mutants.MUTANTS,
    *entry_mutants.MUTANTS,
    *kernel_mutants.MUTANTS,
)
VARIATIONS: tuple[Variation, ...] = noise.VARIATIONS


def staged(chosen: Case, target: str = DEFAULT_TARGET) -> Staged:
    """A case as jax lowers it for ``target`` on the abstract route."""
    goal = parse_target(target)
    mesh = make_mesh(goal, chosen.mesh, "auto", "abstract")
    lowered, _ = stage(chosen, goal, mesh, "abstract")
    return Staged(
        lowered.compiler_ir("stablehlo"),
        mosaic_version("abstract"),
        hoisted_constants(lowered),
        calling_convention(lowered),
    )


def judged(given: Staged, sites: int, program: str) -> Iterator[Row]:
    """A row for each mutant, at up to ``sites`` places, and for each variation."""
    base = _program(given.draft().normal())
    if base.unknowns:
        names = ", ".join(u.construct for u in base.unknowns)
        yield Row(program, "the program itself", "noise", "survived", f"it holds {names}")
        return
    for mutant in MUTANTS:
        yield _mutant_row(given, base, mutant, sites, program)
    for variation in VARIATIONS:
        yield _variation_row(given, base, variation, program)


def _program(normal: Normal) -> Program:
    stamp = Stamp({})
    fields = {name: getattr(normal, name) for name in Normal.__dataclass_fields__}
    return Program(stamp=stamp, **fields)


def _mutant_row(given: Staged, base: Program, mutant: Mutant, sites: int, program: str) -> Row:
    row = Row(program, mutant.name, "mutant", "not applicable", f"no {mutant.needs}")
    if mutant.prepare is not None:
        base = _program(_edited(given, mutant, None).normal())
    indices = _indices(given, mutant, sites)
    caught = 0
    for index in indices:
        other = _program(_edited(given, mutant, index).normal())
        fault = fault_of(base, other, mutant.seen_in, mutant.levels)
        if fault:
            return replace(row, state="survived", reason=f"at place {index}: {fault}")
        caught += 1
    if not caught:
        return row
    return replace(row, state="caught", reason="", sites=caught, levels=mutant.levels)


def _chosen(count: int, sites: int) -> list[int]:
    """Indices spread over ``count`` places, the first and the last among them."""
    if count <= sites:
        return list(range(count))
    if sites == 1:
        return [count // 2]
    return sorted({round(i * (count - 1) / (sites - 1)) for i in range(sites)})


def _indices(given: Staged, mutant: Mutant, sites: int) -> list[int]:
    """Where the mutant is made: places spread over the program that live."""
    draft = given.draft()
    with draft.context, ir.Location.unknown():
        found = mutant.sites(draft)
        must_live = mutant.lives
        if must_live is None:
            return _chosen(len(found), sites)
        liveness = Liveness(draft.functions)
        return _spread(found, sites, lambda site: all(map(liveness.lives, must_live(site))))


def _spread(found: list[Any], sites: int, is_good: Callable[[Any], bool]) -> list[int]:
    """For each of the chosen places the first good one from there on, round about."""
    chosen: dict[int, None] = {}
    for start in _chosen(len(found), sites):
        for step in range(len(found)):
            index = (start + step) % len(found)
            if index not in chosen and is_good(found[index]):
                chosen[index] = None
                break
    return sorted(chosen)


def _edited(given: Staged, mutant: Mutant, index: int | None) -> Draft:
    draft = given.draft()
    with draft.context, ir.Location.unknown():
        if mutant.prepare is not None:
            mutant.prepare(draft)
        if index is not None:
            mutant.edit(draft, mutant.sites(draft)[index])
        _verified(draft, mutant.name)
    return draft


def _verified(draft: Draft, name: str) -> None:
    """A mutant that isn't a program would be no test."""
    if not draft.operation.verify():
        raise AssertionError(f"{name}: the mutant is no valid module")


def _variation_row(given: Staged, base: Program, variation: Variation, program: str) -> Row:
    row = Row(program, variation.name, "noise", "matched", levels=LEVELS)
    draft = given.draft()
    with draft.context, ir.Location.unknown():
        if not variation.edit(draft):
            reason = f"no {variation.needs}"
            return replace(row, state="not applicable", reason=reason, levels=())
        _verified(draft, variation.name)
    return compared(row, base, _program(draft.normal()))
