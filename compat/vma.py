"""The varying manual axes of a type: over which mesh axes a value differs inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core

pvary_p: Any = core.pvary_p


def varying(aval: Any) -> frozenset[str]:
    """The axes over which a value of this type may differ; empty for types without them."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def with_varying(aval: Any, axes: frozenset[str]) -> Any:
    """The same type, differing over ``axes``."""
    if varying(aval) == axes:
        return aval
    manual = aval.manual_axis_type
    return (
        aval.update(manual_axis_type=manual.update(varying=axes))
        if hasattr(manual, "update")
        else aval.update(manual_axis_type=_rebuilt(manual, axes))
    )


def _rebuilt(manual: Any, axes: frozenset[str]) -> Any:
    fields = {n: getattr(manual, n) for n in ("unreduced", "reduced", "unreduced_kind")
              if hasattr(manual, n)}  # fmt: skip
    return type(manual)(varying=axes, **fields)


def differs_only_in_varying(a: Any, b: Any) -> bool:
    """Whether two types are equal but for the axes they vary over."""
    return type(a) is type(b) and varying(a) != varying(b) and (with_varying(a, varying(b)) == b)


def pvary(x: Any, axes: frozenset[str]) -> Any:
    """``x`` as a value that may differ over ``axes`` too."""
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def shape_struct(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """The type of a kernel's result that varies over the axes that ``like`` varies over."""
    if not varying(like):
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=like.manual_axis_type)
