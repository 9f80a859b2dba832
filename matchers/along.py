"""Which equations work along an axis independently: each place for itself, whatever the others.

Of such an equation the results for the parts of an array, cut along that axis, are the parts of its
result for the whole. Each rule says along which axis an equation works on its operands, given the
axis of its result; raises `Stop` where it doesn't work so, or isn't known to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..compat.jaxprs import Atom, Eqn
from ..compat.primitives import primitive

Axes = tuple[int | None, ...]
"""For each operand the axis along which it is in parts; None for one that all parts share."""


class Stop(Exception):
    """Parts that can't be worked on as a whole."""

    def __init__(self, code: str, found: str, wanted: str, through: Sequence[str] = ()) -> None:
        super().__init__(f"{code}: found {found}, wanted {wanted}")
        self.code = code
        self.through = tuple(through)
        """Operations from the one that differs to the one that the parts meet."""
        self.found = found
        self.wanted = wanted


def operand_axes(eqn: Eqn, axis: int) -> Axes:
    """Along which axis each operand is worked on where the results are along ``axis``.

    Raises:
      Stop: the equation doesn't work along the axis independently.
    """
    rule = rules().get(eqn.primitive)
    if rule is None:
        raise Stop("unsupported-op", eqn.primitive.name, "an operation known to work on each part"
                   " of the axis by itself")  # fmt: skip
    _whole_in_types(eqn, axis)
    return rule(eqn, axis)


def on_whole(eqn: Eqn, axis: int, size: int) -> Mapping[str, Any]:
    """The params with which an equation gives the whole, ``size`` along ``axis``."""
    params = dict(eqn.params)
    name = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(eqn.primitive.name)
    if name is not None:
        params[name] = _with(params[name], axis, size)
    if eqn.primitive.name == "slice":
        params["start_indices"] = _with(params["start_indices"], axis, 0)
        params["limit_indices"] = _with(params["limit_indices"], axis, size)
    return params


