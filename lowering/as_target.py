"""Tracing as the target: what a program asks about its platform is answered for the TPU.

Real code asks ``jax.default_backend()`` or ``jax.devices()[0].device_kind`` while it is traced, and
takes its CPU path on a CPU host. Inside `as_target` every module that holds one of jax's query
functions, by ``jax.…`` or bound early by ``from jax import …``, holds one that answers for the
target instead; jax's own inside goes on seeing the host. On leaving, every module has its own
function back, also those first imported inside.

Not reached: a function kept in a closure, a default argument, a class or a container, and whatever
a module computed from a query when it was imported.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..compat.queries import JAX_ROOT, chip_queries, forget_chip, is_internal, originals
from .locations import is_own_file

_LOCK = threading.RLock()
WHILE_LOWERING = "jax's own lowering of kernels"
"""Where a query comes from that jax makes each time it lowers, whatever it traced before."""


@contextmanager
def as_target(devices: Sequence[Any]) -> Iterator[list[str]]:
    """Answers platform queries for ``devices`` of one process; yields the list of those seen.

    Only one thread at a time can be inside: the answers are the whole process's.
    """
    seen: list[str] = []
    with _LOCK:
        before = originals()
        answers = _answers(devices)
        inside = {
            name: _wrap(name, function, answers[name], seen) for name, function in before.items()
        }
        try:
            _rebind({id(before[name]): inside[name] for name in before})
            with _chip_noted(seen):
                yield seen
        finally:
            _rebind({id(inside[name]): before[name] for name in before})


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Lets queries be answered for the host, and yields the list of those seen."""
    seen: list[str] = []
    with _LOCK:
        before = originals()
        inside = {name: _wrap(name, function, function, seen) for name, function in before.items()}
        try:
            _rebind({id(before[name]): inside[name] for name in before})
            with _chip_noted(seen):
                yield seen
        finally:
            _rebind({id(inside[name]): before[name] for name in before})


@contextmanager
def _chip_noted(seen: list[str]) -> Iterator[None]:
    """Notes what Pallas is asked about the chip; it answers from the mesh by itself."""
    before = {(module, name): getattr(module, name) for module, name in chip_queries()}
    forget_chip()

    def noted(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(original)
        def query() -> Any:
            value = original()
            _record(f"pallas {name}() = {value!r} at {_asker()}", seen)
            return value

        return query

    try:
        for (module, name), original in before.items():
            setattr(module, name, noted(name, original))
        yield
    finally:
        for (module, name), original in before.items():
            setattr(module, name, original)


def _asker() -> str:
    """Who asked about the chip: a line outside of jax's inside, or jax itself while lowering."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(f"{JAX_ROOT}/_src/"):
        frame = frame.f_back
    if is_own_file(frame.f_code.co_filename):
        return WHILE_LOWERING
    return _shown(frame.f_code.co_filename, frame.f_lineno)


def _shown(path: str, line: int) -> str:
    if path.startswith(JAX_ROOT):
        path = "jax" + path[len(JAX_ROOT) :]
    return f"{path}:{line}"


def _answers(devices: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    return {
        "default_backend": lambda: "tpu",
        "devices": lambda: list(devices),
        "local_devices": lambda: list(devices),
        "device_count": lambda: len(devices),
        "local_device_count": lambda: len(devices),
        "process_count": lambda: 1,
        "process_index": lambda: 0,
        "process_indices": lambda: [0],
    }


def _wrap(
    name: str, original: Callable[..., Any], answer: Callable[..., Any], seen: list[str]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        # A question about another backend by name is answered by that backend.
        named = [a for a in (*args, *kwargs.values()) if a is not None and a not in (0, "tpu")]
        foreign = answer is original or bool(named)
        value = original(*args, **kwargs) if foreign else answer()
        shown = f"{len(value)} devices" if name.endswith("devices") else repr(value)
        _record(f"jax.{name}() = {shown} at {_caller()}", seen)
        return value

    return query


def _record(entry: str, seen: list[str]) -> None:
    if entry not in seen:
        seen.append(entry)


def _caller() -> str:
    """File and line of the innermost frame outside this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return _shown(frame.f_code.co_filename, frame.f_lineno)


def _rebind(replacements: dict[int, Callable[..., Any]]) -> None:
    """Puts another function in place of each, in every module outside jax's inside."""
    for module_name, module in list(sys.modules.items()):
        if is_internal(module_name):
            continue
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            replacement = replacements.get(id(value))
            if replacement is not None:
                names[name] = replacement
