"""The differences of two aligned sections: one `Change` for each thing that isn't the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from .align import Alignment
from .attribute_diff import WIDTH, rest_differences, shortened
from .change import Change, Kind
from .optext import Block, Op, Value, walk
from .program import Location, Section

WHOLE_WIDTH = 300
"""Characters that an operation of one side only is shown with."""


@dataclass(frozen=True)
class Side:
    """A section and what is needed to say where its operations come from."""

    section: Section
    tree: Block
    locations: Sequence[Location]

    def where(self, op: Op) -> Location | None:
        """The source of an operation, or None where it isn't known.

        JAX places a constant at the function that it was lowered in, so a constant without a
        place of its own takes that of the first operation that reads it.
        """
        own = self._own(op)
        if op.operands or not op.name.endswith(".constant") or _is_precise(own):
            return own
        reader = _first_reader(op)
        return own if reader is None else self._own(reader) or own

    def _own(self, op: Op) -> Location | None:
        lines = self.section.locations
        index = lines[op.line] if op.line < len(lines) else -1
        if not 0 <= index < len(self.locations):
            return None
        found = self.locations[index]
        if found.file is not None and found.file.startswith("<"):
            return Location(None, None, found.scope)  # a frame of Python's own machinery
        return found


def _first_reader(op: Op) -> Op | None:
    """The first operation that reads a result of ``op``, which stands in its block or within it."""
    block = op.parent
    if block is None:
        return None
    for after in islice(block.ops, block.ops.index(op) + 1, None):
        for inner in chain((after,), _below(after)):
            if any(isinstance(v, Value) and v.owner is op for v in inner.operands):
                return inner
    return None


def _below(op: Op) -> Iterator[Op]:
    for region in op.regions:
        for block in region.blocks:
            yield from walk(block)


def _is_precise(where: Location | None) -> bool:
    return where is not None and where.line is not None and "/" in (where.scope or "")


@dataclass(frozen=True)
class SectionDiff:
    """Two sections, aligned.

    ``same_reference(path, a, b)`` says whether two attribute values name the same thing on both
    sides, or a difference that is reported where the thing itself stands.
    """

    a: Side
    b: Side
    alignment: Alignment
    same_reference: Callable[[str, str, str], bool]

    def changes(self) -> Iterator[Change]:
        """Every difference, in the order of the text of the first section, additions last."""
        moved = set(self.alignment.moved)
        reshaped = set(self.alignment.regions)
        pairs = sorted(self.alignment.ops, key=lambda pair: pair[0].line)
        for op_a, op_b in pairs:
            if self._nothing(op_a, op_b) and not moved:
                continue
            if (op_a, op_b) in moved:
                yield self._change("moved", op_a, op_b, "order", "", "")
            yield from self._own(op_a, op_b)
            if (op_a, op_b) in reshaped:
                left, right = (f"blocks {_blocks(op)}" for op in (op_a, op_b))
                yield self._change("blocks", op_a, op_b, "regions", left, right)
            yield from self._block_arguments(op_a, op_b)
        for op in self.alignment.removed:
            yield self._change("removed", op, None, "", _shown(op), "")
        for op in self.alignment.added:
            yield self._change("added", None, op, "", "", _shown(op))

    def _nothing(self, a: Op, b: Op) -> bool:
        """Whether two operations without regions are the same, as nearly all are."""
        if a.rest != b.rest or a.name != b.name or a.regions or b.regions:
            return False
        values: dict[Any, Any] = self.alignment.values  # names of undefined values are asked too
        # A value without counterpart stands for itself: it is in no operation of the other side.
        return [values.get(v, v) for v in a.operands] == b.operands

    def _own(self, a: Op, b: Op) -> Iterator[Change]:
        if a.name != b.name:
            yield self._change("operation", a, b, "", a.name, b.name)
        elif a.name == "text" and a.rest != b.rest:
            yield self._change("text", a, b, "", a.rest, b.rest)
            return
        same_operands = [self._mapped(v) for v in a.operands] == b.operands
        for path, x, y in rest_differences(a.rest, b.rest):
            if path == "type of operands" and same_operands:
                continue  # said where those values are computed
            if not self.same_reference(path, x, y):
                kind: Kind = "attribute"
                if path.startswith("type"):
                    kind = "type"
                elif path == "callee":
                    kind = "callee"
                yield self._change(kind, a, b, path, x, y)
        yield from self._operands(a, b)

    def _operands(self, a: Op, b: Op) -> Iterator[Change]:
        mapped = [self._mapped(v) for v in a.operands]
        if len(mapped) == len(b.operands):
            # Which of several equal constants is read makes no difference worth a line.
            for index, (old, new) in enumerate(zip(a.operands, b.operands, strict=True)):
                if mapped[index] != new and _equal_constants(old, new):
                    mapped[index] = new
        if mapped == b.operands:
            return
        if len(mapped) == len(b.operands) and _permuted(mapped, b.operands):
            order = [mapped.index(v) for v in b.operands]
            what = "operands swapped" if len(order) == 2 else "operands permuted"
            left = ", ".join(_source(v) for v in a.operands)
            right = ", ".join(_source(v) for v in b.operands)
            yield self._change("operands", a, b, what, left, right)
            return
        if len(mapped) != len(b.operands):
            left, right = (f"{len(op.operands)} operands" for op in (a, b))
            places = self._producers([*a.operands, *b.operands])
            yield self._change("operands", a, b, "operand count", left, right, places)
            return
        for index, (x, y) in enumerate(zip(mapped, b.operands, strict=True)):
            if x != y:
                old = a.operands[index]
                left, right = _source(old), _source(y)
                right = f"another {right}" if left == right else right
                places = self._producers([old, y])
                yield self._change("operands", a, b, f"operand {index}", left, right, places)

    def _mapped(self, value: Value | str) -> Value | str | None:
        return self.alignment.values.get(value) if isinstance(value, Value) else value

    def _producers(self, values: Sequence[Value | str]) -> tuple[Location | None, ...]:
        """Where the producers without a counterpart are.

        A use of a value that a removed or added operation computes belongs to that operation's
        change; only a use rewired between values that both programs have is a change of its own.
        """
        found: list[Location | None] = []
        for value in values:
            if isinstance(value, Value) and isinstance(value.owner, Op):
                owner = value.owner
                if owner in self.alignment.lonely:
                    side = self.a if owner in self.alignment.lonely_a else self.b
                    found.append(side.where(owner))
        return tuple(dict.fromkeys(found))

    def _block_arguments(self, a: Op, b: Op) -> Iterator[Change]:
        for r_a, r_b in zip(a.regions, b.regions, strict=False):
            for block_a, block_b in zip(r_a.blocks, r_b.blocks, strict=False):
                left = [v.type for v in block_a.args]
                right = [v.type for v in block_b.args]
                if left != right:
                    old, new = (", ".join(side) or "none" for side in (left, right))
                    yield self._change("type", a, b, "arguments of the body", old, new)

    def _change(
        self,
        kind: Kind,
        a: Op | None,
        b: Op | None,
        detail: str,
        text_a: str,
        text_b: str,
        places: tuple[Location | None, ...] = (),
    ) -> Change:
        op = a or b
        assert op is not None
        where_a = self.a.where(a) if a is not None else None
        where_b = self.b.where(b) if b is not None else None
        side = self.a if a is not None else self.b
        own = [w for o, w in ((a, where_a), (b, where_b)) if o is not None]
        width = WIDTH if a is not None and b is not None else WHOLE_WIDTH
        text_a, text_b = shortened(text_a, text_b, width)
        return Change(
            kind=kind,
            op=op.name,
            detail=detail,
            a=text_a,
            b=text_b,
            section=side.section.label or side.section.name,
            section_kind=side.section.kind,
            path=_path(op),
            where_a=where_a,
            where_b=where_b,
            places=places or tuple(dict.fromkeys(own)),
        )


def _path(op: Op) -> tuple[str, ...]:
    names: list[str] = []
    block = op.parent
    while block is not None and block.parent is not None:
        owner = block.parent.owner
        names.append(owner.name)
        block = owner.parent
    if op.name in ("argument", "result") and op.parent is not None:
        alike = [other for other in op.parent.ops if other.name == op.name]
        names = [f"{op.name} {alike.index(op)}"]
    return tuple(name for name in reversed(names) if name != "func.func")


def _permuted(a: Sequence[object], b: Sequence[object]) -> bool:
    return sorted(map(id, a)) == sorted(map(id, b)) and None not in a


def _equal_constants(a: Value | str, b: Value | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return False
    p, q = a.owner, b.owner
    if not isinstance(p, Op) or not isinstance(q, Op) or p.operands or q.operands:
        return False
    return p.name.endswith(".constant") and (p.name, p.rest) == (q.name, q.rest)


def _source(value: Value | str) -> str:
    """What a value is, without its number: what computes it."""
    if isinstance(value, str):
        return value
    owner = value.owner
    if isinstance(owner, Block):
        name = owner.parent.owner.name if owner.parent is not None else "block"
        return f"argument {value.index} of {name}"
    if owner.name == "argument":
        head = owner.parent.ops[0].line if owner.parent is not None else owner.line
        return f"argument {owner.line - head}"
    return owner.name if len(owner.results) == 1 else f"{owner.name}#{value.index}"


def _shown(op: Op) -> str:
    reads = ", ".join(_source(value) for value in op.operands)
    return op.rest if op.name == "text" else f"{op.name}({reads}){op.rest}"


def _blocks(op: Op) -> list[int]:
    return [len(region.blocks) for region in op.regions]
