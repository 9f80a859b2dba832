"""What program identity costs as programs grow: ratios to MLIR's own printing, in one run.

    python benchmarks/identity_scale.py
    python benchmarks/identity_scale.py --sizes 1000 10000 --levels exact inlined dataflow
    python benchmarks/identity_scale.py --sizes 100000 1000000 --levels exact --edit constant

For each size a StableHLO module is generated: layers of elementwise operations, matrix products,
constants, reductions and calls of a private function, with source locations as JAX writes them.
Each size runs in a process of its own, which prints, as CPU seconds:

- printing: MLIR prints the module in generic form, debug information left out;
- for each level: normalising to that level alone, kernels aside (there are none) and digests
  included, as a multiple of printing. ``inlined`` and ``dataflow`` hold more operations than the
  module where functions are called often, so they are also given per operation they hold;
- equal: two programs loaded from one artifact compared, in milliseconds;
- one change: the slowest of fifteen comparisons, less the equal case, in seconds: a constant
  changed, an operation inserted, one removed, two in the other order, another operand read; each
  at the start, in the middle and at the end. ``--edits`` prints all of them;
- memory: the peak of what normalising adds to the process, in bytes for each byte of printed text;
  and, as ``(MLIR)``, the peak of what MLIR's printing alone adds. jaxlib 0.10.2's printer takes
  some 1.5 MiB whatever the module's size, which is many times a small text.

The last column of the table is the time per operation over that of the first size: 1.0 is linear.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

LEVELS = ("exact", "inlined", "dataflow")
LAYER = 16
"""Operations of one layer below, its reducer's two among them."""
T = "tensor<64x64xf32>"
SOURCES = 997
"""Distinct source locations."""
EDITS = ("constant", "inserted", "removed", "swapped", "operand")
PLACES = ("start", "middle", "end")
MOST_CHANGES = 3
"""What a report of one edit may hold: the edit, and the uses of what it replaced."""


def edited(lines: str, edit: str | None, v: str) -> str:
    """A layer with one difference."""
    if edit is None:
        return lines
    changed = {
        "constant": lambda: lines.replace(".25>", ".5>", 1),
        "inserted": lambda: lines.replace(
            f"{v}u = stablehlo.subtract {v}q",
            f"{v}n = stablehlo.negate {v}q : {T} LOC\n{v}u = stablehlo.subtract {v}n",
        ),
        "removed": lambda: lines.replace(
            f"{v}t = stablehlo.transpose {v}m, dims = [1, 0] : ({T}) -> {T} LOC\n", ""
        ).replace(f"dot_general {v}t", f"dot_general {v}m"),
        "swapped": lambda: _swapped(lines, f"{v}e = ", f"{v}x = "),
        "operand": lambda: lines.replace(f"subtract {v}q, {v}m", f"subtract {v}q, {v}b"),
    }[edit]()
    assert changed != lines, edit
    return changed


def _swapped(lines: str, first: str, second: str) -> str:
    """Two lines that follow each other, in the other order."""
    a, b = lines.index(first), lines.index(second)
    end = lines.index("\n", b) + 1
    return lines[:a] + lines[b:end] + lines[a:b] + lines[end:]


def layer(index: int, last: str, edit: str | None = None) -> str:
    """The lines of one layer; ``last`` is the value that it reads."""
    v = f"%v{index}"
    constant = f"{index % 13}.25"
    lines = f"""
{v}c = stablehlo.constant dense<{constant}> : tensor<f32> LOC
{v}b = stablehlo.broadcast_in_dim {v}c, dims = [] : (tensor<f32>) -> {T} LOC
{v}m = stablehlo.multiply {last}, {v}b : {T} LOC
{v}t = stablehlo.transpose {v}m, dims = [1, 0] : ({T}) -> {T} LOC
{v}d = stablehlo.dot_general {v}t, %w, contracting_dims = [1] x [0] : ({T}, {T}) -> {T} LOC
{v}z = stablehlo.constant dense<0.0> : tensor<f32> LOC
{v}r = "stablehlo.reduce"({v}d, {v}z) ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32> LOC
    stablehlo.return %s : tensor<f32> LOC
}}) {{dimensions = array<i64: 1>}} : ({T}, tensor<f32>) -> tensor<64xf32> LOC
{v}e = stablehlo.broadcast_in_dim {v}r, dims = [0] : (tensor<64xf32>) -> {T} LOC
{v}x = stablehlo.exponential {v}m : {T} LOC
{v}q = stablehlo.divide {v}x, {v}e : {T} LOC
{v}u = stablehlo.subtract {v}q, {v}m : {T} LOC
{v}f = func.call @block({v}u) : ({T}) -> {T} LOC
{v} = stablehlo.add {v}f, {v}d : {T} LOC"""
    return edited(lines, edit, v).replace("LOC", f"loc(#l{index % SOURCES})")


