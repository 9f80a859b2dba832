"""Cases: what the command line and the gates lower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError
from .numerics import Numerics


@dataclass(frozen=True)
class Case:
    """A function with arguments, or a ``build`` that makes both for a mesh."""

    fn: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None
    """Extent by axis name; None is one device."""
    build: Callable[[Any], tuple[Any, ...]] | None = None
    """``build(mesh)`` returns ``(fn, args)`` or ``(fn, args, kwargs)``."""
    expect: Mapping[str, int] = field(default_factory=dict)
    """What the lowered program must hold at least, as in ``{"kernels": 1}``; gates check it."""
    numerics: Numerics | None = None
    """What the numerics gate reads of what the function returns."""
    host_queries: tuple[str, ...] = ()
    """Platform queries made while the case's file was loaded, answered for the host."""

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return str(getattr(self.fn or self.build, "__name__", "function"))

    def built(self, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
        """Function, arguments and keyword arguments for ``mesh``.

        Raises:
            InputError: ``build`` returns something else.
        """
        if self.build is None:
            assert self.fn is not None
            return self.fn, self.args, self.kwargs
        made = self.build(mesh)
        if (
            not isinstance(made, tuple)
            or len(made) not in (2, 3)
            or not callable(made[0])
            or not isinstance(made[1], (tuple, list))
            or not (len(made) == 2 or isinstance(made[2], Mapping))
        ):
            raise InputError(
                f"case {self.name}: build(mesh) returned {_shown(made)}, wanted (fn, args) or "
                "(fn, args, kwargs)"
            )
        return made[0], tuple(made[1]), made[2] if len(made) == 3 else {}


def case(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mapping[str, int] | None = None,
    expect: Mapping[str, int] | None = None,
    numerics: Numerics | None = None,
    **kwargs: Any,
) -> Case:
    """A case from a function and its arguments, or from ``build`` and a mesh.

    ``case(fn, *args, **kwargs)`` is lowered for one device. ``case(build, mesh={"data": 4,
    "model": 2})`` calls ``build(mesh)`` with the target's own mesh, outside its context, for
    ``(fn, args)`` or ``(fn, args, kwargs)``. Arguments are arrays, ``jax.ShapeDtypeStruct``s or
    pytrees of them; a function that is already jitted keeps its donation and static arguments.
    ``numerics`` says what the numerics gate reads of what the function returns.

    Raises:
        InputError: ``fn`` isn't callable, or ``build`` comes with arguments.
    """
    if numerics is not None and not isinstance(numerics, Numerics):
        raise InputError(f"case: numerics is {_shown(numerics)}; wanted a relower.Numerics")
    if not callable(fn):
        raise InputError(f"case: wanted a function first, found {_shown(fn)}")
    if mesh is None:
        return Case(fn, args, kwargs, expect=dict(expect or {}), numerics=numerics)
    if args or kwargs:
        raise InputError(
            "case: with mesh=, the function is build(mesh) and returns its own arguments; "
            f"found {len(args) + len(kwargs)} more"
        )
    if not isinstance(mesh, Mapping):
        raise InputError(f"case: mesh must map axis names to extents, found {_shown(mesh)}")
    return Case(build=fn, mesh=dict(mesh), expect=dict(expect or {}), numerics=numerics)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
