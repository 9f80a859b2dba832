"""Ending with the process that one was started by, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends.

    Args:
        parent: the id of the process that started it.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass  # no Linux: the parent ends the group itself, where it isn't killed
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
