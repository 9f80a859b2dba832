"""``disable=``: names of passes, and addresses of single sites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import registry

_ADDRESS = re.compile(r"(?P<name>[^@]*)@(?P<path>.*)#(?P<number>[1-9][0-9]*)", re.S)


DISABLED = "disabled"
"""The code of the reason for which a site that is turned off is declined."""


@dataclass(frozen=True)
class Disabled:
    """Which sites are turned off."""

    addresses: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    """Where given, every site with another address is off."""

    def __bool__(self) -> bool:
        """Whether any site could be off."""
        return bool(self.addresses) or self.only is not None

    def is_off(self, address: str) -> bool:
        """Whether the site at ``address`` is off."""
        return address in self.addresses or (self.only is not None and address not in self.only)


def split(disable: Iterable[str] | Disabled) -> tuple[list[str], Disabled]:
    """The passes and the single sites that ``disable`` turns off.

    Raises:
      ValueError: no such pass, or something with an ``@`` that has not the form of an address.
      TypeError: anything but a sequence of strings.
    """
    if isinstance(disable, Disabled):
        return [], disable
    if isinstance(disable, str):
        raise TypeError(
            f"disable is the string {disable!r}; wanted a sequence, as in [{disable!r}]"
        )
    if not isinstance(disable, Iterable):
        raise TypeError(
            f"disable is {disable!r} of type {type(disable).__name__}; wanted a sequence of names "
            "of passes, as in ['argsort_packed_key'], or addresses of sites"
        )
    given = list(disable)
    names = [name for name in given if not isinstance(name, str) or "@" not in name]
    addresses = [name for name in given if isinstance(name, str) and "@" in name]
    off = {registry.by_name(name).name for name in names}
    for address in addresses:
        form = _ADDRESS.fullmatch(address)
        if form is None and address.endswith("#?"):
            name = address.partition("@")[0]
            raise ValueError(
                f"disable: {address!r} is not of one site: several equations can have it, since "
                f"what it was made of isn't known; wanted the pass as a whole, {name!r}, or "
                "relower.keep(…) around what is to stay"
            )
        if form is None:
            raise ValueError(
                f"disable: {address!r} is no address of a site; wanted PASS@SCOPE:FUNCTION#NUMBER "
                "as `explain` shows it"
            )
    kept = (a for a in addresses if a.partition("@")[0] not in off)
    return names, Disabled(frozenset(kept))
