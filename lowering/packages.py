"""The package that a user's file belongs to, for its relative imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from .errors import InputError


def imports_relatively(path: Path) -> bool:
    """Whether a file holds ``from . import x``, at its top or in a function."""
    return _furthest(path) is not None


def package_of(path: Path) -> tuple[Path, str]:
    """The folder that holds the package of a file, and the package's dotted name.

    Raises:
        InputError: the folders around the file make no package as deep as its imports go.
    """
    folder, names = path.parent, list[str]()
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    found = _furthest(path)
    if found is not None and found.level > len(names):
        bare = "folder" if folder.name.isidentifier() else "folder, whose name is no identifier,"
        imported = "." * found.level + (found.module or "")
        raise InputError(
            f"{path}:{found.lineno}: `from {imported} import ...` goes {found.level} up, and the "
            f"file is in {_packages(len(names))}: the {bare} {folder} is no package. Write "
            f"{folder / '__init__.py'}, an empty file will do, or import absolutely"
        )
    return folder, ".".join(names)


def check_package(root: Path, package: str) -> None:
    """Refuses a package that this process has already imported from another place.

    Raises:
        InputError: relative imports would take the other copy's files.
    """
    top = package.partition(".")[0]
    known = sys.modules.get(top)
    if known is None:
        return
    places = [Path(place).resolve() for place in getattr(known, "__path__", ())]
    if (root / top).resolve() not in places:
        where = ", ".join(map(str, places)) or "no folder"
        raise InputError(
            f"{root / top}: the package {top} is already imported, from {where}; its relative "
            "imports would mean those files. Use a fresh process, or another name"
        )


def _packages(count: int) -> str:
    return f"{count or 'no'} package{'s' * (count != 1)}"


def _furthest(path: Path) -> ast.ImportFrom | None:
    """The relative import that goes the furthest up, of these the first."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # importing it will tell
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    return max(found, key=lambda n: (n.level, -n.lineno), default=None)
