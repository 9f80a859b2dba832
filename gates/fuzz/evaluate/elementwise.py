"""Operations element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....compat.jaxprs import Eqn
from .mode import Mode, is_float
from .promises import BrokenPromise
from .rules import RULES, rule

Function = Callable[..., Any]


def _arithmetic(floats: Function, others: Function) -> Any:
    def run(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
        aval = eqn.outvars[0].aval
        if is_float(aval.dtype):
            return mode.computed(aval, floats(*map(mode.working, ins)))
        return np.asarray(others(*ins)).astype(aval.dtype, copy=False)

    return run


def _quotient(a: Any, b: Any) -> Any:
    safe = np.where(b == 0, np.ones_like(b), b)
    whole = np.abs(a.astype(object)) // np.abs(safe.astype(object))
    signed = np.where((a < 0) ^ (b < 0), -whole, whole)
    return np.where(b == 0, -1, signed)


def _remainder(a: Any, b: Any) -> Any:
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, a, np.fmod(a, safe))


def _wrapped(fn: Function) -> Function:
    """Integers of any size, taken modulo their type's range."""

    def run(a: Any, b: Any) -> Any:
        bits = 8 * a.dtype.itemsize
        low = np.asarray(fn(a, b)).astype(object) & ((1 << bits) - 1)
        unsigned = low.astype(np.uint64).astype(f"uint{bits}")
        return unsigned.view(a.dtype) if unsigned.shape else unsigned.reshape(1).view(a.dtype)[0]

    return run


def _greatest(a: Any, b: Any) -> Any:
    return np.where((a == b) & (a == 0), a + b, np.maximum(a, b))


def _least(a: Any, b: Any) -> Any:
    return np.where((a == b) & (a == 0), -((-a) + (-b)), np.minimum(a, b))


for _name, _floats, _others in (
    ("add", np.add, np.add),
    ("add_any", np.add, np.add),
    ("sub", np.subtract, np.subtract),
    ("mul", np.multiply, np.multiply),
    ("div", np.divide, _wrapped(_quotient)),
    ("rem", np.fmod, _remainder),
    ("max", _greatest, np.maximum),
    ("min", _least, np.minimum),
    ("square", np.square, np.square),
    ("one_minus_square", lambda x: 1 - x * x, lambda x: 1 - x * x),
):
    RULES[_name] = _arithmetic(_floats, _others)


def _function(fn: Function) -> Any:
    """A function of floats, computed in float64 and rounded once."""

    def run(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
        return mode.computed(eqn.outvars[0].aval, fn(*(x.astype(np.float64) for x in ins)))

    return run


_FUNCTIONS: dict[str, Function] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "pow": np.power,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "atan2": np.arctan2,
    "erf": np.vectorize(math.erf, otypes=[np.float64]), "sinh": np.sinh, "cosh": np.cosh,
}  # fmt: skip
RULES.update({name: _function(fn) for name, fn in _FUNCTIONS.items()})


