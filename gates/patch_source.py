"""A file's source with expressions rewritten after templates, inner ones inside of outer ones."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_ATOMIC = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.Tuple)
_Place = tuple[int, int]


class Unwritten(Exception):
    """An expression has no form that an edit is for."""


class Source:
    """A file as text and as a tree."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names = _imported(tree)
        self._bound = _bound(tree)
        self._taken = _mentioned(tree) | self._bound
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
            raise Unwritten(f"the expression {self._shown(node)} has a form of its own")
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            raise Unwritten("it is assigned to")
        text: str = fit[0]["template"]
        for name in re.findall(r"\{(lax|jnp)\}", text):
            if name not in self._names:
                raise Unwritten(f"the file imports no {name}")
            first = self._names[name].partition(".")[0]
            if first in self._bound:
                raise Unwritten(f"{first} is the name of something else in the file too")
        start, end = self._range(node)
        if _has_comment(self._bytes[start:end].decode()):
            raise Unwritten("a comment stands in it")
        for name, called in self._names.items():
            text = text.replace(f"{{{name}}}", called)
        if "{new:" in text or text.count("{0}") > 1:
            self._try(node, text)
        return text

    def _try(self, node: ast.expr, text: str) -> None:
        """Raises where an assignment can't stand, as in what a comprehension runs over."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            try:
                compile(self.rewritten({node: text}), "patched", "exec", dont_inherit=True)
            except SyntaxError as error:
                raise Unwritten(f"what it would be can't stand there: {error.msg}") from error

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
            if text.count("{0}") > 1 and not isinstance(node.args[0], ast.Name):
                first, _, rest = text.partition("{0}")  # evaluated once, and named
                text = f"{first}({{new:keys}} := {{0}}){rest.replace('{0}', '{new:keys}')}"
            parts["call"] = whole[: whole.rindex(")")].rstrip().rstrip(",")
            if not node.args and not node.keywords:
                text = text.replace("{call}, ", "{call}")
        for name in set(re.findall(r"\{new:(\w+)\}", text)):
            text = text.replace(f"{{new:{name}}}", self._fresh(name))
        for name, value in parts.items():
            text = text.replace(f"{{{name}}}", value)
        written = ast.parse(text, mode="eval").body
        alone = isinstance(self._parents.get(node), ast.stmt | ast.Call | ast.keyword | ast.Tuple)
        return text if isinstance(written, _ATOMIC) or alone else f"({text})"

    def _fresh(self, name: str) -> str:
        """A name that stands nowhere in the file."""
        numbered = (f"{name}_{n}" for n in itertools.count(1))
        return next(n for n in itertools.chain((name,), numbered) if n not in self._taken)

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
        return Unwritten


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


def _mentioned(tree: ast.Module) -> set[str]:
    """Names that the file reads or imports."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    aliases = (node for node in ast.walk(tree) if isinstance(node, ast.alias))
    return found | {(name.asname or name.name).partition(".")[0] for name in aliases}


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
