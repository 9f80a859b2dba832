"""``FILE.py:NAME``: a case from a user's file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .as_target import recorded
from .case import Case, case
from .errors import InputError
from .locations import is_own_file
from .packages import check_package, imports_relatively, package_of
from .specs import parse_spec
from .words import plural

_CASE_FOLDERS: set[Path] = set()
_NAME = re.compile(r"(?P<name>[A-Za-z_]\w*)(\[(?P<key>[^\]]+)\])?")


def load_case(spec: str, args: Sequence[str] = ()) -> Case:
    """The case that ``FILE.py:NAME`` or ``FILE.py:NAME[KEY]`` means.

    NAME is a `Case`, a function that takes nothing and returns one, a dict of cases or a function
    returning one (``[KEY]`` chooses), or a plain function with one shape spec per argument.

    Raises:
        InputError: no such file, name or key, the file can't be imported, or the specs don't fit.
    """
    path_text, colon, target = spec.rpartition(":")
    match = _NAME.fullmatch(target)
    if not colon or match is None or not path_text:
        raise InputError(_no_case(spec))
    path = Path(path_text)
    if not path.is_file():
        raise InputError(f"{path_text}: no such file{_file_of(path_text, target)}")
    with recorded() as queries:
        module = load_module(path)
        found = _member(module, match["name"], path)
        made = _resolve(found, match["name"], match["key"], list(args), path)
    return replace(made, host_queries=tuple(queries))


def _no_case(spec: str) -> str:
    """What to say of what isn't of the form of a case."""
    form = "FILE.py:NAME or FILE.py:NAME[KEY]"
    path = Path(spec)
    if not path.is_file():
        return f"{spec!r}: wanted {form}"
    if path.suffix == ".py":
        return f"{spec}: which of its cases? Wanted {form}; it has {_public(load_module(path))}"
    if zipfile.is_zipfile(path):
        return (
            f"{spec} is an artifact, a program that is lowered already: `relower diff` compares "
            f"it; here the case is wanted that it was lowered from, as {form}"
        )
    return f"{spec} is no Python file: wanted {form}"


def load_module(path: Path) -> ModuleType:
    """Imports a file under a name of its own, with its folder first on the import path.

    A file with relative imports is one of the package that ``__init__.py`` files beside it and
    above make, and the folder that holds the package is on the import path, too.

    Modules that an earlier file's folder brought in under a name that this folder also has are set
    aside, so each file sees its own siblings.

    Raises:
        InputError: the file can't be imported.
    """
    path = path.resolve()
    if path.suffix != ".py":
        raise InputError(f"{path}: wanted a Python file, ending in .py")
    name, root, package = _named(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for folder in dict.fromkeys((root, path.parent)):
        _set_strangers_aside(folder)
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))  # it stays: functions may import when they are called
        _CASE_FOLDERS.add(folder)
    if package:
        check_package(root, package)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except InputError:
        sys.modules.pop(name, None)
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise InputError(f"{path}: can't be imported: {describe(error)}") from error
    return module


def loaded(path: str) -> ModuleType | None:
    """The module that `load_case` has made of a file, if it has."""
    return sys.modules.get(_named(Path(path).resolve())[0])


def _named(path: Path) -> tuple[str, Path, str]:
    """A file's name as a module, and the package that it is of, with the folder that holds it."""
    mark = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)
    root, package = package_of(path) if imports_relatively(path) else (path.parent, "")
    return f"{package}.relower_case_{mark}_{stem}".lstrip("."), root, package