@rule("integer_pow")
def _integer_pow(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    (x,), y, aval = ins, eqn.params["y"], eqn.outvars[0].aval
    if is_float(aval.dtype):
        return mode.computed(aval, x.astype(np.float64) ** float(y))
    return np.power(x, y, dtype=x.dtype)


@rule("neg")
def _neg(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.negative(ins[0])


@rule("abs")
def _abs(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.abs(ins[0])


@rule("sign")
def _sign(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    (x,) = ins
    if not is_float(eqn.outvars[0].aval.dtype):
        return np.sign(x)
    return mode.computed(eqn.outvars[0].aval, np.where(x == 0, x, np.sign(mode.working(x))))


@rule("floor", "ceil", "round")
def _to_whole(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x = mode.nominal(eqn.invars[0].aval, ins[0]).astype(np.float64)
    name = eqn.primitive.name
    if name == "round" and int(eqn.params["rounding_method"]) == 0:
        whole = np.trunc(x + np.copysign(0.5, x))
    else:
        whole = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}[name](x)
    return mode.computed(eqn.outvars[0].aval, whole)


@rule("is_finite")
def _is_finite(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.isfinite(mode.nominal(eqn.invars[0].aval, ins[0]))


@rule("not")
def _not(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return np.invert(ins[0])


def _bitwise(fn: Function) -> Any:
    return lambda mode, eqn, ins: fn(*ins)


def _comparison(fn: Function) -> Any:
    def run(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
        return fn(*(mode.nominal(a.aval, x) for a, x in zip(eqn.invars, ins)))

    return run


_BITWISE: dict[str, Function] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
RULES.update({name: _bitwise(fn) for name, fn in _BITWISE.items()})
RULES.update({name: _comparison(fn) for name, fn in _COMPARISONS.items()})


@rule("shift_left", "shift_right_logical", "shift_right_arithmetic")
def _shift(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, by = ins
    bits, dtype, name = 8 * x.dtype.itemsize, x.dtype, eqn.primitive.name
    far = (by < 0) | (by >= bits)
    by = np.where(far, 0, by).astype(dtype)
    if name == "shift_left":
        return np.where(far, np.zeros_like(x), np.left_shift(x, by))
    if name == "shift_right_logical":
        unsigned = f"uint{bits}"
        moved = np.right_shift(x.astype(unsigned), by.astype(unsigned)).astype(dtype)
        return np.where(far, np.zeros_like(x), moved)
    return np.where(far, np.right_shift(x, np.asarray(bits - 1, dtype)), np.right_shift(x, by))


@rule("select_n")
def _select_n(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    which, *cases = ins
    if which.dtype == np.bool_:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


@rule("clamp")
def _clamp(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    low, x, high = ins
    if not is_float(x.dtype):
        return np.minimum(np.maximum(x, low), high)
    found = np.where(x < low, low, x)
    return np.where(found > high, high, found)


@rule("convert_element_type")
def _convert(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    (x,), target = ins, eqn.params["new_dtype"]
    source = eqn.invars[0].aval.dtype
    if target == source:
        return x
    if is_float(target):
        if is_float(source):
            if mode.wide:
                return mode.narrowed(eqn.outvars[0].aval.dtype, x)
            return _narrowed(mode, eqn, x)
        return mode.computed(eqn.outvars[0].aval, x.astype(np.float64))
    x = mode.nominal(eqn.invars[0].aval, x)
    if target == np.bool_:
        return x != 0
    if is_float(source):
        info = np.iinfo(target)
        exact = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
        whole = np.trunc(exact).astype(object)
        return np.clip(_integers(whole), int(info.min), int(info.max)).astype(target)
    return x.astype(target)


def _integers(whole: Any) -> Any:
    return np.vectorize(int, otypes=[object])(whole) if np.size(whole) else whole


def _narrowed(mode: Mode, eqn: Eqn, x: Any) -> Any:
    made = x.astype(eqn.params["new_dtype"])
    return mode.computed(eqn.outvars[0].aval, made) if mode.noise is not None else made


@rule("bitcast_convert_type")
def _bitcast(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x = np.ascontiguousarray(mode.nominal(eqn.invars[0].aval, ins[0]))
    aval = eqn.outvars[0].aval
    return np.frombuffer(x.tobytes(), aval.dtype).reshape(aval.shape)


@rule("reduce_precision")
def _reduce_precision(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    import ml_dtypes

    (x,) = ins
    key = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    narrow = {(8, 7): ml_dtypes.bfloat16, (5, 10): np.float16, (8, 23): np.float32}.get(key)
    if mode.wide:
        return x
    if narrow is None:
        raise NotImplementedError(f"reduce_precision to {key}")
    return x.astype(narrow).astype(x.dtype)


@rule("copy", "copy_p", "reshard", "sharding_constraint", "pvary", "pcast", "name", "mesh_cast",
      "stop_gradient", "layout_constraint", "reduced_vary_cast", "tie_in")  # fmt: skip
def _same(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return ins[0]


@rule("assume_range")
def _assume_range(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    x, lo, hi = mode.nominal(eqn.invars[0].aval, ins[0]), eqn.params["lo"], eqn.params["hi"]
    if x.size and not (np.all(x >= lo) and np.all(x <= hi)):
        raise BrokenPromise(f"assume_range: [{lo}, {hi}], and there are {x.min()} to {x.max()}")
    return ins[0]


@rule("optimization_barrier")
def _barrier(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return list(ins)


@rule("debug_callback", "debug_print")
def _nothing(mode: Mode, eqn: Eqn, ins: Sequence[Any]) -> Any:
    return []