def _with(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _whole_in_types(eqn: Eqn, axis: int) -> None:
    """A type that names a mesh axis for the array's axis says that devices hold parts of it."""
    for var in eqn.outvars:
        spec = getattr(getattr(var.aval, "sharding", None), "spec", None) or ()
        if len(spec) > axis and len(spec) == var.aval.ndim and spec[axis] is not None:
            raise Stop("sharding", f"{spec} of a result of {eqn.primitive.name}",
                       f"axis {axis} whole on each device")  # fmt: skip


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type
copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite
le lgamma log log1p logistic lt max min mul ne neg nextafter not or population_count pow pvary real
reduce_precision reduced_vary_cast rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor name
"""

Rule = Callable[[Eqn, int], Axes]


@functools.cache
def rules() -> Mapping[Any, Rule]:
    """By primitive."""
    named: dict[str, Rule] = {
        **{name: _elementwise for name in _ELEMENTWISE.split()},
        "bitcast_convert_type": _bitcast,
        "broadcast_in_dim": _broadcast,
        "reshape": _reshape,
        "squeeze": _squeeze,
        "transpose": lambda eqn, axis: (int(eqn.params["permutation"][axis]),),
        "rev": _elsewhere("dimensions"),
        "slice": _slice,
        "pad": _pad,
        "all_gather": _gather,
        "all_gather_invariant": _gather,
        "reduce_scatter": _scatter,
        "sharding_constraint": _constraint,
        **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _all_reduce),
        **dict.fromkeys(
            ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"), _reduce
        ),
        **dict.fromkeys(("argmax", "argmin"), _reduce),
        **dict.fromkeys(("reduce_sum", "reduce_prod"), _sum),
    }
    spelled = {"add_any": "add_jaxvals"}
    found = ((primitive(f"{spelled.get(name, name)}_p"), rule) for name, rule in named.items())
    return {p: rule for p, rule in found if p is not None}


def _elementwise(eqn: Eqn, axis: int) -> Axes:
    out = eqn.outvars[0].aval
    return tuple(_elements(eqn, a, axis, out) for a in eqn.invars)


def _elements(eqn: Eqn, atom: Atom, axis: int, out: Any) -> int | None:
    if atom.aval.ndim == 0 < out.ndim:
        return None
    shape = atom.aval.shape
    if len(shape) != out.ndim or any(n not in (1, m) for n, m in zip(shape, out.shape)):
        raise Stop("operands", f"an operand {atom.aval.str_short()} of {eqn.primitive.name}",
                   f"one shaped as the result, {out.str_short()}")  # fmt: skip
    return None if shape[axis] == 1 < out.shape[axis] else axis  # jax spreads a size of one


def _bitcast(eqn: Eqn, axis: int) -> Axes:
    found, made = eqn.invars[0].aval, eqn.outvars[0].aval
    if found.dtype.itemsize != made.dtype.itemsize:
        raise Stop("unsupported-op", f"a bitcast of {found.dtype} to {made.dtype}",
                   "elements of one size")  # fmt: skip
    return _elementwise(eqn, axis)


def _broadcast(eqn: Eqn, axis: int) -> Axes:
    if len(eqn.invars) > 1:
        raise Stop("unsupported-op", "a broadcast to a size computed", "sizes that are known")
    _spec_whole(eqn, "sharding", axis)
    dims = tuple(eqn.params["broadcast_dimensions"])
    if axis not in dims:
        return (None,)
    at = dims.index(axis)
    spread = eqn.invars[0].aval.shape[at] != eqn.outvars[0].aval.shape[axis]
    return (None if spread else at,)


def _reshape(eqn: Eqn, axis: int) -> Axes:
    _spec_whole(eqn, "sharding", axis)
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    size, ahead, rest = after[axis], math.prod(after[:axis]), math.prod(after[axis + 1 :])
    same = [i for i, n in enumerate(before) if n == size and math.prod(before[:i]) == ahead
            and math.prod(before[i + 1 :]) == rest]  # fmt: skip
    if len(same) != 1 or eqn.params["dimensions"] is not None or len(eqn.invars) > 1:
        raise Stop("reshape", f"a reshape of {before} to {after}", f"one that keeps axis {axis}")
    return (same[0],)


def _squeeze(eqn: Eqn, axis: int) -> Axes:
    gone = set(eqn.params["dimensions"])
    return ([d for d in range(eqn.invars[0].aval.ndim) if d not in gone][axis],)


def _elsewhere(name: str) -> Rule:
    def rule(eqn: Eqn, axis: int) -> Axes:
        if axis in eqn.params[name]:
            raise Stop("unsupported-op", f"{eqn.primitive.name} along axis {axis}",
                       "work along other axes")  # fmt: skip
        return (axis,)

    return rule


def _slice(eqn: Eqn, axis: int) -> Axes:
    if eqn.invars[0].aval.shape[axis] != eqn.outvars[0].aval.shape[axis]:
        raise Stop("cut", f"a slice along axis {axis}", "a slice along other axes")
    return (axis,)


def _pad(eqn: Eqn, axis: int) -> Axes:
    if any(eqn.params["padding_config"][axis]):
        raise Stop("unsupported-op", f"a pad along axis {axis}", "a pad along other axes")
    return axis, None


def _gather(eqn: Eqn, axis: int) -> Axes:
    along, tiled = int(eqn.params["all_gather_dimension"]), eqn.params["tiled"]
    if along == axis:
        raise Stop("collective-axis", f"an all_gather along axis {axis}: parts of every device's"
                   " whole would lie side by side", "a collective along another axis")  # fmt: skip
    return (axis if tiled or axis < along else axis - 1,)


def _scatter(eqn: Eqn, axis: int) -> Axes:
    along, tiled = int(eqn.params["scatter_dimension"]), eqn.params["tiled"]
    if tiled and along == axis:
        raise Stop("collective-axis", f"a psum_scatter along axis {axis}: a device would get one"
                   " piece of the whole only", "a collective along another axis")  # fmt: skip
    return (axis if tiled or axis < along else axis + 1,)


def _all_reduce(eqn: Eqn, axis: int) -> Axes:
    if len(eqn.invars) > 1 or any(isinstance(a, int) for a in eqn.params["axes"]):
        raise Stop("unsupported-op", f"{eqn.primitive.name} of several arrays", "of one")
    return (axis,)


def _constraint(eqn: Eqn, axis: int) -> Axes:
    _spec_whole(eqn, "sharding", axis)
    if eqn.params.get("layout") is not None:
        raise Stop("sharding", "a constraint of a layout", "a constraint of a sharding only")
    return (axis,)


def _spec_whole(eqn: Eqn, name: str, axis: int) -> None:
    sharding = eqn.params.get(name)
    if sharding is None:
        return
    spec = getattr(sharding, "spec", None)
    if spec is None or (len(spec) > axis and spec[axis] is not None):
        raise Stop("sharding", f"{eqn.primitive.name} with {sharding if spec is None else spec}",
                   f"axis {axis} whole on each device")  # fmt: skip


def _reduce(eqn: Eqn, axis: int) -> Axes:
    _spec_whole(eqn, "out_sharding", axis)
    gone = set(eqn.params["axes"])
    return ([d for d in range(eqn.invars[0].aval.ndim) if d not in gone][axis],)


def _sum(eqn: Eqn, axis: int) -> Axes:
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        raise Stop("float-sum", f"{eqn.primitive.name} of {eqn.invars[0].aval.str_short()}",
                   "a reduction that gives the same in any order")  # fmt: skip
    return _reduce(eqn, axis)
