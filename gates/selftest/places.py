"""Where the programs are that the comparator is tested with."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("programs.py")
PROGRAMS = ("gmm_step", "flash_step", "moe_step")
"""Cases of `SOURCE`."""
