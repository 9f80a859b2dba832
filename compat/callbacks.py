"""Lower host callbacks without a backend, which jax asks for to register the Python function.

What reaches the module are the transfers to and from the host and their channels; the function
itself never does, with or without a TPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import callback as _callback


class _NoBackend:
    """Registers a callback with nobody."""

    platform = "tpu"

    def make_python_callback_from_host_send_and_recv(self, *args: Any) -> object:
        return object()


class _Registering:
    """A module context whose backend takes callbacks; in all else the one that it stands for."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def get_backend(self, optional: bool = False) -> Any:
        return None if optional else _NoBackend()


@contextmanager
def host_callbacks() -> Iterator[None]:
    """While it lasts, callbacks that are lowered for a TPU need no TPU."""
    original = _callback.emit_python_callback

    def emit(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if ctx.module_context.get_backend(optional=True) is not None:
            return original(ctx, *args, **kwargs)
        inside = _Registering(ctx.module_context)
        return original(dataclasses.replace(ctx, module_context=inside), *args, **kwargs)

    _callback.emit_python_callback = emit
    try:
        yield
    finally:
        _callback.emit_python_callback = original
