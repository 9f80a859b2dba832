"""The other cases of a file: what else its text must stay right for."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from .case import Case, case
from .load import loaded, required


def siblings(spec: str) -> list[str]:
    """The cases of the file of ``spec``, which has been loaded, but for that of ``spec`` itself.

    They are the module's `Case`s, dicts of them, and functions that take nothing and return one.
    Only functions whose source says so are called: another one may do anything.

    Returns:
      Specs ``FILE.py:NAME`` and ``FILE.py:NAME[KEY]``, in the order of the file.
    """
    path, _, target = spec.rpartition(":")
    module = loaded(path)
    names = [] if module is None else _names(module)
    return [f"{path}:{name}" for name in names if name != target]


def _names(module: ModuleType) -> list[str]:
    found: list[str] = []
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        held = value
        is_function = callable(value) and not isinstance(value, type)
        if is_function and not required(value) and makes_a_case(value):
            try:
                held = value()
            except Exception:
                found.append(name)  # whoever lowers it is told why that can't be done
                continue
        if isinstance(held, Case):
            found.append(name)
        elif isinstance(held, Mapping):
            found += [f"{name}[{key}]" for key, one in held.items() if _is_case(one)]
    return found


def _is_case(value: Any) -> bool:
    return isinstance(value, Case) or (callable(value) and makes_a_case(value))


def makes_a_case(function: Callable[..., Any]) -> bool:
    """Whether the source of a function returns a case, or a dict of cases, as far as can be read.

    That is: a ``return`` of `relower.case`'s, or of a function's of which the same is true.
    """
    return _makes(function, set())


def _makes(function: Any, seen: set[int]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if function is case or function is Case:
        return True
    if not inspect.isfunction(function) or id(function) in seen:
        return False
    seen.add(id(function))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    own = tree.body[0]
    if not isinstance(own, ast.FunctionDef):
        return False
    known = {**function.__globals__, **_closed_over(function), **_imported(own)}
    return any(
        _makes(_meant(called, known), seen)
        for returned in _returns(own)
        for called in _called(returned)
    )


def _closed_over(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _imported(function: ast.FunctionDef) -> dict[str, Any]:
    """What a function imports itself, of modules that are loaded."""
    found: dict[str, Any] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name if name.asname else name.name.partition(".")[0]
                found[name.asname or top] = sys.modules.get(top)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = sys.modules.get(node.module or "")
            for name in node.names:
                found[name.asname or name.name] = getattr(module, name.name, None)
    return found


def _returns(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns, not those inside of it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        left += ast.iter_child_nodes(node)


def _called(value: ast.expr) -> Iterator[ast.expr]:
    """The functions whose results an expression is, or is a dict of."""
    if isinstance(value, ast.Call):
        yield value.func
    elif isinstance(value, ast.Dict):
        for one in value.values:
            yield from _called(one)
    elif isinstance(value, ast.DictComp):
        yield from _called(value.value)
    elif isinstance(value, ast.Lambda):
        yield from _called(value.body)
    elif isinstance(value, ast.IfExp):
        yield from _called(value.body)
        yield from _called(value.orelse)


def _meant(func: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(func, ast.Name):
        return known.get(func.id)
    if isinstance(func, ast.Attribute):
        return getattr(_meant(func.value, known), func.attr, None)
    return None
