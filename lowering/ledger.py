"""The noise rules by name, and the count of what each set aside.

A rule is a claim that something in the text of a module carries no meaning. Each has a row in
`RULES`; using a name that has none is a programming error, so no rule stays undocumented.
"""

from __future__ import annotations

from collections.abc import Mapping

RULES: Mapping[str, str] = {
    "location": "file, line and name scope of an operation; kept beside the text, never hashed",
    "value-name": "names of values; numbered in order of definition",
    "module-name": "the module's own name",
    "function-name": "names of private functions; numbered in order of first use",
    "result-info": "jax.result_info: the path of a result in the caller's pytree",
    "mesh-name": "names of meshes; numbered in module order. Axis names and sizes are compared",
    "mesh-merged": "meshes with equal axes are one (levels inlined and dataflow)",
    "channel-id": "channel handles; numbered in order of first use, so a merge is a difference",
    "collective-id": "collective ids of kernels; numbered in order of first use",
    "json-key-order": "the order of keys in a backend config that is a JSON object",
    "kernel-encoding": "base64, bytecode and the stable_mosaic dialect of a kernel's body",
    "kernel-name": "the name of a kernel, in its call and in its body",
    "kernel-symbol": "names of functions inside a kernel's module; numbered in module order",
    "kernel-scope": "the name scopes that a kernel reports to a profiler",
    "kernel-location": "locations of a kernel in the debug_locations beside its body",
    "mosaic-version": "the version of the encoding of a kernel's body; it stands in the stamp",
    "call-inlined": "calls of private functions replaced by the callee's operations",
    "call-kept": "calls left in place at inlined: they or their callee carry attributes",
    "function-dropped": "private functions that nothing calls any more",
    "function-merged": "equal functions are one (level dataflow)",
    "dead-value": "pure operations whose results nothing reads (level dataflow)",
    "equal-value": "pure operations that compute what another computes (level dataflow)",
    "loop-invariant": "carried values of a loop that never change (level dataflow)",
    "level-not-built": "a level left out because the program would exceed the size bound",
}


class Ledger:
    """Counts by rule."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, rule: str, count: int = 1) -> None:
        """Count ``count`` uses of ``rule``.

        Raises:
            KeyError: the rule has no row in `RULES`.
        """
        if rule not in RULES:
            raise KeyError(f"noise rule {rule!r} is not in RULES")
        if count:
            self._counts[rule] = self._counts.get(rule, 0) + count

    def counts(self) -> dict[str, int]:
        """The counts, by name in alphabetical order."""
        return dict(sorted(self._counts.items()))
