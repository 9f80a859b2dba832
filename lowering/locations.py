"""Where operations came from: read from MLIR's debug locations, kept beside the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .program import Location

_PACKAGES = ("compat", "gates", "kernels", "lowering", "matchers", "passes")
_HOUSE = Path(__file__).resolve().parent.parent
_OWN_PREFIXES = tuple(f"{_HOUSE / name}/" for name in _PACKAGES)


def is_own_file(path: str) -> bool:
    """Whether ``path`` is a file of this package, whose frames never explain a user's line."""
    return path.startswith(_OWN_PREFIXES)


class LocationTable:
    """Distinct locations, each with an index. JAX has left its own frames out already."""

    def __init__(self) -> None:
        self.entries: list[Location] = []
        self._index: dict[Location, int] = {}
        self.known: dict[Any, int] = {}
        """The index of each location that was met, by its MLIR attribute."""
        self._composed: dict[tuple[int, int], int] = {}

    def index_of(self, loc: Any) -> int:
        """The index of an MLIR location, or -1 where it says nothing."""
        key = loc.attr
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._add(_read(loc))
        return found

    def under(self, call: int, inner: int) -> int:
        """The location of what stood at ``inner`` in a function called at ``call``."""
        if call < 0:
            return inner
        key = (call, inner)
        if key not in self._composed:
            outer = self.entries[call]
            entry = self.entries[inner] if inner >= 0 else Location(None, None, None)
            scope = "/".join(part for part in (outer.scope, entry.scope) if part) or None
            known = entry if entry.file is not None else outer
            self._composed[key] = self._add(Location(known.file, known.line, scope))
        return self._composed[key]

    def _add(self, location: Location) -> int:
        if location.file is None and location.scope is None:
            return -1
        if location not in self._index:
            self._index[location] = len(self.entries)
            self.entries.append(location)
        return self._index[location]


def _read(loc: Any) -> Location:
    frames = _frames(loc)
    frame = next((f for f in frames if not is_own_file(f[0])), frames[0] if frames else None)
    return Location(frame[0] if frame else None, frame[1] if frame else None, _scope(loc))


def _scope(loc: Any) -> str | None:
    """The outermost name that isn't a primitive's (``get:``) or a Python function's."""
    while type(loc).__name__ == "NameLoc":
        inner = loc.child_loc
        if not loc.name_str.endswith(":"):
            is_frame = type(inner).__name__ == "FileLineColLoc"
            return None if is_frame else str(loc.name_str)
        loc = inner
    return None


def _frames(loc: Any) -> list[tuple[str, int]]:
    """File and line of every frame, innermost first."""
    found: list[tuple[str, int]] = []
    pending = [loc]
    while pending:
        here = pending.pop()
        match type(here).__name__:
            case "NameLoc":
                pending.append(here.child_loc)
            case "CallSiteLoc":
                pending.extend((here.caller, here.callee))
            case "FileLineColLoc":
                found.append((here.filename, here.start_line))
            case "FusedLoc":
                pending.extend(reversed(list(here.locations)))
    return found
