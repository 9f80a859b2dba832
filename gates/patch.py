"""The mechanical changes of the source that make rewrites unnecessary, as a unified diff.

A site says which expression it was traced from and how that may be rewritten; here the expression
is looked up in its file and held against the forms that the rewrite is known for. What has another
form, stands in an installed package, or was rewritten in some calls only, is left to the reader,
and the reason is kept.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import tokenize
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

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_ATOMIC = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.Tuple)
_NO_NEWLINE = "\n\\ No newline at end of file\n"
_Place = tuple[int, int]


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


class _Unknown(Exception):
    """An expression has no form that an edit is for."""


def patch(report: Mapping[str, Any], root: Path | None = None) -> Patch:
    """The patch for a report of `relower explain --suggest`, as plain data.

    Args:
      report: `relower.Report.to_json`'s, where suggestions were asked for.
      root: the folder that the names in the diff are relative to; the current one by default.
    """
    root = (root or Path()).resolve()
    lines: list[str] = []
    left: list[str] = []
    edited = 0
    files: dict[str, str] = {}
    for file, wanted in sorted(_by_file(report).items()):
        name = _shown(file, root)
        try:
            before = _read(file)
            after, done, refused = _edited(before, wanted)
        except _Unknown as why:
            left += [f"{name}: {why}"]
            continue
        edited += done
        left += [f"{name}:{line}: {why}" for line, why in refused]
        if after != before:
            files[file] = after
        diff = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True),
            f"a/{name}", f"b/{name}",
        )  # fmt: skip
        lines += (line if line.endswith("\n") else line + _NO_NEWLINE for line in diff)
    return Patch("".join(lines), edited, tuple(dict.fromkeys(left)), files)


def _by_file(report: Mapping[str, Any]) -> dict[str, list[_Wanted]]:
    """What is asked of each expression, by file."""
    found: dict[str, dict[tuple[int, ...], _Wanted]] = {}
    declined = _declined(report)
    for entry in report.get("expressions", ()):
        span, rewrite, why = entry["span"], entry["pass"], entry["why"]
        key = (span["line"], span["column"], span["end_line"], span["end_column"])
        wanted = found.setdefault(span["file"], {}).setdefault(key, _Wanted(span))
        if why is None and (rewrite, f"{span['file']}:{span['line']}") in declined:
            why = "it is declined on this line too"
        if why is None:
            wanted.edits[rewrite] = entry["edits"]
        else:
            wanted.refused[rewrite] = why
    return {file: list(places.values()) for file, places in found.items()}


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
        raise _Unknown("it belongs to an installed package")
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise _Unknown(f"it can't be read: {error}") from error


def _edited(text: str, wanted: Sequence[_Wanted]) -> tuple[str, int, list[tuple[int, str]]]:
    """The text with every expression rewritten that can be; how many, and why not the others."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _Unknown(f"it is no Python that can be read: {error}") from error
    source = _Source(text, tree)
    refused: list[tuple[int, str]] = []
    chosen: dict[ast.expr, str] = {}
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
            except _Unknown as why:
                refused.append((line, f"{rewrite}: {why}"))
    return source.rewritten(chosen), len(chosen), refused


def _drops_most(item: tuple[str, Sequence[Mapping[str, Any]]]) -> tuple[bool, str]:
    """Edits first that leave nothing of the operation: others have nothing to do after them."""
    return any(part in e["template"] for e in item[1] for part in ("{value}", "{call}")), item[0]


