"""The one exception that a person at the command line is meant to see."""

from __future__ import annotations


class InputError(Exception):
    """What the user gave can't be used.

    The message is one line: what was found, what was wanted, and what to do about it. The command
    line prints it alone and exits with code 2.
    """
