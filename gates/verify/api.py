"""`verify`: every rewrite that `optimize` makes in a program, shown to keep its contract."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...lowering.as_target import as_target
from ...lowering.case import Case, case
from ...lowering.errors import InputError
from ...lowering.targets import DEFAULT_TARGET, make_mesh, mesh_context, parse_target
from ...passes import registry
from ...passes.base import Contract, Pass, Site
from ...passes.optimize import rewritten
from ...passes.report import Report
from .check import Level, Limits, check_piece, first_line
from .facts import facts_of, held_of
from .mutants import Mutants
from .precision import lowered, not_compared
from .problem import build
from .record import Kept, Piece, Recorder
from .repro import check_writable, save
from .shrunk import check_shrunk
from .verdict import Checked, Evidence, MutantScore, SiteVerdict, Verdict
from .whole import WholeProgram

Progress = Callable[[int, int, str], None]


@dataclass
class Verifier:
    """Checks sites; one that was checked before, in this program or another, is not run again."""

    limits: Limits
    mutants: bool = False
    folder: Path | None = None
    """Where to save what shows a violation."""
    again: str = ""
    """How to verify the same again, for whoever reads that."""
    known: dict[tuple[str, str], tuple[Checked, Level | None]] = field(default_factory=dict)
    smaller: dict[str, Piece] = field(default_factory=dict)
    """What was run instead of a site that is too large."""
    scored: dict[tuple[str, str], tuple[MutantScore, ...]] = field(default_factory=dict)
    unsaved: list[str] = field(default_factory=list)
    """Why scripts couldn't be saved; the verdicts stand."""

    def site(self, kept: Sequence[Kept], contract: Contract) -> Checked:
        """The verdict on all rewrites that one site of the report stands for: the worst of them."""
        if not kept:
            return Checked(Verdict.UNKNOWN, "it was not seen while it was rewritten")
        worst: Checked | None = None
        for one in kept:
            found = self.rewrite(one, contract)
            if worst is None or _RANK[found.verdict] > _RANK[worst.verdict]:
                worst = found
        assert worst is not None
        return worst

    def rewrite(self, kept: Kept, contract: Contract) -> Checked:
        """The verdict on one rewrite."""
        if kept.shared is not None:
            return Checked(Verdict.VIOLATION, kept.shared)
        if kept.piece is None:
            return Checked(Verdict.UNKNOWN, f"it can't be run by itself: {kept.why}")
        key = kept.piece.digest, contract.value
        if key not in self.known:
            self.known[key] = self._checked(kept, kept.piece, contract)
        return self.known[key][0]

    def _checked(
        self, kept: Kept, piece: Piece, contract: Contract
    ) -> tuple[Checked, Level | None]:
        """As it stands; where that takes too much, at smaller shapes."""
        less = lowered(piece)
        if less is not None:
            return Checked(Verdict.VIOLATION, less), None
        found, level = self._ran(kept, piece, contract)
        return replace(found, notes=(*found.notes, *not_compared(piece))), level

    def _ran(self, kept: Kept, piece: Piece, contract: Contract) -> tuple[Checked, Level | None]:
        found = check_guarded(piece, contract, self.limits)
        if found[0].verdict is not Verdict.UNKNOWN or "above the limit" not in found[0].reason:
            return found
        try:
            small = check_shrunk(piece, kept.rewrite, contract, self.limits, check_guarded)
        except Exception as error:
            small = f"at smaller shapes: {type(error).__name__}: {first_line(error)}"
        if not isinstance(small, str):
            checked, level, self.smaller[piece.digest] = small
            return checked, level
        return replace(found[0], reason=f"{found[0].reason}; {small}"), found[1]

    def saved(self, key: str, kept: Sequence[Kept], contract: Contract) -> str | None:
        """The script that shows a site's violation, where one is to be saved."""
        for one in kept if self.folder is not None else ():
            if one.piece is None or one.shared is not None:
                continue
            checked, level = self.known[one.piece.digest, contract.value]
            if checked.counterexample is None or level is None:
                continue
            assert self.folder is not None
            stem = f"{re.sub('[^A-Za-z0-9]+', '_', key)[:80]}_{one.piece.digest[:8]}"
            problem = build(self.smaller.get(one.piece.digest, one.piece), *level)
            try:
                return save(
                    self.folder, stem, f"{key} breaks its contract, {contract.value}.",
                    checked.reason, self.again, problem, checked.counterexample,
                )  # fmt: skip
            except InputError as error:
                self.unsaved.append(str(error))
        return None

    def scores(self, kept: Sequence[Kept], contract: Contract) -> tuple[MutantScore, ...]:
        """What became of the mutants of a site's rewrites, of those that were verified."""
        found: list[MutantScore] = []
        for one in kept if self.mutants else ():
            if one.piece is None or one.shared is not None:
                continue
            key = one.piece.digest, contract.value
            level = self.known[key][1]
            if self.known[key][0].verdict is not Verdict.VERIFIED or level is None:
                continue
            if key not in self.scored:
                small = self.smaller.get(one.piece.digest)
                parts = (one.piece, one.mutants) if small is None else (small, {})
                made = Mutants(*parts, contract, level, self.limits)
                self.scored[key] = tuple(made.scores())
            found += self.scored[key]
        return tuple(found)


