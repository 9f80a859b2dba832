"""Bring a value that a replacement wants from the body that has it to the body of the site."""

from __future__ import annotations

from ...compat.jaxprs import Body, Eqn
from ...matchers.graph import Scope
from ..base import Accepted, Reason, SiteDeclined
from .thread import Path, thread

Brought = dict[tuple[str, int, Path], Eqn]
"""What was brought for which sites, with their equations, whose ids are in the keys."""


def bring(closed: Body, site: Accepted, brought: Brought) -> Body:
    """``closed`` with the value that a site wants as one more input of the site's body.

    Args:
      closed: the whole jaxpr.
      site: a site whose replacement wants a value.
      brought: what was brought so far; added to.

    Raises:
      SiteDeclined: the value can't be brought there, or was and the site still wants it.
    """
    wanted = site.replacement.wants
    assert wanted is not None
    try:
        target = _path(site.match.scope)
        key = site.rewrite.name, id(site.match.eqn), target
        if key in brought:
            raise _declined("another iteration's value", "the same iteration's")
        brought[key] = site.match.eqn
        return thread(closed, _path(wanted.scope), wanted.atom, target).closed
    except SiteDeclined as declined:
        declined.blamed = (site,)
        raise


def _path(scope: Scope) -> Path:
    route = scope.route()
    if route is None:
        raise _declined("a body that several equations run", "one call of each body")
    return tuple((caller.index, caller.entered.key) for caller in route)


def _declined(found: str, wanted: str) -> SiteDeclined:
    return SiteDeclined(
        Reason("cannot-thread", "a value needed here is computed in another body", found, wanted)
    )