def module_text(operations: int, edit: str | None = None, place: str = "middle") -> str:
    """StableHLO of about that many operations, with one difference if ``edit`` names one."""
    layers = max(1, operations // LAYER)
    at = {"start": 0, "middle": layers // 2, "end": layers - 1}[place]
    lines = [
        "module @jit_step attributes {mhlo.num_partitions = 1 : i32} {",
        f"func.func public @main(%x: {T}, %w: {T}) -> {T} {{",
    ]
    last = "%x"
    for index in range(layers):
        lines.append(layer(index, last, edit if index == at else None))
        last = f"%v{index}"
    lines.append(f"return {last} : {T}")
    lines.append("}")
    lines.append(
        f"func.func private @block(%x: {T}) -> {T} {{ %0 = stablehlo.tanh %x : {T} loc(#l1)\n"
        f"return %0 : {T} loc(#l1) }} }}"
    )
    for index in range(SOURCES):
        lines.append(f'#f{index} = loc("step"("model.py":{index + 10}:4))')
        lines.append(f'#l{index} = loc("jit(step)/block_{index % 7}/op"(#f{index}))')
    return "\n".join(lines)


def seconds(fn: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    start = time.process_time()
    result = fn()
    return time.process_time() - start, result


def peak() -> int:
    """The most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held() -> int:
    """The memory this process holds, in bytes, once what was freed has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(
    size: int, levels: list[str], repetitions: int, edits: list[str], places: list[str]
) -> dict[str, Any]:
    """The figures of one size."""
    import jax

    from relower.compat.mlir import ir
    from relower.lowering import artifact
    from relower.lowering.diff import diff
    from relower.lowering.normalize import normalize
    from relower.lowering.program import Program, Stamp

    context = jax.jit(lambda x: x).lower(1.0).compiler_ir("stablehlo").context

    def parsed(edit: str | None = None, place: str = "middle", size: int = size) -> Any:
        with context:
            return ir.Module.parse(module_text(size, edit, place))

    def program(module: Any, level: str) -> Any:
        normal = normalize(module, mosaic_version="0", levels=(level,))
        fields = {name: getattr(normal, name) for name in normal.__dataclass_fields__}
        return Program(stamp=Stamp({"jax": "0"}), **fields)

    def added(work: Callable[[], Any]) -> int:
        before = held()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        work()
        return peak() - before

    program(parsed(size=LAYER), levels[0])  # what is loaded and compiled at first use
    module = parsed()

    def printing() -> str:
        text: str = module.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        return text

    added(printing)  # a part of what MLIR takes at first, it keeps
    memory = added(lambda: program(module, levels[0]))
    text = printing()
    found: dict[str, Any] = {"size": text.count('"stablehlo.') + text.count('"func.')}
    found["memory"] = memory / len(text)
    found["MLIR"] = added(lambda: len(printing())) / len(text)
    rounds = [
        {"printing": seconds(printing)[0]}
        | {level: seconds(lambda level=level: program(module, level))[0] for level in levels}
        for _ in range(repetitions)
    ]
    found["printing"] = statistics.median(r["printing"] for r in rounds)
    for level in levels:
        found[level] = statistics.median(r[level] / r["printing"] for r in rounds)
        made = program(module, level)
        held_ops = sum(s.text.count(" : (") for s in made.forms[level].sections)
        found[f"{level} ops"] = held_ops
    level = levels[0]
    made = program(module, level)
    data = artifact.dumps(made)
    a, b = artifact.loads(data), artifact.loads(data)
    equal, verdict = seconds(lambda: diff(a, b, level))
    assert verdict.verdict.name == "IDENTICAL", verdict
    found["equal"], found["edits"] = equal, {}
    for edit, place in product(edits, places):
        other = artifact.loads(artifact.dumps(program(parsed(edit, place), level)))
        unequal, verdict = seconds(lambda other=other: diff(a, other, level))
        count = len(verdict.changes)
        assert verdict.verdict.name == "DIFFERENT", verdict
        assert 0 < count <= MOST_CHANGES, (edit, place, count)
        found["edits"][f"{edit}, {place}"] = unequal - equal, count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--edit", nargs="+", choices=EDITS, default=list(EDITS))
    parser.add_argument("--place", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--edits", action="store_true", help="print the time of every edit")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        chosen = options.levels, options.repetitions, options.edit, options.place
        print(json.dumps(measure(options.one, *chosen)))
        return
    import jax

    print(f"jax {jax.__version__}, CPU seconds, median of {options.repetitions}")
    ratios = "".join(f"{level:>10}" for level in options.levels)
    rest = f"{'memory':>8}{'(MLIR)':>8}{'equal':>10}{'1 change':>10}{'per op':>8}"
    print(f"{'operations':>10}{'printing':>10}{ratios}{rest}")
    first: float | None = None
    for size in options.sizes:
        command = [sys.executable, __file__, "--one", str(size), "--levels", *options.levels]
        command += ["--repetitions", str(options.repetitions)]
        command += ["--edit", *options.edit, "--place", *options.place]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(out)
        per_op = row["printing"] * row[options.levels[0]] / row["size"]
        first = first or per_op
        shown = "".join(f"{row[level]:9.2f}×" for level in options.levels)
        slowest = max(took for took, _ in row["edits"].values())
        print(
            f"{row['size']:>10,}{row['printing']:9.3f}s{shown}{row['memory']:7.1f}×"
            f"{row['MLIR']:7.1f}×{row['equal'] * 1000:8.2f}ms{slowest:9.2f}s"
            f"{per_op / first:8.2f}",
            flush=True,
        )
        for edit, (took, count) in row["edits"].items() if options.edits else ():
            print(f"    {edit:20}{took:7.2f}s  reported as {count}", flush=True)


if __name__ == "__main__":
    main()