_RANK = {Verdict.VERIFIED: 0, Verdict.UNKNOWN: 1, Verdict.VIOLATION: 2}


def check_guarded(piece: Piece, contract: Contract, limits: Limits) -> tuple[Checked, Level | None]:
    """As `check_piece`; an error of the original's own evaluation leaves the site open."""
    try:
        return check_piece(piece, contract, limits)
    except Exception as error:
        line = next((s for s in str(error).splitlines() if s.strip()), "")
        why = f"it can't be run: {type(error).__name__}: {line[:200]}"
        return Checked(Verdict.UNKNOWN, why), None


def verify(
    case_or_fn: Case | Callable[..., Any],
    /,
    *args: Any,
    passes: Iterable[str | Pass] | None = None,
    contract: str | None = None,
    disable: Iterable[str] = (),
    frozen: Any = None,
    assume: str | Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    facts: bool = False,
    mutants: bool = False,
    target: str = DEFAULT_TARGET,
    limits: Limits | None = None,
    progress: Progress | None = None,
    repro: str | None = None,
    again: str = "",
    **kwargs: Any,
) -> Evidence:
    """Runs every rewrite that `optimize` makes in ``fn(*args)`` against what it replaces.

    Each site is cut out of the trace that is rewritten, with what came in its place, and both are
    run on this host's CPU, operation by operation, on inputs that obey what is known of them.

    Args:
        case_or_fn: a `Case`, or a function.
        *args: the function's arguments; a `jax.ShapeDtypeStruct` stands for an array.
        passes: as for `optimize`, but one that applies nowhere is no error.
        contract: as for `optimize`.
        disable: as for `optimize`.
        frozen: as for `optimize`.
        assume: as for `optimize`.
        only: names of passes whose sites to verify; None for all that applied. Where ``passes`` is
            None, they run beside those that run by default; else they must be among these.
        facts: also run the whole program, and see whether what rewrites take as known holds: on the
            arguments where all are arrays, else on such as could be indices.
        mutants: also break each rewrite in many ways, and see whether the same inputs show it.
        target: what a case is traced for, kind and topology.
        limits: for each site.
        progress: called with the sites done, their number and the next one's name.
        repro: a folder for scripts that show violations; None saves none.
        again: how to verify the same again, for these scripts to say.
        **kwargs: keyword arguments of the function.

    Returns:
        A verdict for each applied site; VERIFIED as a whole only if there is a site and each is.

    Raises:
        InputError: a case comes with arguments of its own, a name in ``only`` is no pass's, or
            not that of one that runs, or ``repro`` can't be written to.
        ValueError: as for `optimize`.
    """
    if repro is not None:
        check_writable(Path(repro))
    if only is not None and passes is None:
        only = tuple(only)
        passes = [registry.DEFAULT, *map(_known, only)]
    options = {
        "passes": passes, "contract": contract, "disable": disable, "frozen": frozen,
        "assume": assume,
    }  # fmt: skip
    recorder = Recorder(mutants)
    if not isinstance(case_or_fn, Case):
        report = rewritten(case_or_fn, args, kwargs, recorder.recording, **options)
    elif args or kwargs:
        raise InputError("verify: a case has its own arguments; found more beside it")
    else:
        report, args, kwargs = _of_case(case_or_fn, target, recorder, options)
    found = judged(
        report, recorder, only=only, mutants=mutants, limits=limits, progress=progress,
        repro=repro, again=again,
    )  # fmt: skip
    if not facts:
        return found
    leaves = jax.tree.leaves((args, kwargs))
    return replace(found, facts=held_of(recorder, leaves, limits or Limits()))


