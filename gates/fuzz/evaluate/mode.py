"""How numbers are kept while a jaxpr is evaluated: as typed, exactly, or with noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any


@dataclass(frozen=True)
class Mode:
    """One way to evaluate.

    With none of these, every operation rounds to its type. A NaN that arithmetic makes has no
    payload, as no operation's semantics promise one; one that is only moved keeps its bits.
    """

    wide: bool = False
    """Floats are kept in float64; what decides (compares, sorts, casts to integers, looks at bits)
    sees them rounded to their type."""
    rounds_narrow: bool = False
    """Where floats are kept in float64, those of types of fewer than 32 bits are rounded."""
    unsigned: bool = False
    """A zero has no sign and a NaN no payload, wherever they come from."""
    noise: np.random.Generator | None = None
    """Each rounding is off by up to one more unit in the last place."""

    def replay(self) -> Callable[[], None]:
        """A function after which noise comes as it comes from here.

        Devices that hold the same values compute the same ones, noise and all.
        """
        noise = self.noise
        if noise is None:
            return lambda: None
        state = noise.bit_generator.state

        def back() -> None:
            noise.bit_generator.state = state

        return back

    def computed(self, aval: Any, value: Array) -> Array:
        """What arithmetic made, as a value of type ``aval``."""
        dtype = aval.dtype
        if not is_float(dtype):
            return np.asarray(value).astype(dtype, copy=False)
        value = np.asarray(value)
        if self.wide:
            value = self.narrowed(dtype, value).astype(np.float64, copy=False)
        else:
            value = value.astype(dtype, copy=False)
            if self.noise is not None:
                value = self._disturbed(dtype, value)
        lost = value != value
        return np.where(lost, np.asarray(np.nan, value.dtype), value) if lost.any() else value

    def narrowed(self, dtype: Any, value: Array) -> Array:
        """A float that is kept in float64, rounded where this mode rounds those of its type."""
        return value.astype(dtype) if self.rounds_narrow and dtype.itemsize < 4 else value

    def _disturbed(self, dtype: Any, value: Array) -> Array:
        assert self.noise is not None
        exact = value.astype(np.float64)
        factor = 1 + float(jnp.finfo(dtype).eps) * self.noise.uniform(-1, 1, exact.shape)
        return (exact * factor).astype(dtype)

    def settled(self, value: Array) -> Array:
        """Any value at all, floats in the form in which this mode keeps it."""
        if not (self.wide or self.unsigned) or not is_float(value.dtype):
            return value
        if self.wide and value.dtype != np.float64:
            value = value.astype(np.float64)
        if self.unsigned:
            value = np.where(value == 0, np.asarray(0, value.dtype), value)
            value = np.where(value != value, np.asarray(np.nan, value.dtype), value)
        return value

    def nominal(self, aval: Any, value: Array) -> Array:
        """``value`` rounded to its type, for what decides by it."""
        if self.wide and is_float(aval.dtype):
            return value.astype(aval.dtype)
        return value

    def working(self, value: Array) -> Array:
        """A float in the type that it is computed with: narrow ones in float32."""
        return value.astype(np.float32) if value.dtype.itemsize < 4 else value


PLAIN = Mode()

_FLOATS: dict[Any, bool] = {}


def is_float(dtype: Any) -> bool:
    """Whether values of this type are floats, the narrow ones included."""
    known = _FLOATS.get(dtype)
    if known is None:
        known = _FLOATS[dtype] = bool(jnp.issubdtype(dtype, jnp.floating))
    return known
