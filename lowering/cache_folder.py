"""Where this package keeps what need not be done again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_folder() -> Path:
    """``$RELOWER_CACHE``, or ``relower`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("RELOWER_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relower"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that whoever reads it sees all of it, or what stood there before."""
    handle, name = tempfile.mkstemp(".part", ".relower-", path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
