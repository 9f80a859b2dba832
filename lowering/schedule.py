"""Where numbered values stand in a region: a place that depends on nothing but the values."""

from __future__ import annotations

from dataclasses import dataclass, field

from .ir import Op


@dataclass(slots=True, eq=False)
class Node:
    """An operation on numbers. ``level`` is the depth of the region it belongs to."""

    op: Op
    operands: list[int]
    regions: list[Region]
    level: int
    results: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Region:
    """A numbered region: effects in order, and the operands of its terminator."""

    args: list[int]
    effects: list[Node]
    last: Op
    roots: list[int]
    order: list[Node]
    """Every node that stands in this region, effects among them, each before its readers."""
    free: list[int]
    """Numbers from outer regions, by first need."""

    def key(self) -> object:
        """Equal for regions without effects that compute the same."""
        last = self.last
        attrs = (tuple(last.attrs.items()), tuple(last.frontend.items()))
        return (tuple(self.args), last.name, attrs, tuple(self.roots))


def schedule(
    args: list[int],
    effects: list[Node],
    last: Op,
    roots: list[int],
    depth: int,
    levels: list[int],
    makers: list[Node | None],
) -> Region:
    """Places what the effects and the terminator need, depth first, operands before readers."""
    order: list[Node] = []
    free: dict[int, None] = {}
    done: set[int] = set()

    def need(number: int) -> Node | None:
        """The node to place for a number, if it belongs here and stands nowhere yet."""
        if levels[number] < depth:
            free.setdefault(number)
            return None
        maker = makers[number]
        return None if maker is None or id(maker) in done else maker

    def place(first: Node) -> None:
        stack = [(first, iter(_needs(first)))]
        while stack:
            node, rest = stack[-1]
            inner = next((found for found in map(need, rest) if found is not None), None)
            if inner is not None:
                stack.append((inner, iter(_needs(inner))))
                continue
            stack.pop()
            if id(node) not in done:
                done.add(id(node))
                order.append(node)

    for effect in effects:
        place(effect)
    for number in roots:
        node = need(number)
        if node is not None:
            place(node)
    return Region(args, effects, last, roots, order, list(free))


def _needs(node: Node) -> list[int]:
    return [*node.operands, *(number for region in node.regions for number in region.free)]
