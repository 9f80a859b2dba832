"""What program identity costs as programs grow: ratios to MLIR's own printing, in one run.

    python benchmarks/identity_scale.py
    python benchmarks/identity_scale.py --sizes 1000 10000 --levels exact inlined dataflow
    python benchmarks/identity_scale.py --sizes 100000 1000000 --levels exact

For each size a StableHLO module is generated: layers of elementwise operations, matrix products,
constants, reductions and calls of a private function, with source locations as JAX writes them.
Each size runs in a process of its own, which prints, as CPU seconds:

- printing: MLIR prints the module in generic form, debug information left out;
- for each level: normalising to that level alone, kernels aside (there are none) and digests
  included, as a multiple of printing. ``inlined`` and ``dataflow`` hold more operations than the
  module where functions are called often, so they are also given per operation they hold;
- equal: two programs loaded from one artifact compared, in milliseconds;
- one change: the same with one constant in the middle changed, less the equal case, in seconds;
- memory: the peak of what normalising adds to the process, as a multiple of the printed text.

The last column of the table is the time per operation over that of the first size: 1.0 is linear.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LEVELS = ("exact", "inlined", "dataflow")
LAYER = 16
"""Operations of one layer below, its reducer's two among them."""
T = "tensor<64x64xf32>"
BINARY = f"({T}, {T}) -> {T}"


def layer(index: int, constant: str, last: str) -> Iterator[str]:
    """Lines of one layer; ``last`` is the value that it reads."""
    loc = f"loc(#l{index % 97})"
    v = f"%v{index}"
    yield f'{v}c = "stablehlo.constant"() {{value = dense<{constant}> : tensor<f32>}} : () -> tensor<f32> {loc}'
    yield f'{v}b = "stablehlo.broadcast_in_dim"({v}c) {{broadcast_dimensions = array<i64>}} : (tensor<f32>) -> {T} {loc}'
    yield f'{v}m = "stablehlo.multiply"({last}, {v}b) : {BINARY} {loc}'
    yield f'{v}t = "stablehlo.transpose"({v}m) {{permutation = array<i64: 1, 0>}} : ({T}) -> {T} {loc}'
    yield (
        f'{v}d = "stablehlo.dot_general"({v}t, %w) {{dot_dimension_numbers = #stablehlo.dot<'
        "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>, precision_config = "
        f"[#stablehlo<precision DEFAULT>, #stablehlo<precision DEFAULT>]}} : {BINARY} {loc}"
    )
    yield f'{v}z = "stablehlo.constant"() {{value = dense<0.0> : tensor<f32>}} : () -> tensor<f32> {loc}'
    yield f'{v}r = "stablehlo.reduce"({v}d, {v}z) ({{'
    yield f"^bb0(%a: tensor<f32>, %b: tensor<f32>):"
    yield f'  %s = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32> {loc}'
    yield f'  "stablehlo.return"(%s) : (tensor<f32>) -> () {loc}'
    yield f"}}) {{dimensions = array<i64: 1>}} : ({T}, tensor<f32>) -> tensor<64xf32> {loc}"
    yield f'{v}e = "stablehlo.broadcast_in_dim"({v}r) {{broadcast_dimensions = array<i64: 0>}} : (tensor<64xf32>) -> {T} {loc}'
    yield f'{v}x = "stablehlo.exponential"({v}m) : ({T}) -> {T} {loc}'
    yield f'{v}q = "stablehlo.divide"({v}x, {v}e) : {BINARY} {loc}'
    yield f'{v}u = "stablehlo.subtract"({v}q, {v}m) : {BINARY} {loc}'
    yield f'{v}f = "func.call"({v}u) {{callee = @block}} : ({T}) -> {T} {loc}'
    yield f'{v} = "stablehlo.add"({v}f, {v}d) : {BINARY} {loc}'


def module_text(operations: int, changed: bool = False) -> str:
    """StableHLO of about that many operations; ``changed`` alters one constant in the middle."""
    layers = max(1, operations // LAYER)
    lines = [
        "module @jit_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {",
        f"func.func public @main(%x: {T}, %w: {T}) -> {T} {{",
    ]
    last = "%x"
    for index in range(layers):
        constant = "99.5" if changed and index == layers // 2 else f"{index % 13}.25"
        lines.extend(layer(index, constant, last))
        last = f"%v{index}"
    lines.append(f"return {last} : {T}")
    lines.append("}")
    lines.append(
        f"func.func private @block(%x: {T}) -> {T} {{ %0 = stablehlo.tanh %x : {T} loc(#l1)\n"
        f"return %0 : {T} loc(#l1) }} }}"
    )
    for index in range(97):
        lines.append(f'#f{index} = loc("model.py":{index + 10}:4)')
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
    """The memory this process holds, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(size: int, levels: list[str], repetitions: int) -> dict[str, Any]:
    """The figures of one size."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    from relower.lowering import artifact
    from relower.lowering.diff import diff
    from relower.lowering.normalize import normalize
    from relower.lowering.program import Program, Stamp

    def parsed(changed: bool) -> Any:
        with mlir.make_ir_context():
            return ir.Module.parse(module_text(size, changed))

    def program(module: Any, level: str) -> Any:
        normal = normalize(module, mosaic_version="0", levels=(level,))
        fields = {name: getattr(normal, name) for name in normal.__dataclass_fields__}
        return Program(stamp=Stamp({"jax": "0"}), **fields)

    module = parsed(False)
    before = held()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    program(module, levels[0])
    memory = peak() - before

    def printing() -> str:
        text: str = module.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        return text

    text = printing()
    found: dict[str, Any] = {"size": text.count('"stablehlo.') + text.count('"func.')}
    found["memory"] = memory / len(text)
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
    other = artifact.loads(artifact.dumps(program(parsed(True), level)))
    unequal, verdict = seconds(lambda: diff(a, other, level))
    assert (verdict.verdict.name, len(verdict.changes)) == ("DIFFERENT", 1), verdict
    found["equal"], found["changed"] = equal, unequal - equal
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.levels, options.repetitions)))
        return
    import jax

    print(f"jax {jax.__version__}, CPU seconds, median of {options.repetitions}")
    ratios = "".join(f"{level:>10}" for level in options.levels)
    print(
        f"{'operations':>10}{'printing':>10}{ratios}{'memory':>8}{'equal':>10}{'1 change':>10}{'per op':>8}"
    )
    first: float | None = None
    for size in options.sizes:
        command = [sys.executable, __file__, "--one", str(size), "--levels", *options.levels]
        command += ["--repetitions", str(options.repetitions)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(out)
        per_op = row["printing"] * row[options.levels[0]] / row["size"]
        first = first or per_op
        shown = "".join(f"{row[level]:9.2f}×" for level in options.levels)
        print(
            f"{row['size']:>10,}{row['printing']:9.3f}s{shown}{row['memory']:7.1f}×"
            f"{row['equal'] * 1000:8.2f}ms{row['changed']:9.2f}s{per_op / first:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
