"""What the normal form costs, against having MLIR print the module.

    python benchmarks/lower_time.py
    python benchmarks/lower_time.py --layers 12 --repetitions 3

The train step of `examples/routed_moe.py` at its real size, with its layers unrolled, is lowered
for the TPU once. Each repetition then has MLIR print the module in generic form, and brings it to
normal form, kernels decoded and all levels digested. The ratio is of CPU seconds; its median over
the repetitions is the figure to watch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import routed_moe as moe

from relower.compat.lowered import hoisted_constants
from relower.compat.mlir import mosaic_version
from relower.lowering.case import case
from relower.lowering.lower import stage
from relower.lowering.normalize import normalize
from relower.lowering.program import LEVELS, Level
from relower.lowering.targets import DEFAULT_TARGET, make_mesh, parse_target


def seconds(fn: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    start = time.process_time()
    result = fn()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()

    config = replace(moe.REAL, layers=options.layers, scan_layers=False)
    target = parse_target(DEFAULT_TARGET)
    mesh = make_mesh(target, None, "auto", "abstract")
    step = case(moe.make_train_step(config), *moe.abstract_inputs(config))
    staging, (lowered, _) = seconds(lambda: stage(step, target, mesh, "abstract"))
    print(f"{options.layers} layers, jax {jax.__version__}: traced and lowered in {staging:.2f} s")

    chosen: list[tuple[Level, ...]] = [("exact",), LEVELS]
    ratios: dict[tuple[Level, ...], list[float]] = {levels: [] for levels in chosen}
    for _ in range(options.repetitions):
        module = lowered.compiler_ir("stablehlo")
        printing, text = seconds(
            lambda module=module: module.operation.get_asm(
                print_generic_op_form=True, use_local_scope=True
            )
        )
        for levels in chosen:
            took, _ = seconds(
                lambda module=module, levels=levels: normalize(
                    module,
                    mosaic_version=mosaic_version("abstract"),
                    levels=levels,
                    constants=hoisted_constants(lowered),
                )
            )
            ratios[levels].append(took / printing)
            print(
                f"printing {printing:5.2f} s ({len(text):,} characters)   "
                f"normal form ({', '.join(levels)}) {took:5.2f} s   ratio {took / printing:.2f}"
            )
    for levels, found in ratios.items():
        print(f"median ratio ({', '.join(levels)}) {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
