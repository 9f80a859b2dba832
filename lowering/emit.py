"""Numbered regions back to operations."""

from __future__ import annotations

from .ir import Block, Module, Op
from .schedule import Node, Region


class Emitter:
    """Numbered regions back to operations with values of their own."""

    def __init__(self, module: Module, types: list[str]) -> None:
        self._module = module
        self._types = types
        self._values: dict[int, int] = {}
        self.placed: dict[int, int] = {}
        """How often each node was placed, by its identity."""

    def block(self, region: Region) -> Block:
        """One block: arguments, the nodes in order, the terminator."""
        block = Block([self._define(number) for number in region.args])
        for node in region.order:
            self.placed[id(node)] = self.placed.get(id(node), 0) + 1
            block.ops.append(self._op(node))
        last = region.last
        operands = [self._values[number] for number in region.roots]
        block.ops.append(Op(last.name, operands, [], last.attrs, last.loc, last.frontend))
        return block

    def _define(self, number: int) -> int:
        value = self._values[number] = self._module.new_value(self._types[number])
        return value

    def _op(self, node: Node) -> Op:
        op = node.op
        operands = [self._values[number] for number in node.operands]
        regions = [[self.block(region)] for region in node.regions]
        return Op(
            op.name,
            operands,
            [self._define(number) for number in node.results],
            op.attrs,
            op.loc,
            op.frontend,
            regions,
            [],
            op.callee,
            op.kernel,
            op.pure_call,
            op.signature,
        )
