"""What `relower.optimize` costs as programs grow: ratios to plain tracing, in one run.

    python benchmarks/optimize_scale.py
    python benchmarks/optimize_scale.py --sizes 10000 100000 300000 --repetitions 3
    python benchmarks/optimize_scale.py --sizes 10000 --only plain_decoder
    python benchmarks/optimize_scale.py --sizes --gate

Two whole train steps are traced, their layers unrolled until they have as many equations as asked
for; nothing is lowered, compiled or allocated:

- routed_moe: `examples/routed_moe.py` at its real size: five sites in each layer, in two rounds;
- plain_decoder: a decoder without experts, in which no pass has anything to do.

Each model and size runs in a process of its own, which after a warm-up on two layers traces the
step plain and under `relower.optimize` by turns, all of jax's caches cleared each time, and prints
CPU seconds. *ratio* is optimize over plain, the median of pairs taken one after the other, as a
user meets it; *uncollected* is the same with Python's garbage collector off on both sides: optimize
keeps the collector from its full passes while it works, which plain tracing doesn't, so that of
large programs *ratio* alone would flatter it. *added* is what optimize adds for each 1,000
equations with the collector off, and *linear* that over the first size's. *memory* is the peak that
the traced step adds to a process of its own, under optimize over plain.

Start-up is that of ``import relower``, of ``import jax`` and of ``relower --help``, in seconds of
CPU. ``--gate`` times the gate on four cells, eight lowerings: with ``--jobs 1`` and with ``--jobs
2``, in seconds of the clock. A busy machine has no second core to show, so it prints its load, and
what doesn't depend on that: of the CPU seconds, those of the gate's own process, which jobs can't
share, and how much faster two jobs could be at best with these.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = ("routed_moe", "plain_decoder")
Step = Callable[..., Any]

CELL = """
[[program]]
name = "decoder_{n}"
variants.step = "{file}:decoder_{n}"
variants.other = "{file}:decoder_{m}"

[[program.cell]]
variant = "step"
differs-from = "other"
level = "exact"
"""
CASES = """
import sys
sys.path.insert(0, {folder!r})
import optimize_scale
import relower

def case(layers):
    step, args = optimize_scale.plain_decoder(layers)
    return relower.case(step, *args)

