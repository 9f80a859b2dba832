"""Where an equation came from: the user's line and the name stack."""

from __future__ import annotations

from jax._src import source_info_util

from .jaxprs import Eqn


def source_line(eqn: Eqn) -> str | None:
    """``file.py:line`` of the innermost frame outside jax, or None where jax kept none."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else f"{frame.file_name}:{frame.start_line}"


def name_stack(eqn: Eqn) -> str:
    """The equation's name stack relative to the body it stands in; may be empty."""
    return str(eqn.source_info.name_stack)
