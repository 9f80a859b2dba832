"""The compiler's static bundle analysis: estimated cycles by instruction.

Two records hold the same figures: ``bundle_analysis_data`` in the optimised HLO, and one text
file per instruction, written as it goes, which is what is left where the analysis aborts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_AVAILABLE = 2**63 - 1
"""What the compiler writes where it has no figure; so it does with 0 and negative numbers."""

_NAME = re.compile(r'hlo_op_name:\s*"((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r"estimated_cycles:\s*(-?\d+)(?=[\s}])")
"""A number that ends where its file does may be the half of one."""


def flag(folder: Path) -> str:
    """The flag of libtpu that turns the analysis on."""
    return f"--xla_jf_dump_static_llo_profile_to={folder}"


def available(value: Any) -> int | None:
    """A figure of the compiler's, or None where it means that there is none."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < NOT_AVAILABLE else None


def estimated_cycles(config: Mapping[str, Any]) -> int | None:
    """The bundle analysis' figure in an instruction's ``backend_config``."""
    return _entry(config, "bundle_analysis_data")


def window_cycles(config: Mapping[str, Any]) -> int | None:
    """The window heuristic's figure: another kind of estimate, shown and never summed."""
    return _entry(config, "window_config")


def _entry(config: Mapping[str, Any], name: str) -> int | None:
    found = config.get(name)
    return available(found.get("estimated_cycles")) if isinstance(found, dict) else None


def read_profiles(folder: Path) -> tuple[dict[str, int], int]:
    """What an analysis wrote before it ended, where that isn't the analysis' own end.

    Returns:
        Cycles by instruction, and how many of the files hold nothing whole: they were cut short,
        hold something else, or can't be read.
    """
    found = {}
    broken = 0
    for path in sorted(folder.glob("*.textproto")):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            text = ""
        whole = False
        for estimate in text.split("hlo_op_estimate")[1:]:
            name, cycles = _NAME.search(estimate), _CYCLES.search(estimate)
            if name is None or cycles is None:
                continue
            whole = True
            figure = available(cycles[1])
            if figure is not None:
                found[name[1]] = figure
        broken += not whole
    return found, broken
