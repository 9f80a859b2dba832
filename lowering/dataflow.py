"""Level ``dataflow``: programs that differ only in where equal values are computed become one.

Every value gets a number that says what it is: an argument of the region at some depth, a result of
an effect, or an operation on other numbers. So equal computations get equal numbers wherever they
stand. A pure operation is then placed in the outermost region whose values it needs, when the first
reader needs it; one that nothing reads has no place. A value that a loop carries around unchanged
has the number of its initial value, and is carried no more.

What keeps this from calling different programs equal:

- only what `purity` lists moves; everything else is an effect, keeps its region and its order, and
  its results are equal to nothing else;
- a region that holds an effect makes its operation one;
- a loop is pure only if it visibly ends (a counter stepped by one up to a bound that stays);
- loops and branches stay in their region; they merge with equal ones of the same region only;
- nothing leaves a ``sdy.manual_computation`` or the region of an operation that isn't understood:
  there values mean something else, or may;
- operands, results, arguments and carried values keep their order; nothing is simplified.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import purity
from .emit import Emitter
from .ir import Block, Function, Module, Op, walk
from .ledger import Ledger
from .loops import Waits, ends, inside
from .merge import merge_functions
from .schedule import Node, Region, schedule

_CLOSED = 1_000_000
"""Depth of regions that see nothing outside: far from any real one, so it never tells where."""


def numbered(module: Module, ledger: Ledger) -> Module:
    """A new module with every function renumbered and equal private functions merged."""
    functions: dict[str, Function] = {}
    for key, function in module.functions.items():
        functions[key] = function
        if _is_structured(function.blocks):
            functions[key] = _Numbering(module, ledger).function(function)
    renumbered = Module(module.attrs, module.meshes, functions, module.types)
    merge_functions(renumbered, ledger)
    return renumbered


def _is_structured(blocks: list[Block]) -> bool:
    """One block a region, everywhere."""
    if len(blocks) != 1:
        return False
    return all(len(region) == 1 for op in walk(blocks) for region in op.regions)


@dataclass
class _Scope:
    """The region being numbered: its depth, the least depth a value in it may have, its effects."""

    depth: int
    floor: int
    effects: list[Node] = field(default_factory=list)


class _Numbering:
    def __init__(self, module: Module, ledger: Ledger) -> None:
        self._module = module
        self._ledger = ledger
        self._table: dict[object, Node] = {}
        self._arguments: dict[tuple[int, int, str], int] = {}
        self._levels: list[int] = []
        self._types: list[str] = []
        self._makers: list[Node | None] = []
        self._numbers: dict[int, int] = {}
        self._node_of_op: dict[int, Node] = {}
        self._invariants: dict[int, int] = {}
        self._contents: dict[int, int] = {}
        self._distinct: dict[tuple[tuple[str, str], ...], int] = {}

    def function(self, function: Function) -> Function:
        block = function.blocks[0]
        types = [self._module.types[arg] for arg in block.args]
        args = [self._argument(0, index, text) for index, text in enumerate(types)]
        self._numbers.update(zip(block.args, args, strict=True))
        region = self._region(block, args, _Scope(0, 0), None)
        emitter = Emitter(self._module, self._types)
        blocks = [emitter.block(region)]
        self._count(emitter)
        return replace(function, blocks=blocks)

    def _count(self, emitter: Emitter) -> None:
        uses: dict[int, int] = {}
        for node in self._node_of_op.values():
            uses[id(node)] = uses.get(id(node), 0) + 1
        placed = emitter.placed
        self._ledger.add("dead-value", sum(n for key, n in uses.items() if key not in placed))
        merged = sum(max(0, n - placed[key]) for key, n in uses.items() if key in placed)
        self._ledger.add("equal-value", merged)
        self._ledger.add("loop-invariant", sum(self._invariants.values()))

    def _value(self, type_text: str, level: int, maker: Node | None) -> int:
        self._types.append(type_text)
        self._levels.append(level)
        self._makers.append(maker)
        return len(self._types) - 1

    def _argument(self, depth: int, index: int, type_text: str) -> int:
        key = (depth, index, type_text)
        if key not in self._arguments:
            self._arguments[key] = self._value(type_text, depth, None)
        return self._arguments[key]

    def _region(
        self, block: Block, args: list[int], scope: _Scope, keep: list[int] | None
    ) -> Region:
        """Numbers a block; ``keep`` selects operands of its terminator, None all."""
        *body, last = block.ops
        for op in body:
            self._op(op, scope)
        wanted = last.operands if keep is None else [last.operands[i] for i in keep]
        roots = [self._numbers[value] for value in wanted]
        return schedule(args, scope.effects, last, roots, scope.depth, self._levels, self._makers)

    def _op(self, op: Op, scope: _Scope) -> None:
        if purity.is_loop(op) and len(op.regions) == 2:
            self._loop(op, scope)
            return
        operands = [self._numbers[value] for value in op.operands]
        if purity.is_pure_leaf(op):
            level = max([scope.floor, *(self._levels[value] for value in operands)])
            self._pure(op, operands, [], level, scope)
        elif purity.applies_regions(op) and self._is_closed(op):
            inner = max(_CLOSED, scope.depth + 1)
            regions = [self._enter(region, inner, inner) for region in op.regions]
            if any(region.effects for region in regions):
                self._effect(op, operands, regions, scope)
                return
            level = max([scope.floor, *(self._levels[value] for value in operands)])
            self._pure(op, operands, regions, level, scope)
        elif purity.is_branch(op):
            regions = [self._enter(r, scope.depth + 1, scope.floor) for r in op.regions]
            if any(region.effects for region in regions):
                self._effect(op, operands, regions, scope)
            else:
                self._pure(op, operands, regions, scope.depth, scope)
        else:
            depth = scope.depth + 1
            regions = [self._enter(region, depth, depth) for region in op.regions]
            self._effect(op, operands, regions, scope)

    def _is_closed(self, op: Op) -> bool:
        """Whether the regions read nothing defined outside them."""
        defined: set[int] = set()
        used: set[int] = set()
        pending = list(op.regions)
        while pending:
            for block in pending.pop():
                defined.update(block.args)
                for inner in block.ops:
                    defined.update(inner.results)
                    used.update(inner.operands)
                    pending.extend(inner.regions)
        return used <= defined

    def _enter(self, region: list[Block], depth: int, floor: int) -> Region:
        block = region[0]
        types = (self._module.types[arg] for arg in block.args)
        args = [self._argument(depth, index, text) for index, text in enumerate(types)]
        self._numbers.update(zip(block.args, args, strict=True))
        return self._region(block, args, _Scope(depth, floor), None)

    def _pure(
        self, op: Op, operands: list[int], regions: list[Region], level: int, scope: _Scope
    ) -> None:
        key = (
            op.name,
            self._content(op.attrs),
            self._content(op.frontend),
            tuple(operands),
            tuple([self._module.types[value] for value in op.results]),
            tuple([region.key() for region in regions]),
            level if regions else scope.floor,
        )
        node = self._table.get(key)
        if node is None:
            node = self._table[key] = self._node(op, operands, regions, level)
        self._finish(op, node)

    def _content(self, attrs: dict[str, str]) -> int:
        """A number that is the same for equal attributes, most of which are one object."""
        found = self._contents.get(id(attrs))
        if found is None:
            items = tuple(attrs.items())
            found = self._distinct.setdefault(items, len(self._distinct))
            self._contents[id(attrs)] = found
        return found

    def _effect(self, op: Op, operands: list[int], regions: list[Region], scope: _Scope) -> None:
        node = self._node(op, operands, regions, scope.depth)
        scope.effects.append(node)
        self._finish(op, node)

    def _node(self, op: Op, operands: list[int], regions: list[Region], level: int) -> Node:
        node = Node(op, operands, regions, level)
        node.results = [self._value(self._module.types[value], level, node) for value in op.results]
        return node

    def _finish(self, op: Op, node: Node) -> None:
        self._node_of_op[id(op)] = node
        self._numbers.update(zip(op.results, node.results, strict=True))

    def _loop(self, op: Op, scope: _Scope) -> None:
        inits = [self._numbers[value] for value in op.operands]
        body = op.regions[1][0]
        passed = body.ops[-1].operands
        # An attribute may speak of the carried values by position, so then all of them stay.
        all_stay = bool(op.attrs)
        invariant = {i for i, arg in enumerate(body.args) if passed[i] == arg and not all_stay}
        if not all_stay:
            self._settle(body, inits, invariant, _Scope(scope.depth + 1, scope.floor))
        while True:
            keep = [i for i in range(len(inits)) if i not in invariant]
            cond, step = self._loop_regions(op, inits, keep, scope)
            # Carried unchanged, or set in each round to the very value it began with.
            found = {
                i
                for i, root in zip(keep, step.roots, strict=True)
                if root in (self._numbers[body.args[i]], inits[i])
            }
            if not found or all_stay:
                break
            invariant |= found
        self._invariants[id(op)] = len(invariant)
        carried = Op(
            op.name,
            [op.operands[i] for i in keep],
            [op.results[i] for i in keep],
            op.attrs,
            op.loc,
            op.frontend,
        )
        operands = [inits[i] for i in keep]
        for i in invariant:
            self._numbers[op.results[i]] = inits[i]
        if cond.effects or step.effects or not self._is_finite(cond, step, scope):
            self._effect(carried, operands, [cond, step], scope)
        else:
            self._pure(carried, operands, [cond, step], scope.depth, scope)
        self._node_of_op[id(op)] = self._node_of_op.pop(id(carried))

    def _settle(self, body: Block, inits: list[int], invariant: set[int], scope: _Scope) -> None:
        """Adds the carried values that follow from those that are known not to change.

        One may follow from another in a long chain, so what reads only settled values is numbered
        as soon as it does, once, instead of the whole body once for each link of the chain. What
        this leaves out is found by numbering the body again.
        """
        *ops, last = body.ops
        waits = Waits(ops, [*body.args, *(value for op in ops for value in op.results)])
        carried: dict[int, list[int]] = {}
        for i, value in enumerate(last.operands):
            carried.setdefault(value, []).append(i)
        for i in invariant:
            self._numbers[body.args[i]] = inits[i]
        settled = [body.args[i] for i in invariant]
        settled.extend(value for value in carried if value not in waits.inside)
        ready = waits.free
        while settled or ready:
            while ready:
                op = ready.pop()
                if self._may_settle(op):
                    self._op(op, scope)
                    settled.extend(op.results)
            if settled:
                value = settled.pop()
                for i in carried.get(value, ()):
                    if i not in invariant and self._numbers[value] == inits[i]:
                        invariant.add(i)
                        self._numbers[body.args[i]] = inits[i]
                        settled.append(body.args[i])
                ready.extend(waits.settle(value))

    def _may_settle(self, op: Op) -> bool:
        """Whether a number can be given to what an operation computes, apart from its region."""
        if purity.is_pure_leaf(op):
            return True
        # A region with an effect in it is for the numbering of the whole body.
        return (
            purity.applies_regions(op)
            and self._is_closed(op)
            and all(purity.is_pure_leaf(inner) for inner in inside(op))
        )

    def _loop_regions(
        self, op: Op, inits: list[int], keep: list[int], scope: _Scope
    ) -> tuple[Region, Region]:
        depth = scope.depth + 1
        regions = []
        for which, blocks in enumerate(op.regions):
            block = blocks[0]
            self._numbers.update(zip(block.args, inits, strict=True))
            args = []
            for position, i in enumerate(keep):
                number = self._argument(depth, position, self._module.types[block.args[i]])
                self._numbers[block.args[i]] = number
                args.append(number)
            inner = _Scope(depth, scope.floor)
            regions.append(self._region(block, args, inner, keep if which == 1 else None))
        return regions[0], regions[1]

    def _is_finite(self, cond: Region, step: Region, scope: _Scope) -> bool:
        return ends(cond, step, scope.depth + 1, self._levels, self._makers)
