"""Whether a requirement gives the reason that it is called by: one code for both.

On the examples of a pass every requirement holds, so what they return there shows nothing. What
stands in their source does, where the code is written out.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

from ..passes.base import Match, Pass, Reason, Requirement
from ..passes.guarded import place_of, unwrapped

GENERAL = frozenset({"kept"})
"""Codes that are no requirement's: what stands in `relower.keep` is left alone by every pass."""


def written_faults(p: Pass) -> Iterator[str]:
    """Every `Reason` in a requirement's own source whose code is another than the requirement's."""
    for requirement in p.requirements:
        for code in sorted(written_codes(requirement.check) - {requirement.code, *GENERAL}):
            yield _said(requirement, code, "has in its source")


def noting(p: Pass, faults: list[str]) -> Pass:
    """``p``, whose requirements add to ``faults`` each reason returned under another's code."""

    def noted(requirement: Requirement) -> Requirement:
        def check(match: Match) -> Reason | None:
            found = requirement.check(match)
            if isinstance(found, Reason) and found.code not in (requirement.code, *GENERAL):
                fault = _said(requirement, found.code, "returned")
                if fault not in faults:
                    faults.append(fault)
            return found

        check.__wrapped__ = requirement.check  # type: ignore[attr-defined]
        return replace(requirement, check=check)

    return replace(p, requirements=tuple(map(noted, p.requirements)))


def _said(requirement: Requirement, code: str, how: str) -> str:
    return (
        f"the requirement {requirement.code!r}: its check, {place_of(requirement.check)}, {how} a "
        f"Reason of the code {code!r}; wanted {requirement.code!r}, by which the docs call it"
    )


def written_codes(check: Callable[..., Any]) -> set[str]:
    """The codes of reasons that a function makes itself, as far as they are written out.

    A literal, or a name that stands for a string outside of the function; none where the source
    can't be had.
    """
    fn = unwrapped(check)
    if not inspect.isfunction(fn):
        return set()
    node = _node(fn.__code__)
    if node is None:
        return set()
    known = inspect.getclosurevars(fn)
    names = {**known.globals, **known.nonlocals}
    codes = set()
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not _makes_reason(call.func, names):
            continue
        first = call.args[0] if call.args else next(
            (k.value for k in call.keywords if k.arg == "code"), None
        )  # fmt: skip
        if isinstance(first, ast.Constant):
            codes.add(first.value)
        elif isinstance(first, ast.Name):
            codes.add(names.get(first.id))
    return {c for c in codes if isinstance(c, str)}


def _makes_reason(called: ast.expr, names: dict[str, Any]) -> bool:
    if isinstance(called, ast.Name):
        return names.get(called.id) is Reason
    return isinstance(called, ast.Attribute) and called.attr == "Reason"


def _node(code: CodeType) -> ast.AST | None:
    """The definition that a function was compiled from; of several lambdas of one line, its own."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return None
    places = [(a, c) for a, _, c, _ in code.co_positions() if a and c]  # (line, column)
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                found.append(node)
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            end = (node.end_lineno, node.end_col_offset)
            inside = all((node.lineno, node.col_offset) <= p < end for p in places)
            if node.lineno == code.co_firstlineno and places and inside:
                found.append(node)
    return max(found, key=lambda n: (n.lineno, n.col_offset), default=None)
