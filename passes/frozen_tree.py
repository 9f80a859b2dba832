"""Frozen parameters in words: the user's tree, with what each leaf saves or costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AMOUNTS = {
    "flops": "FLOPs",
    "collective_bytes": "bytes of collectives",
    "accumulator_bytes": "bytes of accumulators",
}


def frozen_tree(leaves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of text for frozen leaves as a report's JSON holds them; none for none."""
    lines: list[str] = []
    above: list[str] = []
    for leaf in sorted(leaves, key=lambda leaf: (leaf["path"] is None, leaf["path"] or "")):
        path = leaf["path"]
        parts = ["a parameter that can't be named"] if path is None else path.split("/")
        shared = 0
        while parts[:-1][: shared + 1] == above[: shared + 1] and shared < len(above):
            shared += 1
        lines += [f"{'  ' * depth}{parts[depth]}" for depth in range(shared, len(parts) - 1)]
        above = parts[:-1]
        lines.append(f"{'  ' * (len(parts) - 1)}{parts[-1]}  {_line(leaf)}")
    saved = [leaf for leaf in leaves if leaf["status"] == "applied"]
    if len(saved) > 1:
        total = {name: sum(leaf[name] for leaf in saved) for name in AMOUNTS}
        lines.append(f"saved in all: {amounts(total)}")
    return ["frozen", *lines] if lines else []


def _line(leaf: Mapping[str, Any]) -> str:
    if leaf["status"] == "applied":
        # Of a trained parameter's gradient, too, that isn't returned: no mask says which it is.
        way = "nothing needs its gradient" if leaf["way"] == "recognised" else leaf["way"]
        return f"{leaf['type']}  {way}, saves {amounts(leaf)}"
    codes = ", ".join(reason["code"] for reason in leaf["reasons"])
    return f"{leaf['type']}  {leaf['way']}, declined ({codes}), keeps {amounts(leaf)}"


def amounts(leaf: Mapping[str, Any]) -> str:
    """What is saved or kept, in words; what is none isn't said."""
    return ", ".join(f"{leaf[n]:,} {unit}" for n, unit in AMOUNTS.items() if leaf[n]) or "nothing"
