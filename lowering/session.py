"""What the reading of one program and all its kernels shares."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger import Ledger
from .locations import LocationTable
from .program import Unknown


@dataclass
class Session:
    """The ledger, the locations and the unknown constructs of one program."""

    ledger: Ledger
    locations: LocationTable
    unknowns: dict[tuple[str, str], Unknown]

    def unknown(self, construct: str, reason: str, loc: int = -1) -> None:
        """Records an unknown construct once per construct and reason."""
        where = self.locations.entries[loc] if loc >= 0 else None
        self.unknowns.setdefault((construct, reason), Unknown(construct, reason, where))
