"""Which operation of one program is which of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .optext import Block, Op, Value, walk
from .sequences import Budget, common

_Uses = defaultdict[Value, list[tuple[str, str, int]]]

Opener = Callable[[str], tuple[str, str]]


@dataclass
class Alignment:
    """The counterpart of every operation and value of one tree in another."""

    ops: list[tuple[Op, Op]] = field(default_factory=list)
    removed: list[Op] = field(default_factory=list)
    added: list[Op] = field(default_factory=list)
    moved: list[tuple[Op, Op]] = field(default_factory=list)
    """Also in ``ops``: alike, but at another place among their neighbours."""
    regions: list[tuple[Op, Op]] = field(default_factory=list)
    """Pairs whose regions have another number of blocks."""
    values: dict[Value, Value] = field(default_factory=dict)
    lonely: set[Op] = field(default_factory=set)
    """Every operation below ``removed`` and ``added``, and those themselves."""
    lonely_a: set[Op] = field(default_factory=set)
    """Those of the first program."""


class Aligner:
    """Aligns two trees, block by block, outer ones first.

    ``opened`` maps, for each side, what follows an operation's operands to two forms: one in which
    references to other sections compare by what those hold, and one by what they are called.
    """

    def __init__(self, opened: tuple[Opener, Opener], budget: Budget) -> None:
        self._open = opened
        self._opened: tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]] = ({}, {})
        self._uses: dict[int, _Uses] = {}
        self._tops: tuple[Block, Block] = (Block(), Block())
        self._budget = budget
        self._deep: tuple[dict[Value, int], dict[Value, int]] = ({}, {})
        self._keys: tuple[dict[Op, tuple[int, int]], dict[Op, tuple[int, int]]] = ({}, {})

    def align(self, a: Block, b: Block) -> Alignment:
        """The alignment of everything below ``a`` and ``b``."""
        self._tops = (a, b)
        for side, top in enumerate((a, b)):
            self._number(side, top)
        result = Alignment()
        pending = [(a, b)]
        while pending:
            pending.extend(self._blocks(*pending.pop(), result))
        result.lonely_a = set(_with_inner(result.removed))
        result.lonely = result.lonely_a | set(_with_inner(result.added))
        return result

    def _forms(self, side: int, rest: str) -> tuple[str, str]:
        """What follows the operands, with references by what they hold and by their labels."""
        opened = self._opened[side]
        found = opened.get(rest)
        if found is None:
            found = opened[rest] = self._open[side](rest)
        return found

    def _number(self, side: int, block: Block) -> list[tuple[int, int]]:
        """Keys of each operation: with, and without, what its operands compute."""
        deep, keys = self._deep[side], self._keys[side]
        found: list[tuple[int, int]] = []
        for op in block.ops:
            rest = self._forms(side, op.rest)[0]
            inner: list[tuple[int, int]] = []
            for r, region in enumerate(op.regions):
                for n, child in enumerate(region.blocks):
                    for arg in child.args:
                        deep[arg] = hash(("argument", op.name, r, n, arg.index, arg.type))
                    inner.extend(self._number(side, child))
            # A name that isn't defined in the text stands for itself.
            reads = tuple([v if isinstance(v, str) else deep.get(v, 0) for v in op.operands])
            local = hash((op.name, rest, len(reads), tuple([k for _, k in inner])))
            whole = hash((local, reads, tuple([k for k, _ in inner])) if inner else (local, reads))
            if op.name == "argument":
                whole = hash((whole, self._arguments(op)))
            for result in op.results:
                deep[result] = hash((whole, result.index))
            keys[op] = both = (whole, local)
            found.append(both)
        return found

    def _arguments(self, op: Op) -> int:
        """The position of a function's argument: two of one type are two different inputs."""
        head = op.parent.ops[0].line if op.parent is not None and op.parent.ops else op.line
        return op.line - head

    def _blocks(self, a: Block, b: Block, out: Alignment) -> list[tuple[Block, Block]]:
        keys_a, keys_b = self._keys
        pairs = self._rounds(
            a.ops,
            b.ops,
            (
                lambda op, side: (keys_a, keys_b)[side][op][0],
                lambda op, side: (keys_a, keys_b)[side][op][1],
                lambda op, side: (op.name, self._forms(side, op.rest)[1]),
                lambda op, side: (op.name, _regions_shape(op)),
                lambda op, side: op.name,
                lambda op, side: (_outcome(op.rest), len(op.operands), bool(op.regions)),
            ),
        )
        aligned = [(a.ops[i], b.ops[j]) for i, j in pairs]
        moved: list[tuple[Op, Op]] = []
        if not len(aligned) == len(a.ops) == len(b.ops):
            moved = self._elsewhere(a, b, aligned, out)
            aligned = sorted((*aligned, *moved), key=lambda pair: pair[0].line)
        deeper: list[tuple[Block, Block]] = []
        for op_a, op_b in aligned:
            out.ops.append((op_a, op_b))
            deeper.extend(self._into(op_a, op_b, out))
        return deeper

    def _elsewhere(
        self, a: Block, b: Block, aligned: Sequence[tuple[Op, Op]], out: Alignment
    ) -> list[tuple[Op, Op]]:
        """Pairs what was left over but stands elsewhere; the rest is removed and added."""
        matched = {op for pair in aligned for op in pair}
        left = [op for op in a.ops if op not in matched]
        right = [op for op in b.ops if op not in matched]
        moved = self._read_alike(aligned, set(left), set(right)) if left and right else []
        gone = {op for pair in moved for op in pair}
        moved += self._alike(
            [x for x in left if x not in gone], [x for x in right if x not in gone]
        )
        out.moved.extend(moved)
        gone = {op for pair in moved for op in pair}
        out.removed.extend(op for op in left if op not in gone)
        out.added.extend(op for op in right if op not in gone)
        return moved

    def _into(self, a: Op, b: Op, out: Alignment) -> list[tuple[Block, Block]]:
        """Pairs results and block arguments of two operations; returns the pairs of blocks."""
        if not (a.regions or b.regions) and len(a.operands) == len(b.operands):
            out.values.update(zip(a.results, b.results, strict=False))
            return []
        if _shape(a) != _shape(b):
            out.regions.append((a, b))
        operands = None
        if len(a.operands) != len(b.operands):
            operands = self._operand_pairs(a, b)
        _pair_values(a.results, b.results, operands, (a, b), out)
        deeper: list[tuple[Block, Block]] = []
        for region_a, region_b in zip(a.regions, b.regions, strict=False):
            for block_a, block_b in zip(region_a.blocks, region_b.blocks, strict=False):
                _pair_values(block_a.args, block_b.args, operands, (a, b), out)
                deeper.append((block_a, block_b))
        return deeper

    def _operand_pairs(self, a: Op, b: Op) -> list[tuple[int, int]]:
        """Which operand is which where their number differs, as in a loop that carries less.

        Loops carry many equal constants, so what reads a carried value counts before what it is.
        """
        found: list[tuple[int, int]] = []
        for what in ((True, True), (True, False), (False, True)):
            keys = [self._carried(side, op, *what) for side, op in enumerate((a, b))]
            edges = [(-1, -1), *sorted(found), (len(a.operands), len(b.operands))]
            for (i, j), (k, m) in pairwise(edges):
                pairs = common(keys[0][i + 1 : k], keys[1][j + 1 : m], self._budget)
                found.extend((i + 1 + x, j + 1 + y) for x, y in pairs)
        return sorted(found)

    def _carried(self, side: int, op: Op, by_use: bool, by_value: bool) -> list[Hashable]:
        """For each operand a key: what reads it inside, and what it is."""
        blocks = [block for region in op.regions for block in region.blocks]
        keys: list[Hashable] = []
        for index, value in enumerate(op.operands):
            inside = [block.args[index] for block in blocks if index < len(block.args)]
            uses = [self._uses_of(side, arg) for arg in inside] if by_use else []
            what = value if isinstance(value, str) else self._deep[side].get(value, 0)
            keys.append((tuple(uses), what if by_value else None))
        return keys

    def _uses_of(self, side: int, value: Value) -> tuple[tuple[str, str, int], ...]:
        """What reads a value, and as which operand."""
        if side not in self._uses:
            uses = self._uses[side] = defaultdict(list)
            for op in walk(self._tops[side]):
                for index, read in enumerate(op.operands):
                    if isinstance(read, Value):
                        uses[read].append((op.name, self._forms(side, op.rest)[1], index))
        return tuple(self._uses[side].get(value, ()))

    def _rounds(
        self, a: list[Op], b: list[Op], keys: Sequence[Callable[[Op, int], Hashable]]
    ) -> list[tuple[int, int]]:
        """Pairs by the first key; what lies between them by the second, and so on."""
        pairs: list[tuple[int, int]] = []
        for key in keys:
            if len(pairs) == min(len(a), len(b)):
                break  # one side has nothing left
            edges = [(-1, -1), *sorted(pairs), (len(a), len(b))]
            for (i, j), (k, m) in pairwise(edges):
                if k - i > 1 and m - j > 1:
                    left = [key(op, 0) for op in a[i + 1 : k]]
                    right = [key(op, 1) for op in b[j + 1 : m]]
                    found = common(left, right, self._budget)
                    pairs.extend((i + 1 + x, j + 1 + y) for x, y in found)
        return sorted(pairs)

    def _read_alike(
        self, aligned: Sequence[tuple[Op, Op]], left: set[Op], right: set[Op]
    ) -> list[tuple[Op, Op]]:
        """Pairs operations that stand elsewhere but are read at the same place by counterparts."""
        found: list[tuple[Op, Op]] = []
        pending = list(aligned)
        while pending:
            op_a, op_b = pending.pop()
            for x, y in zip(op_a.operands, op_b.operands, strict=False):
                if isinstance(x, str) or isinstance(y, str) or x.index != y.index:
                    continue
                p, q = x.owner, y.owner
                if not isinstance(p, Op) or not isinstance(q, Op):
                    continue
                if p in left and q in right and self._loose_key(0, p) == self._loose_key(1, q):
                    left.discard(p)
                    right.discard(q)
                    found.append((p, q))
                    pending.append((p, q))
        return found

    def _loose_key(self, side: int, op: Op) -> Hashable:
        return op.name, self._forms(side, op.rest)[1], len(op.operands)

    def _alike(self, left: list[Op], right: list[Op]) -> list[tuple[Op, Op]]:
        """Pairs of what is left that compute the same, or at least look the same."""
        pairs: list[tuple[Op, Op]] = []
        for which in (0, 1):
            by_key: defaultdict[int, list[Op]] = defaultdict(list)
            taken = {op for pair in pairs for op in pair}
            for op in right:
                if op not in taken:
                    by_key[self._keys[1][op][which]].append(op)
            for op in left:
                same = by_key.get(self._keys[0][op][which])
                if op not in taken and same:
                    pairs.append((op, same.pop(0)))
        return pairs


def _pair_values(
    a: Sequence[Value],
    b: Sequence[Value],
    operands: Sequence[tuple[int, int]] | None,
    ops: tuple[Op, Op],
    out: Alignment,
) -> None:
    """By position; where values follow the operands, by which operand is which."""
    counts = (len(ops[0].operands), len(ops[1].operands))
    if operands is None or (len(a), len(b)) != counts:
        out.values.update(zip(a, b, strict=False))
    else:
        out.values.update((a[i], b[j]) for i, j in operands)


def _with_inner(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        for region in op.regions:
            for block in region.blocks:
                yield from walk(block)


def _shape(op: Op) -> list[int]:
    return [len(region.blocks) for region in op.regions]


def _regions_shape(op: Op) -> tuple[int, ...]:
    return tuple(len(block.ops) for region in op.regions for block in region.blocks)


def _outcome(rest: str) -> str:
    """The result types of an operation: what follows the last arrow at the end of its line."""
    return rest.rpartition(" -> ")[2]
