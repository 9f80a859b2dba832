"""Estimated TPU7x cycles of operations before and after a rewrite, held against known figures.

    python benchmarks/cost_table.py
    python benchmarks/cost_table.py --only top_k --json

Each line is one program, compiled for one TPU7x core by libtpu on this host (install relower[tpu]);
nothing runs and no TPU is needed. The figures expected are of libtpu 0.0.52 and must be met within
2 %, temporaries too; two timings published for a TPU7x must be met within 15 % at one clock. With
another libtpu the lines are shown and only the timings are judged. Two lines are said apart: an
older figure of theirs that no spelling gives is printed as not reproduced, and what is judged is
the figure that they do have. Exit code 1 where one is off, 2 where one could not be measured.

What the compiler said before is taken from the cache (`--no-cache` compiles all).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

import relower
from relower.lowering.cost.model import Cost
from relower.lowering.errors import InputError

VERSION = "0.0.52"
TOLERANCE, OF_HARDWARE = 0.02, 0.15
EXPERTS, TOP_K = 512, 10
FEW, MANY, COUNTED = 81_920, 655_360, 256
SEQUENCE, CHANNELS, TAPS = 16_384, 4_096, 4
Function = Callable[..., Any]


@dataclass(frozen=True)
class Line:
    """One program and what it is expected to cost."""

    row: str
    label: str
    fn: Function
    args: tuple[Any, ...]
    cycles: int
    """The compiler's estimate by libtpu 0.0.52."""
    temp: int | None = None
    """Megabytes (10⁶) of temporaries."""
    sorts: bool = False
    """Whether only the sorts are summed."""
    scope: str | None = None
    """Only what is in this name scope is summed."""
    measured: tuple[float, ...] = ()
    """Milliseconds that were published for a TPU7x."""
    not_reproduced: int | None = None
    """An older figure for this operation that none of the spellings tried gives."""


def by(fn: Function, *passes: str) -> Function:
    return relower.optimize(fn, passes=list(passes))


def argsort(ids: jax.Array) -> jax.Array:
    return jnp.argsort(relower.assume_range(ids, 0, EXPERTS - 1))


def argsort_hidden(ids: jax.Array) -> jax.Array:
    """The positions come out of a barrier, as out of a remat: the compiler carries its own too."""
    positions = lax.optimization_barrier(lax.iota(jnp.int32, ids.shape[0]))
    return lax.sort((ids, positions), num_keys=1, is_stable=True)[1]


