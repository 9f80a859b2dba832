"""Mutants of single operations: their operands, their attributes, their types."""

from __future__ import annotations

import re
from typing import Any

from ...compat.mlir import ir
from .draft import Draft
from .edits import having, named, one_of, rewrite
from .mutant import Mutant, itself

_TURNED = {"LT": "LE", "LE": "LT", "GT": "GE", "GE": "GT", "EQ": "NE", "NE": "EQ"}


def _swappable(draft: Draft) -> list[Any]:
    return [op for op in named("stablehlo.subtract")(draft) if op.operands[0] != op.operands[1]]


def _swap_operands(draft: Draft, op: Any) -> None:
    first, second = op.operands
    op.operands[0], op.operands[1] = second, first


def _turn_comparison(text: str) -> str:
    return re.sub(r"direction (\w+)>", lambda m: f"direction {_TURNED[m[1]]}>", text)


def _other_precision(text: str) -> str:
    return text.replace("DEFAULT", "HIGHEST") if "DEFAULT" in text else text.replace(
        "HIGHEST", "DEFAULT"
    )  # fmt: skip


def _mixed_dots(draft: Draft) -> list[Any]:
    return [
        op
        for op in named("stablehlo.dot_general")(draft)
        if "xbf16>" in str(op.operands[0].type) and "xf32>" in str(op.results[0].type)
    ]


def _narrow_accumulation(draft: Draft, op: Any) -> None:
    old = op.results[0]
    narrow = ir.Type.parse(str(old.type).replace("xf32>", "xbf16>"))
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op), op.location:
        dot = ir.Operation.create(op.name, [narrow], list(op.operands), attributes)
        wide = ir.Operation.create("stablehlo.convert", [old.type], [dot.results[0]])
    old.replace_all_uses_with(wide.results[0])
    op.erase()


def _remove_barrier(draft: Draft, op: Any) -> None:
    for result, operand in zip(op.results, list(op.operands), strict=True):
        result.replace_all_uses_with(operand)
    op.erase()


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "operands of a subtract swapped",
        "a subtraction of two values",
        _swappable,
        _swap_operands,
        "stablehlo.subtract",
        lives=itself,
    ),
    Mutant(
        "compare direction",
        "a comparison",
        named("stablehlo.compare"),
        rewrite("comparison_direction", _turn_comparison),
        "stablehlo.compare",
        lives=itself,
    ),
    Mutant(
        "precision",
        "a dot with a precision",
        having(named("stablehlo.dot_general"), "precision_config"),
        rewrite("precision_config", _other_precision),
        "stablehlo.dot_general",
        lives=itself,
    ),
    Mutant(
        "accumulation dtype",
        "a dot of bf16 that accumulates in f32",
        _mixed_dots,
        _narrow_accumulation,
        "stablehlo.dot_general",
        lives=itself,
    ),
    Mutant(
        "optimization_barrier removed",
        "an optimization_barrier",
        lambda draft: draft.ops("stablehlo.optimization_barrier"),
        _remove_barrier,
        "stablehlo.optimization_barrier",
    ),
    Mutant(
        "rng algorithm",
        "an rng_bit_generator",
        named("stablehlo.rng_bit_generator"),
        rewrite("rng_algorithm", one_of(("DEFAULT", "THREE_FRY"), ("THREE_FRY", "PHILOX"))),
        "stablehlo.rng_bit_generator",
        lives=itself,
    ),
)
