"""Substitute: the rewrites, and the interpreter that splices them into nested jaxprs.

What a pass of your own is made of can be imported from here; names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..matchers.fact import Fact as Fact
    from ..matchers.graph import Scope as Scope
    from ..matchers.graph import Value as Value
    from ..matchers.pattern import Bind as Bind
    from ..matchers.pattern import Constant as Constant
    from ..matchers.pattern import Mismatch as Mismatch
    from ..matchers.pattern import OneOf as OneOf
    from ..matchers.pattern import Op as Op
    from ..matchers.pattern import Pattern as Pattern
    from ..matchers.pattern import Where as Where
    from ..matchers.pattern import commuted as commuted
    from .base import Contract as Contract
    from .base import Example as Example
    from .base import Match as Match
    from .base import Pass as Pass
    from .base import Reason as Reason
    from .base import Replacement as Replacement
    from .base import Requirement as Requirement

_HOME = {
    **dict.fromkeys(
        ("Contract", "Example", "Match", "Pass", "Reason", "Replacement", "Requirement"), ".base"
    ),
    **dict.fromkeys(
        ("Bind", "Constant", "Mismatch", "OneOf", "Op", "Pattern", "Where", "commuted"),
        "..matchers.pattern",
    ),
    "Fact": "..matchers.fact",
    "Scope": "..matchers.graph",
    "Value": "..matchers.graph",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value
