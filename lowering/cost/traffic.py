"""HBM bytes that an instruction moves at least, and the FLOPs of its matrix products."""

from __future__ import annotations

from .hlo import Computation, HloModule, Instruction
from .shapes import HBM, Shape

_READS_PART = ("slice", "dynamic-slice", "gather")
_TRANSPARENT = ("bitcast", "reshape", "copy")


def hbm_bytes(module: HloModule, where: Computation, op: Instruction) -> int:
    """Bytes that ``op`` reads from and writes to HBM at least, without its layout's padding.

    A value in another memory counts nothing. Where only a part of an operand is read (a slice, a
    gather), or an operand is updated in place, that part counts, as far as it can be read off.
    """
    operands = [where.instructions.get(name) for name in op.operands]
    inner = _fused(module, op)
    if op.opcode in ("while", "conditional", "call"):
        return 0
    total = 0
    for number, operand in enumerate(operands):
        if operand is None:
            continue
        shape = _only(operand.shapes)
        if shape is not None and shape.space == HBM:
            total += min(shape.bytes, _read(op, inner, number, shape))
    return total + _written(op, inner)


def _fused(module: HloModule, op: Instruction) -> Computation | None:
    names = op.called.get("calls", ())
    return module.computations.get(names[0]) if op.opcode == "fusion" and names else None


def _only(shapes: tuple[Shape, ...]) -> Shape | None:
    return shapes[0] if len(shapes) == 1 else None


def _read(op: Instruction, inner: Computation | None, number: int, shape: Shape) -> int:
    if inner is None:
        return _read_by(op, number, shape)
    parameter = inner.parameter(number)
    return shape.bytes if parameter is None else _read_inside(inner, parameter, shape, 0)


def _read_inside(inner: Computation, value: Instruction, shape: Shape, depth: int) -> int:
    """What a fusion reads of one parameter: the sum of what its users read."""
    if depth > 20 or value.is_root:
        return shape.bytes
    total = 0
    for user in inner.users(value.name):
        if user.opcode in _TRANSPARENT:
            total += _read_inside(inner, user, shape, depth + 1)
        else:
            total += sum(
                _read_by(user, n, shape)
                for n, name in enumerate(user.operands)
                if name == value.name
            )
    return total


def _read_by(user: Instruction, number: int, shape: Shape) -> int:
    if user.opcode in _READS_PART and number == 0:
        return sum(s.bytes for s in user.shapes)
    if user.opcode in ("dynamic-update-slice", "scatter") and number == 0:
        return 0  # updated in place
    return shape.bytes


def _written(op: Instruction, inner: Computation | None) -> int:
    root = op if inner is None else _through(inner, inner.root)
    source = inner.instructions if inner is not None else None
    if root.opcode == "dynamic-update-slice" and source is not None and len(root.operands) > 1:
        update = source.get(root.operands[1])
        if update is not None and all(s.space == HBM for s in op.shapes):
            return sum(s.bytes for s in update.shapes)
    return sum(s.bytes for s in op.shapes if s.space == HBM)


def _through(inner: Computation, value: Instruction) -> Instruction:
    for _ in range(20):
        if value.opcode not in _TRANSPARENT or not value.operands:
            break
        source = inner.instructions.get(value.operands[0])
        if source is None:
            break
        value = source
    return value