"""


def routed_moe(layers: int) -> tuple[Step, tuple[Any, ...]]:
    """The whole train step of the example, unrolled."""
    sys.path.insert(0, str(EXAMPLES))
    import routed_moe as moe

    config = replace(moe.REAL, layers=layers, scan_layers=False)
    return moe.make_step(config), moe.abstract_inputs(config)


def plain_decoder(layers: int) -> tuple[Step, tuple[Any, ...]]:
    """The loss of a decoder and a step of gradient descent, on bf16[8, 2048, 1024]."""
    import jax
    import jax.numpy as jnp

    width, heads, hidden, vocabulary = 1024, 8, 4096, 32_000

    def normed(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * rms).astype(x.dtype) * scale

    def attention(x: Any, p: Any) -> Any:
        batch, tokens, _ = x.shape
        q, k, v = (
            (x @ p[name]).reshape(batch, tokens, heads, width // heads) for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        seen = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9).astype(jnp.float32), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(x.dtype), v)
        return mixed.reshape(batch, tokens, width) @ p["o"]

    def loss(params: Any, ids: Any) -> Any:
        x = params["embedding"][ids]
        for p in params["layers"]:
            x = x + attention(normed(x, p["norm"]), p)
            y = normed(x, p["norm_mlp"])
            x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        logits = (normed(x, params["norm"]) @ params["embedding"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1)
        return -jnp.mean(picked)

    def step(params: Any, ids: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, ids)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layer = {name: of(width, width) for name in "qkvo"}
    layer |= {"norm": of(width), "norm_mlp": of(width), "gate": of(width, hidden)}
    layer |= {"up": of(width, hidden), "down": of(hidden, width)}
    params = {"embedding": of(vocabulary, width), "norm": of(width), "layers": [layer] * layers}
    return step, (params, jax.ShapeDtypeStruct((8, 2048), jnp.int32))


def seconds_to_trace(step: Step, args: tuple[Any, ...], collector: bool) -> float:
    """CPU seconds of this process to trace a step with nothing cached."""
    import jax

    jax.clear_caches()
    gc.collect()
    if not collector:
        gc.disable()
    try:
        start = time.process_time()
        jax.jit(step).trace(*args)
        return time.process_time() - start
    finally:
        gc.enable()


def child(model: str, size: int, how: str, repetitions: int) -> dict[str, Any]:
    """One model at one size: ``how`` is ``time``, or whose memory to take."""
    import jax

    import relower
    import relower.passes.optimize as transform

    make = globals()[model]

    def equations(layers: int) -> int:
        step, args = make(layers)
        return len(jax.make_jaxpr(step)(*args).jaxpr.eqns)

    few, more = equations(2), equations(4)
    layers = max(2, round(2 + (size - few) / ((more - few) / 2)))
    step, args = make(2)
    jax.jit(relower.optimize(step)).trace(*args)
    step, args = make(layers)
    if how != "time":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        traced = jax.jit(step if how == "plain" else relower.optimize(step)).trace(*args)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return {"bytes": peak * 1024, "equations": len(traced.jaxpr.jaxpr.eqns)}

    def pairs(collector: bool) -> list[tuple[float, float]]:
        return [
            (
                seconds_to_trace(step, args, collector),
                seconds_to_trace(relower.optimize(step), args, collector),
            )
            for _ in range(repetitions)
        ]

    applied = transform.explain(step, *args).counts()
    return {
        "jax": jax.__version__,
        "layers": layers,
        "equations": len(jax.make_jaxpr(step)(*args).jaxpr.eqns),
        "sites": sum(applied.values()),
        "pairs": pairs(collector=True),
        "uncollected": pairs(collector=False),
    }


def in_child(model: str, size: int, how: str, repetitions: int) -> dict[str, Any]:
    """`child` in a process of its own."""
    command = [sys.executable, __file__, "--child", model, str(size), how, str(repetitions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, size: int, repetitions: int, first: float | None) -> float:
    """Measure and print one line of the table; what optimize adds for each 1,000 equations."""
    found = in_child(model, size, "time", repetitions)
    plain, optimized = (in_child(model, size, how, 1)["bytes"] for how in ("plain", "optimize"))
    ratio, uncollected = (
        statistics.median(o / p for p, o in found[kind]) for kind in ("pairs", "uncollected")
    )
    tracing = statistics.median(p for p, _ in found["pairs"])
    added = 1000 * statistics.median(o - p for p, o in found["uncollected"]) / found["equations"]
    print(
        f"| {model} | {found['layers']:,} | {found['equations']:,} | {found['sites']:,} "
        f"| {tracing:.2f} s | {ratio:.2f}× | {uncollected:.2f}× | {1000 * added:.1f} ms "
        f"| {added / (first or added):.2f} | {optimized / plain:.2f}× |",
        flush=True,
    )
    return added


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of a process and its children, the least of three runs."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def start_up() -> None:
    """Print what the first line of a program, and the command, take."""
    for label, command in {
        "import jax": [sys.executable, "-c", "import jax"],
        "import relower": [sys.executable, "-c", "import relower"],
        "relower --help": [sys.executable, "-m", "relower.cli.main", "--help"],
    }.items():
        print(f"{label}: {cpu_seconds(command):.2f} s", flush=True)


MEASURED = """
import json, resource, sys
from relower.cli.main import main
code = main(sys.argv[1:])
used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([u.ru_utime + u.ru_stime for u in used]), file=sys.stderr)
sys.exit(code)
"""


def gate_seconds(folder: Path, jobs: int) -> tuple[float, float, float]:
    """Of one run of the gate: seconds of the clock, and of CPU, its own and its children's."""
    arguments = ["gate", "relower.toml", "--no-cache", "--jobs", str(jobs)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], cwd=folder, capture_output=True, check=True
    )
    wall = time.perf_counter() - start
    own, children = json.loads(done.stderr.splitlines()[-1])
    return wall, own, children


def gate(repetitions: int) -> None:
    """Print how much faster the gate is with two jobs than with one, on eight lowerings."""
    folder = Path(tempfile.mkdtemp())
    try:
        layers = range(8, 16)
        cases = CASES.format(folder=str(Path(__file__).parent))
        cases += "".join(f"def decoder_{n}():\n    return case({n})\n\n" for n in layers)
        (folder / "cases.py").write_text(cases)
        cells = [CELL.format(file="cases.py", n=n, m=n + 1) for n in layers if n % 2 == 0]
        (folder / "relower.toml").write_text("[gate]\n" + "".join(cells))
        ratios = []
        for _ in range(repetitions):
            load = os.getloadavg()[0]
            one, two = (gate_seconds(folder, jobs) for jobs in (1, 2))
            ratios.append(one[0] / two[0])
            shared, cpu = two[2], two[1] + two[2]
            print(
                f"gate: 1 job {one[0]:.1f} s, 2 jobs {two[0]:.1f} s, load {load:.1f}; CPU "
                f"{one[1] + one[2]:.1f} s and {cpu:.1f} s, of which {two[1]:.1f} s in one process: "
                f"at best {cpu / (two[1] + shared / 2):.2f}×",
                flush=True,
            )
        print(f"gate: {statistics.median(ratios):.2f}× as fast with 2 jobs", flush=True)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.child:
        model, size, how, repetitions = options.child
        print(json.dumps(child(model, int(size), how, int(repetitions))))
        return
    if options.sizes:
        import jax

        print(f"jax {jax.__version__}\n")
        columns = "model|layers|equations|sites|tracing|ratio|uncollected|added|linear|memory"
        print(f"| {columns.replace('|', ' | ')} |\n|{'---|' * (columns.count('|') + 1)}")
    for model in [options.only] if options.only else MODELS:
        first = None
        for size in options.sizes:
            added = row(model, size, options.repetitions, first)
            first = first or added
    start_up()
    if options.gate:
        gate(options.repetitions)


if __name__ == "__main__":
    main()
