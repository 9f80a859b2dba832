"""The mechanical changes of the source that make rewrites unnecessary, as a unified diff.

A site says which expression it was traced from and how that may be rewritten; here the expression
is looked up in its file and held against the forms that the rewrite is known for. What has another
form, stands in an installed package, or was rewritten in some calls only, is left to the reader,
and the reason is kept. An expression that other cases of the file run too is rewritten only where
they ask for the same.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..lowering.artifact import load
from ..lowering.change import Verdict
from ..lowering.diff import diff
from ..lowering.errors import InputError
from ..lowering.scratch import scratch
from .child import Job, run
from .patch_source import Source, Unwritten

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True)
class Patch:
    """What can be written by a machine, and why the rest can't."""

    text: str
    """A unified diff against the current folder; empty where nothing is mechanical."""
    edited: int
    """Expressions that it changes."""
    left: tuple[str, ...]
    """One line for each expression that is left to the reader."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files as they would be, by name."""
    given: tuple[str, ...] = ()
    """One line for each thing known of values in these cases that the new text leans on."""
    reached: tuple[str, ...] = ()
    """Of the other cases, those that run an expression that it changes."""


def shown(made: Patch, lowering: Job, *, timeout: float | None = None) -> str | None:
    """Whether the patched files lower, under the same passes, to the program of those as they are.

    Args:
      made: the patch.
      lowering: how to lower the case with its passes.
      timeout: seconds for each of the two.

    Returns:
      None where both are one program at level ``dataflow``; else what was found, in one line.
    """
    with scratch() as folder:
        paths = [os.path.join(folder, name) for name in ("before", "after")]
        try:
            for path, sources in zip(paths, ({}, made.files), strict=True):
                # A pass asked for by name has nothing to do where the patch has done it.
                quiet = not isinstance(lowering.passes, str) and "default" not in (
                    lowering.passes or ()
                )
                job = replace(lowering, do="lower", output=path, levels=("dataflow",),
                              sources=sources, options={}, quiet=quiet)  # fmt: skip
                run(job, timeout=timeout)
            found = diff(load(paths[0]), load(paths[1]), level="dataflow")
        except InputError as error:
            return str(error)
    if found.verdict is Verdict.IDENTICAL:
        return None
    return f"{found.verdict.name} at level dataflow"


