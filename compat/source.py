"""Where an equation came from: the user's line and the name stack."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from typing import Any

from jax._src import source_info_util

from .jaxprs import Eqn

KEPT = "relower.keep"
"""The name scope of equations that stay as they are."""


def source_line(eqn: Eqn) -> str | None:
    """``file.py:line`` of the innermost frame outside jax and relower; None where jax kept none."""
    place = source_place(eqn)
    return None if place is None else place[0]


def source_place(eqn: Eqn) -> tuple[str, str] | None:
    """``file.py:line`` and the function of the innermost frame outside jax and relower.

    The function's name is its last part alone: Python versions differ in how they qualify it.
    """
    frame = _user_frame(eqn)
    if frame is None:
        return None
    return f"{frame.file_name}:{frame.start_line}", frame.function_name.rpartition(".")[2]


def source_span(eqn: Eqn) -> tuple[str, int, int, int, int] | None:
    """File, line, column, last line and last column of the expression in `source_line`'s frame.

    Lines from 1, columns from 0 in UTF-8 bytes, as in `ast`; None where there is no frame.
    """
    frame = _user_frame(eqn)
    if frame is None:
        return None
    return (frame.file_name, frame.start_line, frame.start_column, frame.end_line,
            frame.end_column)  # fmt: skip


def _user_frame(eqn: Eqn) -> Any:
    """The innermost frame outside jax and relower."""
    return _innermost_user_frame(eqn.source_info.traceback)


@functools.lru_cache(maxsize=1 << 12)
def _innermost_user_frame(traceback: Any) -> Any:
    """Asked in each round of the same equations, and of all that replaces one."""
    for frame in source_info_util.user_frames(traceback):
        if os.path.dirname(frame.file_name) not in _own_folders():
            return frame
    return None


def call_stack(eqn: Eqn) -> tuple[tuple[str, int, int], ...]:
    """File, line and column of every frame outside jax, the innermost first.

    What jax derives from an equation, such as its transpose, has the stack of that equation.
    """
    return tuple(
        (frame.file_name, frame.start_line, frame.start_column)
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    )


@functools.cache
def _own_folders() -> frozenset[str]:
    """The folders of relower's packages that are loaded; examples and tests are the user's."""
    name = __package__.rpartition(".")[0]
    packages = [m for n, m in sys.modules.items() if n == name or n.startswith(name + ".")]
    files = (getattr(module, "__file__", None) for module in packages)
    return frozenset(os.path.dirname(file) for file in files if file)


def name_stack(eqn: Eqn) -> str:
    """The equation's name stack relative to the body it stands in; may be empty."""
    return str(eqn.source_info.name_stack)


def is_kept(eqn: Eqn) -> bool:
    """Whether an equation, or what it was derived from, stands in a scope named `KEPT`."""
    return _holds_kept(eqn.source_info.name_stack.stack)


def any_kept(eqns: Iterable[Eqn]) -> bool:
    """Whether `is_kept` holds of one of several equations, which mostly share their stacks."""
    stacks = (eqn.source_info.name_stack.stack for eqn in eqns)
    return any(map(_holds_kept, {id(stack): stack for stack in stacks}.values()))


def _holds_kept(stack: Iterable[Any]) -> bool:
    return any(getattr(s, "name", None) == KEPT for s in stack)
