"""VLIW bundles by instruction, from the compiler's dump of its final schedule.

A static count: a loop's body counts once however often it runs. It says how much code an
instruction became, not how long it takes.
"""

from __future__ import annotations

import re
from pathlib import Path

_TOTAL = re.compile(r"total scheduled bundles:\s*(\d+)(?=\s)")
_NAME = re.compile(r"%([\w.\-]+) = ")
_FILE = re.compile(r"^\d+-(?P<name>.+?)-\d+-schedule-analysis_final_bundles\.txt$")


def flags(folder: Path) -> list[str]:
    """The flags of libtpu that dump final bundles; without the last one it is a gigabyte."""
    return [
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    ]


def read_bundles(folder: Path) -> dict[str, int]:
    """Bundles by instruction name, from the files that are whole."""
    found = {}
    for path in sorted(folder.glob("*schedule-analysis_final_bundles.txt")):
        match = _FILE.match(path.name)
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        total = _TOTAL.search(text)
        if match is None or total is None or match["name"].startswith(("<", "TLP")):
            continue  # the program around the instructions
        named = _NAME.search(text)
        found[named[1] if named else match["name"]] = int(total[1])
    return found