@dataclass
class _Wanted:
    """What sites ask of one expression."""

    span: Mapping[str, Any]
    edits: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By pass."""
    refused: dict[str, str] = field(default_factory=dict)
    given: dict[str, list[str]] = field(default_factory=dict)
    """By pass, what the edit takes as known, in any case."""
    reached: list[str] = field(default_factory=list)
    """Other cases that run it."""


@dataclass
class _Edited:
    """A file as it would be, and what was done to it."""

    text: str
    done: list[tuple[int, str, _Wanted]]
    """Line, pass and what was asked for, of each expression rewritten."""
    refused: list[tuple[int, str]]


def patch(
    report: Mapping[str, Any],
    root: Path | None = None,
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> Patch:
    """The patch for a report of `relower explain --suggest`, as plain data.

    Args:
      report: `relower.Report.to_json`'s, where suggestions were asked for.
      root: the folder that the names in the diff are relative to; the current one by default.
      others: reports of other cases, by name, for which the files must stay right.
    """
    root = (root or Path()).resolve()
    lines: list[str] = []
    left: list[str] = []
    done: list[tuple[int, str, _Wanted]] = []
    given: list[str] = []
    files: dict[str, str] = {}
    for file, wanted in sorted(_by_file(report, others or {}).items()):
        name = _shown(file, root)
        try:
            before = _read(file)
            edited = _edited(before, wanted)
        except Unwritten as why:
            left += [f"{name}: {why}"]
            continue
        after = edited.text
        done += edited.done
        left += [f"{name}:{line}: {why}" for line, why in edited.refused]
        given += [
            f"{name}:{line}: {p}: {text}" for line, p, one in edited.done for text in one.given[p]
        ]
        if after != before:
            files[file] = after
        diff = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True),
            f"a/{name}", f"b/{name}",
        )  # fmt: skip
        lines += (line if line.endswith("\n") else line + _NO_NEWLINE for line in diff)
    reached = dict.fromkeys(name for _, _, one in done for name in one.reached)
    told = tuple(dict.fromkeys(left)), files, tuple(dict.fromkeys(given)), tuple(reached)
    return Patch("".join(lines), len(done), *told)


def _by_file(
    report: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[_Wanted]]:
    """What is asked of each expression, by file."""
    found: dict[str, dict[tuple[int, ...], _Wanted]] = {}
    declined = _declined(report)
    elsewhere = {name: (_by_place(r), _declined(r)) for name, r in others.items()}
    for entry in report.get("expressions", ()):
        span, rewrite, why = entry["span"], entry["pass"], entry["why"]
        if rewrite is None:
            continue
        wanted = found.setdefault(span["file"], {}).setdefault(_place(span), _Wanted(span))
        if why is None and (rewrite, _line(span)) in declined:
            why = "it is declined on this line too"
        given = list(entry["given"])
        for name, (places, not_there) in elsewhere.items():
            there = places.get(_place(span))
            if there is None or why is not None:
                continue
            wanted.reached.append(name)
            why = _objection(entry, there.get(rewrite), (rewrite, _line(span)) in not_there)
            why = None if why is None else f"in {name} {why}"
            given += there[rewrite]["given"] if why is None else ()
        if why is None:
            wanted.edits[rewrite] = entry["edits"]
            wanted.given[rewrite] = given
        else:
            wanted.refused[rewrite] = why
    return {file: list(places.values()) for file, places in found.items()}


def _objection(
    entry: Mapping[str, Any], there: Mapping[str, Any] | None, declined: bool
) -> str | None:
    """Why an expression is left as it is for the sake of another case, which runs it too."""
    if there is None or declined:
        return "it isn't rewritten"
    if there["why"] is not None:
        return str(there["why"])
    same = [{**e, "given": ""} for e in entry["edits"]] == [
        {**e, "given": ""} for e in there["edits"]
    ]
    return None if same else "it would have to be written in another way"


def _by_place(report: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What a report says of each expression, by pass."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in report.get("expressions", ()):
        found.setdefault(_place(entry["span"]), {})[entry["pass"]] = entry
    return found


def _place(span: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(span[name] for name in ("file", "line", "column", "end_line", "end_column"))


def _line(span: Mapping[str, Any]) -> str:
    return f"{span['file']}:{span['line']}"


def _declined(report: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Passes and lines where a site is left as it is, which an edit of the line would change."""
    return {
        (site["pass"], site["source"])
        for site in report["sites"]
        if site["status"] == "declined" and not site["taken_by"] and site["source"]
    }


def _shown(file: str, root: Path) -> str:
    path = Path(file).resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _read(file: str) -> str:
    if _INSTALLED & set(Path(file).parts):
        raise Unwritten("it belongs to an installed package")
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Unwritten(f"it can't be read: {error}") from error


def _edited(text: str, wanted: Sequence[_Wanted]) -> _Edited:
    """The text with every expression rewritten that can be, and why not the others."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Unwritten(f"it is no Python that can be read: {error}") from error
    source = Source(text, tree)
    refused: list[tuple[int, str]] = []
    chosen: dict[ast.expr, str] = {}
    done: list[tuple[int, str, _Wanted]] = []
    for place in wanted:
        line = place.span["line"]
        refused += [(line, f"{rewrite}: {why}") for rewrite, why in place.refused.items()]
        node = source.at(place.span)
        for rewrite, edits in sorted(place.edits.items(), key=_drops_most):
            if node is None:
                refused.append((line, f"{rewrite}: there is no expression of these columns"))
                continue
            if node in chosen:
                continue  # what another pass asks of it leaves nothing of this
            try:
                chosen[node] = source.template(node, edits)
                done.append((line, rewrite, place))
            except Unwritten as why:
                refused.append((line, f"{rewrite}: {why}"))
    return _Edited(source.rewritten(chosen), done, refused)


def _drops_most(item: tuple[str, Sequence[Mapping[str, Any]]]) -> tuple[bool, str]:
    """Edits first that leave nothing of the operation: others have nothing to do after them."""
    return any(part in e["template"] for e in item[1] for part in ("{value}", "{call}")), item[0]
