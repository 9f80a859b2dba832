"""What would make a comparison of one program show nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ..lowering.program import Program


def work(program: Program) -> int:
    """Operations besides those that only return."""
    return sum(count for name, count in program.ops.items() if name != "func.return")


def unmet(program: Program, expect: Mapping[str, int]) -> list[str]:
    """What a case says that its program holds at least, and it doesn't."""
    found = []
    for name, wanted in expect.items():
        calls = program.kernel_calls
        count = sum(calls.values()) if name == "kernels" else program.ops.get(name, 0)
        if count < wanted:
            found.append(f"has {count} {name}; its case expects at least {wanted}")
    return found
