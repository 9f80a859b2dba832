"""Private calls replaced by the callee's operations.

MLIR's own inliner leaves these calls alone and canonicalises besides, so this one only copies:
the callee's operations, with arguments replaced by operands, stand where the call stood.

A call stays where inlining might lose something: the callee is recursive, has several blocks or no
body, the function, an argument or a result carries an attribute, the call carries one other than
frontend attributes, or a frontend attribute of the call would meet another value of the same name.
Kept calls are compared as they are; they can make two programs differ, never seem equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .ir import Block, Function, Module, Op, walk
from .ledger import Ledger
from .locations import LocationTable

MAX_OPERATIONS = 1_000_000


class TooLarge(Exception):
    """The inlined program would exceed `MAX_OPERATIONS`."""


@dataclass(frozen=True)
class _Site:
    """Where operations are copied to: what the calls around them say."""

    stack: tuple[str, ...]
    """The functions being copied, outermost first."""
    frontend: dict[str, str]
    """Frontend attributes of the calls."""
    loc: int = -1
    """Location of the innermost call, its scope composed with the outer calls'."""


def inlined(module: Module, ledger: Ledger, locations: LocationTable) -> Module:
    """A new module with calls inlined and unused private functions dropped.

    An inlined operation's name scope begins with that of the call.

    Raises:
        TooLarge: the result would hold more than `MAX_OPERATIONS` operations.
    """
    inliner = _Inliner(module, ledger, locations)
    roots = [f for f in module.functions.values() if f.public]
    kept: dict[str, Function] = {}
    pending = [f.key for f in roots]
    while pending:
        key = pending.pop(0)
        if key in kept:
            continue
        function = module.functions[key]
        blocks = inliner.copy(function.blocks, {}, _Site((key,), {}))
        kept[key] = replace(function, blocks=blocks)
        pending.extend(_referenced(blocks, module))
    ledger.add("function-dropped", len(module.functions) - len(kept))
    return Module(module.attrs, module.meshes, kept, module.types)


def _referenced(blocks: list[Block], module: Module) -> list[str]:
    """Functions that the operations name, by a call or inside an attribute."""
    found: list[str] = []
    for op in walk(blocks):
        if op.callee is not None:
            found.append(op.callee)
        for text in op.attrs.values():
            if "\0func\0" in text:
                found.extend(part.split("\0")[0] for part in text.split("\0func\0")[1:])
    return [key for key in found if key in module.functions]


class _Inliner:
    def __init__(self, module: Module, ledger: Ledger, locations: LocationTable) -> None:
        self._module = module
        self._ledger = ledger
        self._locations = locations
        self._count = 0
        self._inlinable: dict[str, bool] = {}

    def copy(self, blocks: list[Block], values: dict[int, int], site: _Site) -> list[Block]:
        """A copy with fresh values; ``values`` maps those of the original and is extended."""
        copied: list[Block] = []
        for block in blocks:
            args = [self._fresh(arg, values) for arg in block.args]
            copied.append(Block(args))
        for block, target in zip(blocks, copied, strict=True):
            self._copy_ops(block.ops, target.ops, values, site)
        return copied

    def _fresh(self, value: int, values: dict[int, int]) -> int:
        found = values.get(value)
        if found is None:
            found = values[value] = self._module.new_value(self._module.types[value])
        return found

    def _copy_ops(
        self, ops: list[Op], target: list[Op], values: dict[int, int], site: _Site
    ) -> None:
        for op in ops:
            # A region's terminator is no instruction of the compiler's, and carries none.
            is_end = op.name.endswith(".return")
            merged = op.frontend
            if site.frontend and not is_end:
                merged = dict(sorted({**site.frontend, **op.frontend}.items()))
            loc = op.loc if site.loc < 0 else self._locations.under(site.loc, op.loc)
            if op.callee is not None and self._may_inline(op, merged, site.stack):
                self._inline(op, target, values, _Site(site.stack, merged, loc))
                continue
            if op.callee is not None:
                self._ledger.add("call-kept")
            self._count += 1
            if self._count > MAX_OPERATIONS:
                raise TooLarge
            try:
                operands = [values[value] for value in op.operands]
            except KeyError:  # in a region of several blocks, read before it is defined
                operands = [self._fresh(value, values) for value in op.operands]
            regions = [self.copy(region, values, site) for region in op.regions]
            results = [self._fresh(value, values) for value in op.results]
            target.append(
                Op(
                    op.name,
                    operands,
                    results,
                    op.attrs,
                    loc,
                    merged,
                    regions,
                    op.successors,
                    op.callee,
                    op.kernel,
                    op.pure_call,
                    op.signature,
                )
            )

    def _inline(self, call: Op, target: list[Op], values: dict[int, int], site: _Site) -> None:
        self._ledger.add("call-inlined")
        assert call.callee is not None
        entry = self._module.functions[call.callee].blocks[0]
        inner = {
            arg: self._fresh(value, values)
            for arg, value in zip(entry.args, call.operands, strict=True)
        }
        *body, terminator = entry.ops
        inside = _Site((*site.stack, call.callee), site.frontend, site.loc)
        self._copy_ops(body, target, inner, inside)
        for result, value in zip(call.results, terminator.operands, strict=True):
            values[result] = self._fresh(value, inner)

    def _may_inline(self, op: Op, frontend: dict[str, str], stack: tuple[str, ...]) -> bool:
        if op.callee is None or op.attrs or op.callee in stack:
            return False
        if op.callee not in self._module.functions:
            return False
        function = self._module.functions[op.callee]
        if op.callee not in self._inlinable:
            self._inlinable[op.callee] = _is_plain(function)
        return self._inlinable[op.callee] and not _conflicts(function, frontend)


def _is_plain(function: Function) -> bool:
    if function.public or function.attrs or len(function.blocks) != 1:
        return False
    if any(function.arg_attrs) or any(function.result_attrs):
        return False
    last = function.blocks[0].ops[-1]
    return last.name == "func.return" and not last.attrs


def _conflicts(function: Function, frontend: dict[str, str]) -> bool:
    """Whether an operation of the body has another value for one of these frontend attributes."""
    if not frontend:
        return False
    return any(
        op.frontend.get(name, text) != text
        for op in walk(function.blocks)
        for name, text in frontend.items()
    )
