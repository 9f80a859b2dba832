"""The child's side of a patch: files are loaded as they would be, and none of them is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from typing import Any


def load_instead(sources: Mapping[str, str]) -> None:
    """From now on, the text given is what these files are loaded from; no bytecode is read of them.

    Args:
      sources: text by file.
    """
    texts = {os.path.realpath(file): text.encode() for file, text in sources.items()}
    data, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        text = texts.get(os.path.realpath(path))
        return data(self, path) if text is None else text

    def path_stats(self: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if os.path.realpath(path) in texts:
            raise OSError("loaded from elsewhere")  # without it, bytecode is neither read nor kept
        return stats(self, path)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign,assignment]
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]
