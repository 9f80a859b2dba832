"""Whether the addresses that are turned off name sites."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ...compat.jaxprs import Body
from ..base import Pass
from ..disable import Disabled
from ..frozen import Request
from ..report import Report
from .addresses import Addresses
from .rewrite import rewrite


def check_met(
    disabled: Disabled, report: Report, closed: Body, passes: Sequence[Pass], request: Request
) -> None:
    """Raise where an address that is turned off names no site.

    A site that only comes up once another one is rewritten is one, too, where both are off.

    Raises:
      ValueError: with the nearest addresses.
    """
    known = [a for s in report.sites for a in s.addresses]
    if not _unmet(disabled, known, passes):
        return
    whole = rewrite(closed, passes, request=request, addresses=Addresses()).report
    known += [a for s in whole.sites for a in s.addresses]
    wrong = _unmet(disabled, known, passes)
    if wrong:
        said = "; ".join(f"{address!r} ({why})" for address, why in wrong.items())
        raise ValueError(f"disable: no site of {report.name} has the address {said}")


def _unmet(disabled: Disabled, known: Iterable[str], passes: Sequence[Pass]) -> dict[str, str]:
    """What is wrong with each address that is turned off and names no site: the nearest ones."""
    there = dict.fromkeys(known)
    names = {p.name for p in passes}
    wrong: dict[str, str] = {}
    for address in sorted(disabled.addresses - there.keys()):
        owner = address.partition("@")[0]
        near = difflib.get_close_matches(address, there, n=3, cutoff=0.5)
        near = near or [a for a in there if a.startswith(f"{owner}@")][:3]
        if owner not in names:
            wrong[address] = f"the pass {owner} doesn't run here"
        elif near:
            wrong[address] = f"near ones: {', '.join(near)}"
        else:
            wrong[address] = f"{owner} finds no site here"
    return wrong