def _of_case(
    chosen: Case, target: str, recorder: Recorder, options: Any
) -> tuple[Report, tuple[Any, ...], dict[str, Any]]:
    """A case rewritten as it is for its target, and its arguments.

    It is traced on its mesh, with the target's answers.
    """
    goal = parse_target(target)
    mesh = _host_mesh(chosen.mesh) or make_mesh(goal, chosen.mesh, "auto", "abstract")
    with as_target(goal.devices()):
        fn, args, kwargs = chosen.built(mesh)
        with mesh_context(mesh):
            report = rewritten(fn, args, dict(kwargs), recorder.recording, **options)
    return report, args, dict(kwargs)


def _host_mesh(extents: Mapping[str, int] | None) -> Any:
    """An abstract mesh like that of devices of this host, which sites can then run on; or None.

    A body that was traced for another kind of device can't be run as it is.
    """
    if not extents or math.prod(extents.values()) > jax.device_count():
        return None
    devices = np.array(jax.devices()[: math.prod(extents.values())])
    types = (AxisType.Auto,) * len(extents)
    return Mesh(devices.reshape(tuple(extents.values())), tuple(extents), types).abstract_mesh


def judged(
    report: Report,
    recorder: Recorder,
    *,
    only: Iterable[str] | None = None,
    mutants: bool = False,
    limits: Limits | None = None,
    progress: Progress | None = None,
    repro: str | None = None,
    again: str = "",
) -> Evidence:
    """The verdicts on a report's applied sites, from what was recorded while they were made."""
    wanted = None if only is None else {_known(name) for name in only}
    for name in sorted((wanted or set()) - set(report.passes)):
        run = ", ".join(report.passes) or "none"
        raise InputError(
            f"{name}'s sites are to be verified, and it isn't among the passes that run: found "
            f"{run}; wanted it there, too, as in --passes {','.join([*report.passes, name])}, or "
            "no --passes"
        )
    sites = [s for s in report.applied if wanted is None or s.pass_name in wanted]
    verifier = Verifier(limits or Limits(), mutants, None if repro is None else Path(repro), again)
    numbers: Counter[str] = Counter()
    wholes = {name: WholeProgram(*what) for name, what in recorder.whole.items()}
    found = []
    for i, site in enumerate(sites):
        numbers[site.pass_name] += 1
        key = (site.addresses or (f"{site.pass_name}#{numbers[site.pass_name]}",))[0]
        if progress is not None:
            progress(i, len(sites), key)
        whole = wholes.get(site.pass_name)
        if whole is None:
            found.append(_verdict(verifier, key, site, recorder.of(site)))
        else:
            scores = whole.scores(verifier.limits) if mutants else ()
            scores = () if numbers[site.pass_name] > 1 else scores
            made = _verdict(verifier, key, site, ())
            checked = whole.checked(verifier.limits)
            found.append(replace(made, checked=checked, mutants=scores))
    if progress is not None:
        progress(len(sites), len(sites), "")
    notes = _again(report, found) if sites else (_nothing(report, wanted),)
    return Evidence(
        report.name, tuple(found), notes=(*notes, *verifier.unsaved, *report.notes),
        mutated=mutants, ended=report.ended,
    )  # fmt: skip


