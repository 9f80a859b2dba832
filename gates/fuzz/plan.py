"""What a random program is made of, drawn from a seed and small enough to be made smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from . import choices as choices
from . import plain as plain
from . import routing as routing
from . import sharded as sharded
from . import weights as weights
from .pool import GROUPS, PIECES
from .surroundings import WRAPS

TRANSFORMS = ("none", "grad", "grad outside", "vmap", "vmap outside", "jit outside")
"""What is done to a program: before it is optimized, or to what it is optimized to (outside)."""


@dataclass(frozen=True)
class Node:
    """A piece, or what stands around other nodes."""

    kind: str
    seed: int
    body: tuple[Node, ...] = ()

    def lines(self, depth: int = 0) -> Iterator[str]:
        """The node and what is in it, indented."""
        yield f"{'  ' * depth}{self.kind} {self.seed}"
        for node in self.body:
            yield from node.lines(depth + 1)


@dataclass(frozen=True)
class Plan:
    """Everything that a program depends on."""

    t: int
    """Rows."""
    d: int
    """Columns; also the number of experts."""
    dtype: str
    transform: str
    contract: str
    """``bitwise``, ``value``, ``rounding``, or ``named``: these and the passes that run by name."""
    eager: bool
    """Whether passes apply wherever they may, at sizes at which they wouldn't pay, too."""
    mesh: tuple[str, int] | None
    """The kind of the mesh's axes, and how many devices there are along the first."""
    some: int | None
    """The seed that half of the passes are drawn by; None where all run."""
    nodes: tuple[Node, ...]
    seed: int
    """Of what is read at the end, and of the arguments' values."""

    def __str__(self) -> str:
        """A few lines for people."""
        mesh = "no mesh" if self.mesh is None else f"a mesh of {self.mesh[1]}, {self.mesh[0]}"
        told = ", where it pays or not" if self.eager else ""
        head = (f"{self.dtype}[{self.t},{self.d}], {mesh}, transform {self.transform}, passes "
                f"{self.contract}{told}, values of {self.seed}")  # fmt: skip
        return "\n".join([head, *(line for n in self.nodes for line in n.lines(1))])


_WRAPS = {
    "jit": 3, "twice": 3, "remat": 3, "scan": 4, "loop": 2, "while": 2, "cond": 3, "vmap": 2,
    "custom_vjp": 1.5, "custom_jvp": 1, "gradient": 5, "keep": 0.4,
}  # fmt: skip
_GROUPS = {"routing": 8.0, "weights": 7.0, "plain": 4.0, "mesh": 0.0, "slow": 0.7}
_OFTENER = {
    "weighed": 3,
    "grouped": 2,
    "solved": 2,
    "spread": 2,
    "taps": 2,
    "swiglu": 2,
    "swiglu_back": 2,
    "kernel_stack": 3,
}


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    r = Random(seed)
    mesh = None
    if r.random() < 0.22:
        mesh = r.choice(("Auto", "Auto", "Explicit")), r.choice((2, 4, 4, 8))
    t = 8 if mesh else r.choice((4, 6, 8))
    transform = r.choice(("none",) * 5 + ("grad",) * 5 + ("grad outside",) * 3
                         + ("vmap", "vmap outside", "jit outside"))  # fmt: skip
    if mesh and "vmap" in transform:
        transform = "none"
    if mesh:
        nodes: tuple[Node, ...] = (_around_mesh(r),)
        nodes = (*_nodes(r, 1, 1), *nodes) if r.random() < 0.4 else nodes
        nodes = (*nodes, *_nodes(r, 1, 1)) if r.random() < 0.4 else nodes
    else:
        nodes = _nodes(r, 0, r.choice((1, 1, 2, 2, 3)))
    return Plan(
        t=t,
        d=r.choice((4, 4, 6, 8)),
        dtype=r.choice(("float32",) * 4 + ("bfloat16",)),
        transform=transform,
        contract=r.choice(("bitwise",) * 3 + ("value",) * 2 + ("rounding",) * 2 + ("named",) * 3),
        eager=r.random() < 0.6,
        mesh=mesh,
        some=r.randrange(1 << 30) if r.random() < 0.3 else None,
        nodes=nodes,
        seed=r.randrange(1 << 30),
    )


def _around_mesh(r: Random) -> Node:
    inside = Node("shard_map", r.randrange(1 << 30), _nodes(r, 1, r.choice((1, 2, 3)), mesh=True))
    if r.random() < 0.25:
        around = r.choice(("jit", "remat", "scan", "gradient", "cond"))
        return Node(around, r.randrange(1 << 30), (inside,))
    return inside


def _nodes(r: Random, depth: int, count: int, mesh: bool = False) -> tuple[Node, ...]:
    return tuple(_node(r, depth, mesh) for _ in range(count))


def _node(r: Random, depth: int, mesh: bool) -> Node:
    seed = r.randrange(1 << 30)
    if depth < 3 and r.random() < (0.5, 0.4, 0.25)[depth]:
        kinds = {k: w for k, w in _WRAPS.items() if not (mesh and k == "vmap")}
        kind = r.choices(list(kinds), list(kinds.values()))[0]
        return Node(kind, seed, _nodes(r, depth + 1, r.choice((1, 1, 1, 2, 2, 3)), mesh))
    groups = {**_GROUPS, "mesh": 8.0 if mesh else 0.0}
    group = r.choices(list(groups), list(groups.values()))[0]
    kinds = {k: _OFTENER.get(k, 1) for k in GROUPS[group]}
    return Node(r.choices(list(kinds), list(kinds.values()))[0], seed)


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with something less, the ones with much less first."""
    for nodes in _fewer(plan.nodes):
        if nodes:
            yield replace(plan, nodes=nodes)
    changes: tuple[dict[str, Any], ...] = (
        {"transform": "none"}, {"mesh": None}, {"dtype": "float32"}, {"d": 4}, {"t": 4},
        {"eager": False}, {"some": None},
    )  # fmt: skip
    for change in changes:
        if any(getattr(plan, k) != v for k, v in change.items()):
            yield replace(plan, **change)


def _fewer(nodes: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    nodes = tuple(nodes)
    for i, node in enumerate(nodes):
        yield (*nodes[:i], *nodes[i + 1 :])
        if node.body:
            yield (*nodes[:i], *node.body, *nodes[i + 1 :])
    for i, node in enumerate(nodes):
        for body in _fewer(node.body):
            if body:
                yield (*nodes[:i], replace(node, body=body), *nodes[i + 1 :])


def known(nodes: Sequence[Node]) -> bool:
    """Whether every node is of a kind that there is."""
    return all((n.kind in PIECES or n.kind in WRAPS) and known(n.body) for n in nodes)
