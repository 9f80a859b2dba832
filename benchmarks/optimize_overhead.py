"""What `relower.optimize` costs, against plain tracing, on an unrolled model of 60 layers.

    python benchmarks/optimize_overhead.py
    python benchmarks/optimize_overhead.py --layers 12 --repetitions 3

Each repetition traces the whole train step of `examples/routed_moe.py` at its real size twice:
plain, and with `relower.optimize` around it, both with jax's caches cleared. Nothing is lowered,
compiled or allocated. The ratio is ``(optimized - plain) / plain``; its median over the
repetitions is the figure to watch.
"""

from __future__ import annotations

import argparse
import gc
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

import relower.passes.optimize as transform


def seconds_to_trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """CPU seconds of this process to trace ``fn`` with nothing cached."""
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    jax.jit(fn).trace(*args)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()

    config = replace(moe.REAL, layers=options.layers, scan_layers=False)
    args = moe.abstract_inputs(config)
    applied = transform.explain(moe.make_step(config), *args).counts()
    print(f"{options.layers} layers, jax {jax.__version__}; sites applied: {applied}")

    ratios = []
    for _ in range(options.repetitions):
        plain = seconds_to_trace(moe.make_step(config), args)
        optimized = seconds_to_trace(transform.optimize(moe.make_step(config)), args)
        ratios.append((optimized - plain) / plain)
        print(f"plain {plain:6.2f} s   optimized {optimized:6.2f} s   ratio {ratios[-1]:6.1%}")
    print(f"median ratio {statistics.median(ratios):.1%}")


if __name__ == "__main__":
    main()
