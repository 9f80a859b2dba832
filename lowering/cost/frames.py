"""Where an instruction came from: the tables of frames beside the HLO, or its own metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..locations import is_own_file

_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True)
class Frames:
    """The frames of a module, by their number in its tables."""

    places: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """File and line by frame."""
    parents: Mapping[int, int] = field(default_factory=dict)

    def source(self, metadata: Mapping[str, str]) -> str | None:
        """``file:line`` of the innermost frame that isn't this package's own."""
        if "source_file" in metadata:
            file, line = metadata["source_file"], metadata.get("source_line", "0")
            return None if is_own_file(file) else f"{file}:{line}"
        number = metadata.get("stack_frame_id", "")
        frame = int(number) if number.isdecimal() else 0
        for _ in range(len(self.places) + 1):
            if frame not in self.places:
                return None
            file, line_number = self.places[frame]
            if not is_own_file(file):
                return f"{file}:{line_number}"
            frame = self.parents[frame]
        return None


def read_frames(text: str) -> Frames:
    """The tables at the head of a module's text; empty where it has none."""
    tables = {name: body.splitlines() for name, body in _TABLE.findall(text[: _head(text)])}
    files = {}
    for row in tables.get("FileNames", ()):
        number, _, name = row.partition(" ")
        files[int(number)] = name.strip().strip('"')
    locations = {}
    for number, row in _rows(tables.get("FileLocations", ())):
        locations[number] = (files.get(row.get("file_name_id", 0), "?"), row.get("line", 0))
    places, parents = {}, {}
    for number, row in _rows(tables.get("StackFrames", ())):
        if row.get("file_location_id") in locations:
            places[number] = locations[row["file_location_id"]]
            # The table counts parents from 1, where 1 is none; a frame's own number is from 1 too.
            parents[number] = row.get("parent_frame_id", 1) - 1
    return Frames(places, parents)


def _head(text: str) -> int:
    """Where the first computation starts; the tables stand before it."""
    match = re.search(r"^(ENTRY )?%\S+ \(", text, re.MULTILINE)
    return match.start() if match else len(text)


def _rows(lines: list[str] | tuple[()]) -> list[tuple[int, dict[str, int]]]:
    found = []
    for line in lines:
        number, _, rest = line.partition(" ")
        found.append((int(number), {k: int(v) for k, v in _NUMBER.findall(rest)}))
    return found
