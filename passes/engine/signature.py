"""What tells one call of an optimized function from another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...compat import tracing


def cache_key(
    leaves: Sequence[Any], in_tree: Any, avals: Sequence[Any], is_dynamic: Callable[[Any], bool]
) -> Any:
    """Hashable and complete, or None where the call can't be cached."""
    static = tuple(None if is_dynamic(leaf) else _static_key(leaf) for leaf in leaves)
    key = (static, in_tree, tuple(avals), tracing.trace_context())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _static_key(leaf: Any) -> Any:
    """Tells apart what Python calls equal: 1 and True, and zeros of either sign."""
    exact = repr(leaf) if isinstance(leaf, float | complex | np.generic) else leaf
    return type(leaf), exact