def top_k(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, ids = lax.top_k(scores, TOP_K)
    return values, ids


def argmax_passes(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each pass takes the greatest that is left."""
    columns = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    values, ids = [], []
    for _ in range(TOP_K):
        best = jnp.argmax(scores, axis=-1)
        values.append(jnp.max(scores, axis=-1))
        ids.append(best)
        scores = jnp.where(columns == best[:, None], -jnp.inf, scores)
    return jnp.stack(values, -1), jnp.stack(ids, -1)


def inverse(ids: jax.Array) -> jax.Array:
    order = jnp.argsort(relower.assume_range(ids, 0, EXPERTS - 1))
    with jax.named_scope("inverting"):
        return jnp.argsort(order)


def inverse_by_counting(ids: jax.Array) -> jax.Array:
    """Each element's place: how many lie in lower buckets, and in its own before it.

    Prefix counts by blocks, within one as a triangular matrix product.
    """
    with jax.named_scope("inverting"):
        blocks = ids.reshape(-1, COUNTED)[:, :, None]
        own = blocks == lax.iota(ids.dtype, EXPERTS)
        one_hot = own.astype(jnp.bfloat16)
        lower = jnp.tril(jnp.ones((COUNTED, COUNTED), jnp.bfloat16), -1)
        inside = jnp.einsum("ij,bje->bie", lower, one_hot, preferred_element_type=jnp.float32)
        sums = one_hot.astype(jnp.float32).sum(1)
        earlier = jnp.cumsum(sums, axis=0) - sums
        starts = jnp.cumsum(sums.sum(0)) - sums.sum(0)
        places = jnp.where(own, inside + (earlier + starts)[:, None, :], 0)
        return places.sum(2).astype(jnp.int32).reshape(-1)


def inverse_by_scatter(ids: jax.Array) -> jax.Array:
    order = jnp.argsort(ids)
    with jax.named_scope("inverting"):
        iota = lax.iota(order.dtype, order.size)
        return jnp.zeros_like(order).at[order].set(iota, unique_indices=True)


def causal_conv(x: jax.Array, taps: jax.Array, late: bool) -> jax.Array:
    """A depthwise causal convolution in f32 over ``bf16[1, sequence, channels]``.

    Widened whole, or each shifted piece where it is used.
    """
    padded = jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))
    padded = padded if late else padded.astype(jnp.float32)
    total: Any = 0
    for tap in reversed(range(TAPS)):  # from the token itself backwards
        total += padded[:, tap : tap + x.shape[1]].astype(jnp.float32) * taps[tap]
    return total.astype(x.dtype)


def conv(late: bool) -> Function:
    return lambda x, taps: causal_conv(x, taps, late)


def conv_backward(late: bool) -> Function:
    def backward(x: jax.Array, taps: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(conv(late), x, taps)[1](cotangent)

    return backward


def add_of_pads(a: jax.Array, b: jax.Array) -> jax.Array:
    zero, width = jnp.zeros((), a.dtype), a.shape[1]
    return lax.pad(a, zero, ((0, 0, 0), (0, width, 0))) + lax.pad(
        b, zero, ((0, 0, 0), (width, 0, 0))
    )


def concatenated(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a, b], axis=1)


def rows_by_table(x: jax.Array, order: jax.Array) -> jax.Array:
    return x[jnp.take(jnp.repeat(jnp.arange(x.shape[0]), TOP_K), order)]


def rows_by_division(x: jax.Array, order: jax.Array) -> jax.Array:
    return x[order // TOP_K]


def _of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lines() -> list[Line]:
    many, few = (_of((MANY,), jnp.int32),), (_of((FEW,), jnp.int32),)
    scores = (_of((8192, EXPERTS), jnp.float32),)
    x = _of((1, SEQUENCE, CHANNELS), jnp.bfloat16)
    taps = _of((TAPS, CHANNELS), jnp.float32)
    half = _of((8192, 4096), jnp.bfloat16)
    rows = (_of((8192, 2048), jnp.bfloat16), *few)
    long, short, inv = "argsort of 655,360 ids", "argsort of 81,920 ids", "inverse permutation"
    packed, pairs = "argsort_packed_key", "argsort_unique_pairs"
    return [
        Line(long, "three operands", argsort_hidden, many, 1_117_714, sorts=True,
             measured=(0.61, 0.63)),
        Line(long, "stable pair", argsort, many, 781_708, sorts=True),
        Line(long, "unique pair", by(argsort, pairs), many, 712_985, sorts=True, measured=(0.42,)),
        Line(long, "packed key", by(argsort, packed), many, 247_455, sorts=True),
        Line(short, "stable pair", argsort, few, 106_054),
        Line(short, "packed key", by(argsort, packed), few, 20_952),
        Line("top_k of f32[8192,512]", "top_k", top_k, scores, 922_316),
        Line("top_k of f32[8192,512]", "ten argmax passes", argmax_passes, scores, 248_545),
        Line(inv, "stable sort", inverse, few, 106_054, scope="inverting"),
        Line(inv, "unstable pair sort", by(inverse, "inverse_permutation"), few, 81_987,
             scope="inverting"),
        Line(inv, "counting, 512 experts", inverse_by_counting, few, 202_479, scope="inverting"),
        Line(inv, "scatter", inverse_by_scatter, few, 568_598, scope="inverting"),
        Line("causal conv1d", "cast early", conv(False), (x, taps), 398_629, 268),
        Line("causal conv1d", "cast late", conv(True), (x, taps), 308_483, 0),
        Line("its backward", "cast early", conv_backward(False), (x, taps, x), 792_269, 1_342),
        Line("its backward", "cast late", conv_backward(True), (x, taps, x), 703_314, 537),
        Line("halves joined", "add of two pads", add_of_pads, (half, half), 55_390,
             not_reproduced=161_387),
        Line("halves joined", "concatenate", concatenated, (half, half), 55_390,
             not_reproduced=161_387),
        Line("rows of p // k", "take(repeat(arange))", rows_by_table, rows, 11_701),
        Line("rows of p // k", "p // k", rows_by_division, rows, 2_192),
    ]  # fmt: skip


def measured(line: Line, limit: float, cache: bool) -> dict[str, Any]:
    """One line's figures and whether they hold, as plain JSON."""
    result: dict[str, Any] = {
        "row": line.row,
        "label": line.label,
        "expected": line.cycles,
        "not_reproduced": line.not_reproduced,
    }
    try:
        found: Cost = relower.cost(line.fn, *line.args, limit=limit, cache=cache)
    except InputError as error:
        return {**result, "ok": None, "error": str(error)}
    part = found if line.scope is None else found.within(line.scope)
    total = part.total()
    if line.sorts:
        cycles = sum(op.total_estimate or 0 for op in part.ops if op.kind.startswith("sort"))
    else:
        cycles = total.estimate
    result |= {"rung": found.rung, "libtpu": found.versions["libtpu"], "cycles": cycles,
               "temp": found.memory.temp, "coverage": total.coverage}  # fmt: skip
    if found.rung != "profile":
        return {**result, "ok": None, "error": f"rung {found.rung}; {found.notes[0]}"}
    checks = {}
    if found.versions["libtpu"] == VERSION:
        checks["cycles"] = abs(cycles / line.cycles - 1) <= TOLERANCE
        if line.temp is not None:
            megabytes = found.memory.temp / 1e6
            checks["temp"] = abs(megabytes - line.temp) <= max(1.0, TOLERANCE * line.temp)
    if line.measured:
        estimated = found.milliseconds(cycles)
        result["milliseconds"], result["published"] = estimated, line.measured
        checks["hardware"] = all(abs(estimated / ms - 1) <= OF_HARDWARE for ms in line.measured)
    return {**result, "checks": checks, "ok": all(checks.values())}


def shown(line: Line, result: dict[str, Any]) -> str:
    head = f"{line.row:24} {line.label:22}"
    if "error" in result:
        return f"{head} not measured: {result['error']}"
    ratio = result["cycles"] / line.cycles
    verdict = "ok" if result["ok"] else "OFF"
    text = f"{head} {result['cycles']:>10,} {line.cycles:>10,} {ratio:6.3f} {verdict:4}"
    if line.temp is not None:
        text += f" temp {result['temp'] / 1e6:,.0f} of {line.temp:,} MB"
    if line.measured:
        published = "–".join(f"{ms:g}" for ms in line.measured)
        text += f" {result['milliseconds']:.3f} ms, published {published} ms"
    if line.not_reproduced is not None:
        text += f" NOT REPRODUCED: {line.not_reproduced:,}, see docs/cost.md"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="TEXT", help="rows that begin so")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one compilation")
    options = parser.parse_args()
    chosen = [x for x in lines() if not options.only or x.row.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"no row begins with {options.only}; rows: {sorted({x.row for x in lines()})}")
    out = sys.stderr if options.json else sys.stdout
    print(f"{'operation':24} {'':22} {'cycles':>10} {'expected':>10} {'ratio':>6}", file=out)
    results = []
    for line in chosen:
        results.append(measured(line, options.limit, not options.no_cache))
        print(shown(line, results[-1]), file=out, flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    held = sum(r["ok"] is True for r in results)
    unknown = sum(r["ok"] is None for r in results)
    apart = sum(line.not_reproduced is not None for line in chosen)
    print(
        f"{held} of {len(results)} hold, {unknown} not measured; "
        f"{apart} have an older figure that isn't reproduced",
        file=out,
    )
    return 1 if held + unknown < len(results) else 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
