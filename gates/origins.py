"""The child's side of ``FILE.py:NAME@REV``: no module from the work tree, but the revision's own.

A project that is installed editable, or whose folder is on the path by other means, would be
imported from the work tree. A finder in front of all others sends each such module to the same
file of the revision. What gets past it is noticed afterwards, and is an error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..lowering.errors import InputError
from ..lowering.program import Location, Program
from .recorder import Recorder

_INSTALLED = frozenset(("site-packages", "dist-packages"))
_OWN = __package__.partition(".")[0]
_NAMED = 3


class Tree:
    """The user's work tree, and the checkout that stands for it."""

    def __init__(self, revision: Mapping[str, str]) -> None:
        self.rev = revision["rev"]
        self.toplevel = Path(revision["toplevel"])
        self.root = Path(revision["root"])
        prefixes = {Path(os.path.realpath(p)) for p in (sys.prefix, sys.base_prefix)}
        # An environment inside the work tree isn't the project; one that holds it says nothing.
        self._environments = [p for p in prefixes if p.is_relative_to(self.toplevel)
                              and p != self.toplevel]  # fmt: skip

    def inside(self, path: str) -> Path | None:
        """``path`` from the top of the work tree, if it is a file or folder of the project."""
        full = Path(os.path.realpath(path))
        if not full.is_relative_to(self.toplevel) or full.is_relative_to(self.root):
            return None
        found = full.relative_to(self.toplevel)
        if _INSTALLED & set(found.parts) or any(full.is_relative_to(p) for p in self._environments):
            return None
        return found


class _Redirect(MetaPathFinder):
    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == _OWN:
            return None  # what lowers is the same for all revisions
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                found = finder.find_spec(name, path, target)
                if found is not None:
                    return self._moved(name, found)
        return None

    def _moved(self, name: str, spec: ModuleSpec) -> ModuleSpec:
        folders = spec.submodule_search_locations
        places = None if folders is None else [self._in_checkout(f) or f for f in list(folders)]
        origin = spec.origin if spec.has_location else None
        inside = None if origin is None else self._tree.inside(origin)
        if inside is None:
            if places is not None and places != list(folders or ()):
                spec.submodule_search_locations = places
            return spec
        moved = self._tree.root / inside
        if not moved.is_file():
            raise ModuleNotFoundError(
                f"{self._tree.rev} has no {inside}, from which the work tree would give {name}; "
                "untracked files and submodules are no part of a revision",
                name=name,
            )
        found = importlib.util.spec_from_file_location(
            name, moved, submodule_search_locations=places
        )
        assert found is not None
        return found

    def _in_checkout(self, folder: str) -> str | None:
        inside = self._tree.inside(folder)
        return None if inside is None else str(self._tree.root / inside)


def follow(revision: Mapping[str, str]) -> Tree:
    """From now on, modules of the project are the revision's."""
    tree = Tree(revision)
    sys.meta_path.insert(0, _Redirect(tree))
    return tree


def check(tree: Tree, program: Program | None, recorder: Recorder) -> list[str]:
    """Notes on what was read from the work tree though no revision has it, or can't be seen.

    Args:
        tree: the work tree and the checkout.
        program: what was lowered.
        recorder: what was read and used meanwhile.

    Raises:
        InputError: a module, an operation's source, or a file or the names in a folder that the
            revision has too came from the work tree, or the case used what may read it unseen.
    """
    modules = [
        f"module {name} from {inside}"
        for name, path in _modules()
        if (inside := tree.inside(path)) is not None
    ]
    if program is not None:
        lines = {where.file: None for where in program.locations if where.file is not None}
        modules += [
            f"operations of {inside}"
            for path in lines
            if not _own(path) and (inside := tree.inside(path)) is not None
        ]
    read = [
        inside
        for path in sorted(recorder.sources())
        if not _own(path) and (inside := tree.inside(path)) is not None and os.path.isfile(path)
    ]
    modules += [f"file {inside}" for inside in read if (tree.root / inside).exists()]
    folders = [inside for path in sorted(recorder.asked) if (inside := tree.inside(path))]
    modules += [f"the names in folder {x}" for x in folders if (tree.root / x).exists()]
    if modules:
        raise InputError(
            f"at {tree.rev}, this came from the work tree in place of the revision, so nothing can "
            f"be said of {tree.rev}: {_listed(modules)}"
        )
    used = recorder.used()
    if unseen := sorted(used - recorder.libraries):
        raise InputError(
            f"at {tree.rev}, the case used {', '.join(unseen)}: what came that way, perhaps from "
            f"the work tree, isn't seen, so nothing can be said of {tree.rev}; compare a case that "
            "does without"
        )
    foreign = [str(inside) for inside in read] + [f"{inside}/" for inside in folders]
    notes = [f"{tree.rev}: read from the work tree, untracked: {_listed(foreign)}"] * bool(foreign)
    if used:
        notes.append(
            f"{tree.rev}: installed packages used {', '.join(sorted(used))}: what came that way "
            "isn't seen"
        )
    return notes


def as_at(tree: Tree, program: Program) -> Program:
    """``program`` with files of the checkout named as git names them, ``REV:FILE``."""
    before = f"{tree.root}{os.sep}"

    def worded(text: str) -> str:
        return text.replace(before, f"{tree.rev}:")

    def moved(where: Location) -> Location:
        return where if where.file is None else replace(where, file=worded(where.file))

    return replace(
        program,
        locations=tuple(moved(where) for where in program.locations),
        unknowns=tuple(
            replace(u, where=None if u.where is None else moved(u.where)) for u in program.unknowns
        ),
        stamp=replace(program.stamp, queries=tuple(worded(q) for q in program.stamp.queries)),
    )


def _modules() -> Iterable[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        path: Any = getattr(module, "__file__", None)
        if isinstance(path, str) and name.partition(".")[0] != _OWN and not _own(path):
            yield name, path


def _own(path: str) -> bool:
    """Whether ``path`` is a file of this package, which is the installed one for all revisions."""
    from ..lowering.locations import is_own_file

    package: Any = sys.modules[_OWN].__file__
    return is_own_file(path) or Path(path).is_relative_to(Path(package).parent)


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