def _again(report: Report, found: Sequence[SiteVerdict]) -> tuple[str, ...]:
    """That a pass finds a site in what it put there itself, where that is why there is no end."""
    times = Counter(s.key for s in found)
    return tuple(
        f"{key} is a site again and again, {count} times: its pass matches what it puts there, and "
        "a requirement should refuse that"
        for key, count in times.items()
        if not report.ended and count > len(found) // 2 > 1
    )


_SHOWN = 3
"""Sites declined that are named where none applied."""


def _nothing(report: Report, wanted: set[str] | None) -> str:
    """That there is no site; and where a pass's pattern did match, why it wasn't applied."""
    declined = [
        s for s in report.declined
        if (wanted is None or s.pass_name in wanted)
        and all(r.code != "near-miss" for r in s.reasons)
    ]  # fmt: skip
    if not declined:
        return "no pass applied anywhere: there is nothing to verify"
    said = [
        f"{(s.addresses or (s.pass_name,))[0]} matched and was declined: "
        + "; ".join(f"{r.code}: {r}" for r in s.reasons)
        for s in declined[:_SHOWN]
    ]
    more = f"; and {len(declined) - _SHOWN} more" if len(declined) > _SHOWN else ""
    return f"no pass applied, so there is nothing to verify; {'; '.join(said)}{more}"


def _known(name: str) -> str:
    try:
        return registry.by_name(name).name
    except ValueError as error:
        raise InputError(str(error)) from error


def _verdict(verifier: Verifier, key: str, site: Site, kept: Sequence[Kept]) -> SiteVerdict:
    rewrite: Pass = kept[0].rewrite if kept else registry.by_name(site.pass_name)
    return SiteVerdict(
        key=key,
        pass_name=site.pass_name,
        contract=rewrite.contract.value,
        primitive=site.primitive,
        type=site.shape,
        source=site.source,
        scope=site.scope,
        calls=site.calls,
        checked=verifier.site(kept, rewrite.contract),
        mutants=verifier.scores(kept, rewrite.contract),
        repro=verifier.saved(key, kept, rewrite.contract),
        facts=facts_of(kept),
    )


def verify_examples(
    only: Iterable[str] | None = None,
    *,
    mutants: bool = False,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Evidence:
    """Every pass on its own examples, one after the other, as one program.

    Those of relower; of another package's passes such as ``only`` names.

    Raises:
        InputError: a name in ``only`` is no pass's.
    """
    wanted = None if only is None else {_known(name) for name in only}
    own = {p.name: p for p in registry.all_passes()}
    passes = [p for name, p in own.items() if wanted is None or name in wanted]
    passes += [registry.by_name(name) for name in sorted((wanted or set()) - own.keys())]
    pairs = [(p, e) for p in passes for e in p.examples()]
    sites: list[SiteVerdict] = []
    notes: list[str] = []
    for i, (p, example) in enumerate(pairs):
        if progress is not None:
            progress(i, len(pairs), p.name)
        chosen = case(lambda mesh, p=p, e=example: (p.before, e.args), mesh=example.mesh) if (
            example.mesh) else case(p.before, *example.args)  # fmt: skip
        found = verify(chosen, passes=[p.name], mutants=mutants, limits=limits)
        if not found.sites:
            notes.append(f"{p.name} finds no site in its own example {example.label!r}")
        sites += [replace(s, key=f"{p.name} ({example.label})") for s in found.sites]
    if progress is not None:
        progress(len(pairs), len(pairs), "")
    return Evidence("the passes' own examples", tuple(sites), notes=tuple(notes), mutated=mutants)
