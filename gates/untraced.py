"""What ended a trace, as one line for people: an option that can't be followed, or the program."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..lowering.errors import InputError
from ..lowering.locations import is_own_file
from ..lowering.own_mesh import untraceable

_OF_OPTIONS = ("assume", "contract", "disable", "frozen", "no pass called", "passes")
"""How messages begin that are about what `optimize` was asked for."""


@contextmanager
def traced(spec: str, has_mesh: bool) -> Iterator[None]:
    """Around `optimize` or `explain` of a case: what they raise is raised as one line.

    Args:
        spec: the case, as it was named.
        has_mesh: whether the case names a mesh.

    Raises:
        InputError: in place of any other error.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if is_of_options(error):
            raise InputError(str(error)) from error
        raise untraceable(spec, error, has_mesh) from error


def is_of_options(error: BaseException) -> bool:
    """Whether it is about what `optimize` was asked for, and not about the program."""
    frames = traceback.extract_tb(error.__traceback__)
    own = not frames or is_own_file(frames[-1].filename)  # a program's errors can begin so, too
    return own and isinstance(error, ValueError) and str(error).startswith(_OF_OPTIONS)