def _file_of(path: str, target: str) -> str:
    """What to write for a module that was given by its dotted name."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path) is None or path.endswith(".py"):
        return ""
    inner = path.replace(".", "/")
    for file in (f"{inner}.py", f"src/{inner}.py", f"{inner}/__init__.py"):
        if Path(file).is_file():
            return f"; a case is named by its file: write {file}:{target}"
    return f"; a case is named by its file, not its module: write the path of {inner}.py"


def _set_strangers_aside(folder: Path) -> None:
    """Forgets modules of other folders that would shadow this folder's own."""
    own = {entry.stem for entry in folder.glob("*.py")}
    own |= {entry.parent.name for entry in folder.glob("*/__init__.py")}
    for name in list(sys.modules):
        head = name.partition(".")[0]
        origin = getattr(sys.modules[name], "__file__", None)
        if head not in own or not origin:
            continue
        home = Path(origin).resolve()
        stranger = any(home.is_relative_to(other) for other in _CASE_FOLDERS)
        if stranger and not home.is_relative_to(folder):
            del sys.modules[name]


def _member(module: ModuleType, name: str, path: Path) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    raise InputError(f"{path}: no {name!r}; it has {_public(module)}")


def _public(module: ModuleType) -> str:
    public = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (isinstance(value, (Case, dict)) or getattr(value, "__module__", "") == module.__name__)
    ]
    return ", ".join(sorted(public)) or "nothing that could be a case"


def _resolve(found: Any, name: str, key: str | None, args: list[str], path: Path) -> Case:
    where = f"{path}:{name}"
    if callable(found) and not args and not required(found):
        found = _called(found, where)
    if isinstance(found, dict):
        found = _chosen(found, key, where)
        if callable(found) and not isinstance(found, Case):
            found = _called(found, where)
    elif key is not None:
        raise InputError(f"{where}[{key}]: {name} is no dict of cases but {_kind(found)}")
    if isinstance(found, Case):
        if args:
            raise InputError(f"{where} is a case with arguments of its own; leave --arg out")
        return found
    if not callable(found):
        raise InputError(f"{where}: wanted a case or a function, found {_kind(found)}")
    return _from_specs(found, args, where)


def _called(function: Callable[..., Any], where: str) -> Any:
    try:
        made = function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{where}() failed: {describe(error)}") from error
    if isinstance(made, (Case, dict)):
        return made
    raise InputError(f"{where}() returned {_kind(made)}, wanted a case or a dict of cases")


def _chosen(cases: dict[Any, Any], key: str | None, where: str) -> Any:
    known = ", ".join(map(str, cases)) or "none"
    by_text = {str(name): value for name, value in cases.items()}
    if key is None:
        raise InputError(f"{where} holds several cases: choose one as {where}[KEY] of {known}")
    if key not in by_text:
        raise InputError(f"{where}: no case {key!r}; it has {known}")
    return by_text[key]


def _from_specs(function: Callable[..., Any], args: list[str], where: str) -> Case:
    wanted = required(function)
    specs = [parse_spec(text) for text in args]
    try:
        inspect.signature(function).bind(*specs)
    except TypeError:
        if not wanted:
            raise InputError(
                f"{where} takes no arguments, found {len(args)} --arg: leave them out. A case has "
                "arguments of its own, also one that a function returns"
            ) from None
        raise InputError(
            f"{where} takes {plural(len(wanted), 'argument')} ({', '.join(wanted)}), found "
            f"{len(args)} --arg: give one as DTYPE[DIM,...] for each"
        ) from None
    except ValueError:
        pass  # no signature to check against; tracing will tell
    return case(function, *specs)


def required(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a function must be given by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def describe(error: BaseException) -> str:
    """Type, first line of the message and the user's line of an exception, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if len(text) > 400:
        text = text[:397] + "..."
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} at {error.filename}:{error.lineno}"
    where = user_line(error)
    return f"{text} at {where}" if where else text


def user_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame that is neither jax's nor this package's.

    An error of lowering carries, as its cause, the stack of the line that was traced.
    """
    from ..compat.queries import JAX_ROOT

    if type(error.__cause__).__name__ == "JaxStackTraceBeforeTransformation":
        assert error.__cause__ is not None
        error = error.__cause__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename
        if path.startswith((JAX_ROOT, "<")) or is_own_file(path):
            continue
        if "importlib" in Path(path).parts:
            continue
        return f"{path}:{frame.lineno}"
    return None
