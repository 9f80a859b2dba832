"""What ended a trace, as one line for people: an option that can't be followed, or the program."""

from __future__ import annotations

from ..lowering.errors import InputError
from ..lowering.own_mesh import untraceable

_OF_OPTIONS = ("assume", "contract is", "disable", "frozen", "no pass called")
"""How messages begin that are about what `optimize` was asked for."""


def untraced(spec: str, error: Exception, has_mesh: bool) -> InputError:
    """The error to raise where `optimize` or `explain` raised one for a case.

    Args:
        spec: the case, as it was named.
        error: what was raised.
        has_mesh: whether the case names a mesh.
    """
    if isinstance(error, ValueError) and str(error).startswith(_OF_OPTIONS):
        return InputError(str(error))
    return untraceable(spec, error, has_mesh)
