"""Mutants of constants, each by the least that its type allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...compat.mlir import ir
from .draft import Draft
from .mutant import Mutant, itself


def _constants(draft: Draft, is_wanted: Callable[[Any, str], bool]) -> list[Any]:
    found = []
    for op in draft.ops("stablehlo.constant"):
        value = op.attributes["value"]
        if type(value).__name__.startswith("Dense") and is_wanted(value, str(op.results[0].type)):
            found.append(op)
    return found


def _is_finite_float(value: Any, text: str) -> bool:
    return text.endswith(("f32>", "xf32>")) and bool(np.all(np.isfinite(np.array(value))))


def _scalar(value: Any, text: str) -> bool:
    return text == "tensor<f32>" and _is_finite_float(value, text)


def _splat(value: Any, text: str) -> bool:
    return "x" in text and value.is_splat and _is_finite_float(value, text)


def _dense(value: Any, text: str) -> bool:
    return not value.is_splat and _is_finite_float(value, text)


def _integer(value: Any, text: str) -> bool:
    return text == "tensor<i32>"


def _next_float(draft: Draft, op: Any) -> None:
    """The last element becomes the float after it: one unit in the last place."""
    value = op.attributes["value"]
    array = np.array(value)
    if value.is_splat:
        array = np.nextafter(array.reshape(-1)[:1], np.float32(np.inf))
        element = ir.FloatAttr.get(ir.F32Type.get(), float(array[0]))
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, element)
        return
    array = array.copy()
    array.reshape(-1)[-1] = np.nextafter(array.reshape(-1)[-1], np.float32(np.inf))
    op.attributes["value"] = ir.DenseElementsAttr.get(array, type=value.type)


def _next_integer(draft: Draft, op: Any) -> None:
    value = op.attributes["value"]
    number = int(np.array(value).reshape(-1)[0])
    element = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number ^ 1)
    op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, element)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "float constant, scalar",
        "a scalar f32 constant",
        partial(_constants, is_wanted=_scalar),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "float constant, splat",
        "an f32 constant of one value",
        partial(_constants, is_wanted=_splat),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "float constant, dense",
        "an f32 constant of several values",
        partial(_constants, is_wanted=_dense),
        _next_float,
        "stablehlo.constant",
        lives=itself,
    ),
    Mutant(
        "integer constant",
        "a scalar i32 constant",
        partial(_constants, is_wanted=_integer),
        _next_integer,
        "stablehlo.constant",
        lives=itself,
    ),
)
