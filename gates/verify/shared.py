"""Whether sites that share a replacement would each be given the same one.

`optimize` traces a replacement once for all sites of one key and type. A key that leaves out what
the replacement depends on puts the first site's program in place of the second's, which no run of
the second's own replacement shows. Derivative rules that are still Python functions can't be
compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ...compat.jaxprs import Jaxpr
from ...compat.same_body import RULES, same_body
from ...passes.base import Accepted
from ...passes.engine.sharing import own_replacement, what_is_done


@dataclass
class Shared:
    """The replacements so far, by the keys under which they are shared."""

    _first: dict[tuple[object, ...], tuple[Jaxpr, str]] = field(default_factory=dict)
    _keep: list[Any] = field(default_factory=list)
    """Objects whose ids are in keys."""

    def fault(self, site: Accepted) -> str | None:
        """How a site's replacement differs from that of another of the same key; None if not."""
        found = own_replacement(site)
        if found is None:
            return None
        traced_as, own = found
        scope = site.match.scope
        here = _place(site)
        self._keep += [site, *(c.scope for c in scope.path())]
        for key in (traced_as, (id(scope.body), *what_is_done(site))):
            first, there = self._first.setdefault(key, (own, here))
            if not same_body(first, own, RULES):
                return (
                    f"it is given the replacement of the site {there}, since both have the key "
                    f"{site.replacement.key!r}, but the site {here} needs another: "
                    f"{_difference(first, own)}"
                )
        return None


def _place(site: Accepted) -> str:
    return f"at {site.match.scope.whereabouts(site.match.eqn)}"


def _difference(first: Jaxpr, own: Jaxpr) -> str:
    """The first lines of two programs that differ."""
    lines = [[re.sub("0x[0-9a-f]+", "", s.strip()) for s in str(j).splitlines()]
             for j in (first, own)]  # fmt: skip
    for a, b in zip(*lines, strict=False):
        if a != b:
            return f"`{b[:120]}`, not `{a[:120]}`"
    return "what isn't printed" if len(lines[0]) == len(lines[1]) else "other equations"
