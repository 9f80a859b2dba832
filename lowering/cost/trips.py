"""How often an HLO ``while`` runs, read from its condition, its start value and its step.

The compiler's own estimates count a loop's body once and give no trip count. A loop that jax makes
counts an integer up to a constant; anything else is unknown, and stays so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .hlo import Computation, HloModule, Instruction

_TRANSPARENT = ("copy", "bitcast", "copy-start", "copy-done", "convert", "reshape")
_DEPTH = 50


@dataclass(frozen=True)
class _Place:
    """An instruction and the computation it stands in, with the places of that one's parameters."""

    computation: Computation
    instruction: Instruction
    outer: tuple[_Place, ...] | None = None


def trip_count(module: HloModule, where: Computation, loop: Instruction) -> int | None:
    """How often the body of ``loop``, a ``while`` of ``where``, runs; None is unknown."""
    stated = loop.config.get("known_trip_count")
    if isinstance(stated, dict) and str(stated.get("n", "")).isdecimal():
        return int(stated["n"])
    condition = _computation(module, loop, "condition")
    body = _computation(module, loop, "body")
    if condition is None or body is None or len(loop.operands) != 1:
        return None
    test = _resolve(module, _Place(condition, condition.root))
    if test is None or test.instruction.opcode != "compare":
        return None
    left, right = (_operand(module, test, n) for n in (0, 1))
    direction = test.instruction.attributes.get("direction", "")
    if _constant(left) is not None:
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
    counter, limit = _carried(left), _constant(right)
    if counter is None or limit is None:
        return None
    start, step = _start(module, where, loop, counter), _step(module, body, counter)
    if start is None or step is None or step == 0:
        return None
    return _count(start, step, limit, direction)


def _count(start: int, step: int, limit: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
        direction = {"LE": "LT", "GE": "GT"}[direction]
    if direction == "LT" and step > 0:
        return max(0, -(-(limit - start) // step))
    if direction == "GT" and step < 0:
        return max(0, -(-(start - limit) // -step))
    if direction == "NE" and (limit - start) % step == 0 and (limit - start) // step >= 0:
        return (limit - start) // step
    return None


def _computation(module: HloModule, of: Instruction, role: str) -> Computation | None:
    names = of.called.get(role, ())
    return module.computations.get(names[0]) if names else None


def _start(module: HloModule, where: Computation, loop: Instruction, counter: int) -> int | None:
    """The counter's first value: an operand of the tuple that the loop starts with."""
    first = where.instructions.get(loop.operands[0])
    if first is None or first.opcode != "tuple" or counter >= len(first.operands):
        return None
    value = where.instructions.get(first.operands[counter])
    return None if value is None else _constant(_resolve(module, _Place(where, value)))


def _step(module: HloModule, body: Computation, counter: int) -> int | None:
    """What the body adds to the counter."""
    root = body.root
    if root.opcode != "tuple" or counter >= len(root.operands):
        return None
    value = body.instructions.get(root.operands[counter])
    added = None if value is None else _resolve(module, _Place(body, value))
    if added is None or added.instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (_operand(module, added, n) for n in (0, 1))
    if added.instruction.opcode == "add" and _constant(left) is not None:
        left, right = right, left
    amount = _constant(right)
    if amount is None or _carried(left) != counter:
        return None
    return amount if added.instruction.opcode == "add" else -amount


def _operand(module: HloModule, place: _Place, number: int) -> _Place | None:
    operands = place.instruction.operands
    if number >= len(operands):
        return None
    found = place.computation.instructions.get(operands[number])
    return (
        None if found is None else _resolve(module, _Place(place.computation, found, place.outer))
    )


def _resolve(module: HloModule, place: _Place, depth: int = 0) -> _Place | None:
    """The instruction that a value really comes from: through fusions, calls and copies."""
    here = place.instruction
    if depth > _DEPTH:
        return None
    if here.opcode == "parameter" and place.outer is not None:
        number = int(here.literal)
        return place.outer[number] if number < len(place.outer) else None
    if here.opcode in ("fusion", "call"):
        inner = _computation(module, here, "calls" if here.opcode == "fusion" else "to_apply")
        operands = [place.computation.instructions.get(name) for name in here.operands]
        if inner is None or None in operands or inner.root.opcode == "tuple":
            return None
        outer = tuple(
            _resolve(module, _Place(place.computation, o, place.outer), depth + 1)
            for o in operands
            if o is not None
        )
        if None in outer:
            return None
        return _resolve(
            module, _Place(inner, inner.root, tuple(o for o in outer if o is not None)), depth + 1
        )
    if here.opcode in _TRANSPARENT and here.operands:
        source = place.computation.instructions.get(here.operands[0])
        if source is not None and _keeps_value(source, here):
            return _resolve(module, _Place(place.computation, source, place.outer), depth + 1)
    return place


def _keeps_value(source: Instruction, here: Instruction) -> bool:
    """A copy does; a bitcast or convert only between integers of one width."""
    if here.opcode not in ("bitcast", "convert"):
        return True
    before, after = source.shapes[:1], here.shapes[:1]
    return bool(before) and bool(after) and before[0].dtype == after[0].dtype


def _constant(place: _Place | None) -> int | None:
    """The value of a constant integer scalar."""
    if place is None or place.instruction.opcode != "constant":
        return None
    shape = place.instruction.shapes[0]
    if shape.elements != 1 or not re.match(r"^[su]\d+$", shape.dtype):
        return None
    match = re.fullmatch(r"\{?\s*(-?\d+)\s*\}?", place.instruction.literal.strip())
    return int(match[1]) if match else None


def _carried(place: _Place | None) -> int | None:
    """The position of a carried value, where that is what stands here."""
    if place is None or place.instruction.opcode != "get-tuple-element" or place.outer is not None:
        return None
    source = place.computation.instructions.get(place.instruction.operands[0])
    if source is None or source.opcode != "parameter":
        return None
    index = place.instruction.attributes.get("index", "")
    return int(index) if index.isdecimal() else None
