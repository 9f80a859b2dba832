"""What ended a trace, as one line for people: an option that can't be followed, or the program."""

from __future__ import annotations

from ..lowering.errors import InputError
from ..lowering.load import describe

_OF_OPTIONS = ("assume", "contract is", "disable", "frozen", "no pass called")
"""How messages begin that are about what `optimize` was asked for."""


def untraced(spec: str, error: Exception) -> InputError:
    """The error to raise where `optimize` or `explain` raised one for a case.

    Args:
        spec: the case, as it was named.
        error: what was raised.
    """
    if isinstance(error, InputError):
        return error
    if isinstance(error, ValueError) and str(error).startswith(_OF_OPTIONS):
        return InputError(str(error))
    return InputError(f"{spec} can't be traced: {describe(error)}")