class _Source:
    """A file as text and as a tree."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names = _imported(tree)
        self._bound = _bound(tree)
        self._nodes: dict[tuple[int, ...], ast.expr] = {}
        self._parents: dict[ast.expr, ast.AST] = {}
        for parent in ast.walk(tree):
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.expr):
                    self._nodes[self._range(node)] = node
                    self._parents[node] = parent

    def at(self, span: Mapping[str, Any]) -> ast.expr | None:
        """The expression of these lines and columns."""
        if max(span["line"], span["end_line"]) >= len(self._starts):
            return None
        start = self._starts[span["line"] - 1] + span["column"]
        return self._nodes.get((start, self._starts[span["end_line"] - 1] + span["end_column"]))

    def template(self, node: ast.expr, edits: Sequence[Mapping[str, Any]]) -> str:
        """What to write for an expression, its parts left open."""
        forms = {"subscript": ast.Subscript, "call": ast.Call}
        fit = [e for e in edits if isinstance(node, forms[e["form"]])]
        fit = [e for e in fit if e["form"] == "subscript" or _is_call(node, e)]
        if not fit:
            raise _Unknown(f"the expression {self._shown(node)} has a form of its own")
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            raise _Unknown("it is assigned to")
        text: str = fit[0]["template"]
        for name in re.findall(r"\{(lax|jnp)\}", text):
            if name not in self._names:
                raise _Unknown(f"the file imports no {name}")
            first = self._names[name].partition(".")[0]
            if first in self._bound:
                raise _Unknown(f"{first} is the name of something else in the file too")
        start, end = self._range(node)
        if _has_comment(self._bytes[start:end].decode()):
            raise _Unknown("a comment stands in it")
        for name, called in self._names.items():
            text = text.replace(f"{{{name}}}", called)
        return text

    def rewritten(self, chosen: Mapping[ast.expr, str]) -> str:
        """The whole text, inner expressions rewritten inside of outer ones."""
        return self._render((0, len(self._bytes)), chosen)

    def _render(self, where: _Place, chosen: Mapping[ast.expr, str], own: Any = None) -> str:
        start, end = where
        inside = [(self._range(node), node) for node in chosen if node is not own]
        inside = [(p, n) for p, n in inside if start <= p[0] and p[1] <= end]
        inside.sort(key=lambda item: (item[0][0], -item[0][1]))  # the outer ones first
        parts, at = [], start
        for (first, last), node in inside:
            if first < at:
                continue  # inside of one that is rendered already
            parts += [self._bytes[at:first].decode(), self._filled(node, chosen)]
            at = last
        return "".join([*parts, self._bytes[at:end].decode()])

    def _filled(self, node: ast.expr, chosen: Mapping[ast.expr, str]) -> str:
        text, parts = chosen[node], dict[str, str]()
        if isinstance(node, ast.Subscript):
            parts = {"value": self._part(node.value, chosen), "index": self._index(node, chosen)}
            if not re.search(r"\[\{index\}\]", text):
                parts["index"] = self._part(node.slice, chosen)
        elif isinstance(node, ast.Call):
            parts = {str(i): self._part(a, chosen) for i, a in enumerate(node.args)}
            start, end = self._range(node)
            whole = self._render((start, end), chosen, node)
            parts["call"] = whole[: whole.rindex(")")].rstrip().rstrip(",")
            if not node.args and not node.keywords:
                text = text.replace("{call}, ", "{call}")
        for name, value in parts.items():
            text = text.replace(f"{{{name}}}", value)
        written = ast.parse(text, mode="eval").body
        alone = isinstance(self._parents.get(node), ast.stmt | ast.Call | ast.keyword | ast.Tuple)
        return text if isinstance(written, _ATOMIC) or alone else f"({text})"

    def _part(self, node: ast.expr, chosen: Mapping[ast.expr, str]) -> str:
        text = self._render(self._range(node), chosen)
        written = ast.parse(f"({text})", mode="eval").body
        return text if isinstance(written, _ATOMIC) else f"({text})"

    def _index(self, node: ast.Subscript, chosen: Mapping[ast.expr, str]) -> str:
        return self._render(self._range(node.slice), chosen)

    def _range(self, node: ast.expr) -> _Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _shown(self, node: ast.expr) -> str:
        start, end = self._range(node)
        text = " ".join(self._bytes[start:end].decode().split())
        return text if len(text) <= 40 else text[:37] + "…"


def _is_call(node: ast.expr, edit: Mapping[str, Any]) -> bool:
    assert isinstance(node, ast.Call)
    name = _called(node.func)
    if name not in edit["names"] or any(isinstance(a, ast.Starred) for a in node.args):
        return False
    if edit["arguments"] is not None and len(node.args) != edit["arguments"]:
        return False
    if edit["arguments"] is None:
        return all(k.arg is not None for k in node.keywords)
    allowed = dict(edit["keywords"])
    return all(
        isinstance(k.arg, str) and k.arg in allowed and _literal(k.value) in allowed[k.arg]
        for k in node.keywords
    )


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _Unknown


def _called(func: ast.expr) -> str | None:
    """What is called: a function's last name, or ``at[].*`` for a method of ``x.at[…]``."""
    if isinstance(func, ast.Name):
        return func.id
    if not isinstance(func, ast.Attribute):
        return None
    owner = func.value
    at = isinstance(owner, ast.Subscript) and isinstance(owner.value, ast.Attribute)
    if at and owner.value.attr == "at":  # type: ignore[attr-defined]
        return "at[].*"
    return func.attr


def _imported(tree: ast.Module) -> dict[str, str]:
    """What the file calls `jax.lax` and `jax.numpy`."""
    found: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for name in statement.names:
                if name.name in ("jax.lax", "jax.numpy") and name.asname:
                    found[{"jax.lax": "lax", "jax.numpy": "jnp"}[name.name]] = name.asname
                elif name.name.partition(".")[0] == "jax" and not name.asname:
                    found.setdefault("lax", "jax.lax")
                    found.setdefault("jnp", "jax.numpy")
        elif isinstance(statement, ast.ImportFrom) and statement.module == "jax":
            for name in statement.names:
                if name.name in ("lax", "numpy"):
                    key = "lax" if name.name == "lax" else "jnp"
                    found[key] = name.asname or name.name
    return found


def _bound(tree: ast.Module) -> set[str]:
    """Names that are bound otherwise than by an import."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def _has_comment(text: str) -> bool:
    try:
        tokens = tokenize.generate_tokens(io.StringIO(f"({text})").readline)
        return any(token.type == tokenize.COMMENT for token in tokens)
    except (tokenize.TokenError, IndentationError):
        return "#" in text
