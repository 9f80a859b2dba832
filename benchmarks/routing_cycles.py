"""Estimated TPU7x cycles of routing operations, before and after relower's passes.

    python benchmarks/routing_cycles.py
    python benchmarks/routing_cycles.py --only argsort_81920 --json

Each row is a function as a model's code has it. It is compiled for one TPU7x core by libtpu on this
host, as it is and rewritten by `relower.optimize` with the passes that the row names; a step that
no pass makes is written by hand and says so. A figure is a sum of the compiler's static estimates
on the rung of the ladder that stands beside it. The last row is the routing part of the example's
step, in fragments that are profiled alone (see routing_fragments.py). Nothing runs, and no TPU is
needed; libtpu is (install relower[tpu]). With libtpu 0.0.52 the figures are those in the passes'
pages within 2 %, which the last column shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax
from routing_fragments import EXPERTS, FRAGMENTS, TOP_K, Cut, Fragment, cuts

import relower
from relower.lowering.cost.model import Cost
from relower.lowering.errors import InputError

PART, PART_WANTED = "routing_part", 3.0
TOKENS, MANY_TOKENS = 8_192, 65_536
TABLE_VERSION = "0.0.52"
TOLERANCE = 0.02


@dataclass(frozen=True)
class Step:
    """One way to write a row's operation."""

    label: str
    passes: tuple[str, ...] = ()
    """Rewrite the row's function with these; none leaves it as it is."""
    by_hand: Callable[..., Any] | None = None
    """In place of the row's function."""
    known: int | None = None
    """The figure in the passes' pages, of libtpu 0.0.52."""


@dataclass(frozen=True)
class Row:
    """One operation, the way it is found first."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    steps: tuple[Step, ...]
    wanted: float | None = None
    """The ratio of the first step to the best rewritten one that the project aims at."""
    scope: str | None = None
    """Only operations in this name scope are summed."""
    known_sorts: bool = False
    """The known figures are of the sorts alone, without packing and unpacking."""


def argsort_ids(ids: jax.Array) -> jax.Array:
    return jnp.argsort(relower.assume_range(ids, 0, EXPERTS - 1))


def argsort_hidden_positions(ids: jax.Array) -> jax.Array:
    """Positions that the compiler doesn't see are an iota, as where they come out of a remat.

    It then carries an iota of its own as a third operand to make the sort stable.
    """
    ids = relower.assume_range(ids, 0, EXPERTS - 1)
    positions = lax.optimization_barrier(lax.iota(jnp.int32, ids.shape[0]))
    return lax.sort((ids, positions), num_keys=1, is_stable=True)[1]


def top_k(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, ids = lax.top_k(scores, TOP_K)
    return values, ids


def inverse(ids: jax.Array) -> jax.Array:
    """The inverse of an order; only the second sort is summed."""
    order = jnp.argsort(relower.assume_range(ids, 0, EXPERTS - 1))
    with jax.named_scope("inverting"):
        return jnp.argsort(order)


def inverse_by_counting(ids: jax.Array) -> jax.Array:
    """Each element's place: how many lie in lower buckets, and in its own before it."""
    with jax.named_scope("inverting"):
        one_hot = (ids[:, None] == lax.iota(ids.dtype, EXPERTS)).astype(jnp.int32)
        before = jnp.cumsum(one_hot, axis=0) - one_hot
        starts = jnp.cumsum(one_hot.sum(0)) - one_hot.sum(0)
        return ((before + starts) * one_hot).sum(1)


def inverse_by_scatter(ids: jax.Array) -> jax.Array:
    order = jnp.argsort(ids)
    with jax.named_scope("inverting"):
        return (
            jnp.zeros_like(order)
            .at[order]
            .set(lax.iota(order.dtype, order.size), unique_indices=True)
        )


def row_gather(x: jax.Array, order: jax.Array) -> jax.Array:
    tokens = x.shape[0]
    of_slot = jnp.repeat(jnp.arange(tokens), TOP_K)
    order = relower.assume_range(order, 0, tokens * TOP_K - 1)
    return x[jnp.take(of_slot, order)]


def row_gather_by_hand(x: jax.Array, order: jax.Array) -> jax.Array:
    return x[order // TOP_K]


def _ids(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tokens * TOP_K,), jnp.int32)


PACKED = Step("packed key", ("argsort_packed_key",))
PAIRS = Step("unique pairs", ("argsort_unique_pairs",))


def rows() -> list[Row]:
    return [
        Row(
            "argsort_655360_three_operands", argsort_hidden_positions, (_ids(MANY_TOKENS),),
            (
                Step("stable, three operands", known=1_117_714),
                replace(PAIRS, known=712_985),
                replace(PACKED, known=247_455),
            ),
            wanted=3.0,
            known_sorts=True,
        ),
        Row(
            "argsort_655360", argsort_ids, (_ids(MANY_TOKENS),),
            (
                Step("stable", known=781_708),
                replace(PAIRS, known=712_985),
                replace(PACKED, known=247_455),
            ),
            wanted=3.0,
            known_sorts=True,
        ),
        Row(
            "argsort_81920", argsort_ids, (_ids(TOKENS),),
            (Step("stable", known=106_054), PAIRS, replace(PACKED, known=20_952)),
            wanted=5.0,
        ),
        Row(
            "top_k", top_k, (jax.ShapeDtypeStruct((TOKENS, EXPERTS), jnp.float32),),
            (
                Step("top_k", known=922_316),
                Step("argmax passes", ("top_k_by_argmax",), known=198_747),
            ),
            wanted=3.5,
        ),
        Row(
            "inverse_81920", inverse, (_ids(TOKENS),),
            (
                Step("stable", known=106_054),
                Step("unstable pairs", ("inverse_permutation",), known=81_987),
                Step("by counting", by_hand=inverse_by_counting, known=202_479),
                Step("by scatter", by_hand=inverse_by_scatter, known=568_598),
            ),
            wanted=1.25,
            scope="inverting",
        ),
        Row(
            "row_gather", row_gather,
            (jax.ShapeDtypeStruct((TOKENS, 2048), jnp.bfloat16), _ids(TOKENS)),
            (
                Step("take(repeat(arange))", known=11_701),
                Step("p // k", ("affine_gather",)),
                Step("p // k, unknown range", by_hand=row_gather_by_hand, known=2_192),
            ),
        ),
    ]  # fmt: skip


def step_fn(row: Row, step: Step) -> Callable[..., Any] | str:
    """The function of a step, or why there is none."""
    if step.by_hand is not None:
        return step.by_hand
    if not step.passes:
        return row.fn
    from relower.passes.registry import by_name

    try:
        for name in step.passes:
            by_name(name)
    except ValueError:
        return f"no pass called {', '.join(step.passes)} here"
    return relower.optimize(row.fn, passes=list(step.passes))


def measured(row: Row, step: Step, limit: float) -> dict[str, Any]:
    """One step's figures, as plain JSON."""
    how = "by hand" if step.by_hand else ", ".join(step.passes) or "as it is"
    result: dict[str, Any] = {"row": row.name, "step": step.label, "how": how, "known": step.known}
    fn = step_fn(row, step)
    if isinstance(fn, str):
        return {**result, "error": fn}
    try:
        found: Cost = relower.cost(fn, *row.args, limit=limit)
    except (InputError, ValueError) as error:
        return {**result, "error": " ".join(str(error).split())}
    part = found if row.scope is None else found.within(row.scope)
    total = part.total()
    return {
        **result,
        "rung": found.rung,
        "cycles": total.estimate if found.has_cycles else None,
        "bounded": round(total.cycles),
        "coverage": total.coverage,
        "compared": _sorts(part) if row.known_sorts else total.estimate,
        "sorts": {str(n): count for n, count in found.sorts.items()},
        "temp": found.memory.temp,
        "seconds": round(found.seconds, 1),
        "libtpu": found.versions["libtpu"],
    }


def _sorts(cost: Cost) -> int:
    """The estimates of a program's sorts alone."""
    return sum(op.total_estimate or 0 for op in cost.ops if op.kind.startswith("sort"))


def line(result: dict[str, Any], first: dict[str, Any] | None) -> str:
    head = f"  {result['step']:24} {result['how']:22}"
    if "error" in result:
        return f"{head} not measured: {result['error']}"
    cycles = result["cycles"]
    if cycles is None:
        return f"{head} no cycles; rung {result['rung']}"
    base = first["cycles"] if first and first.get("rung") == result["rung"] else None
    ratio = f"{base / cycles:5.2f}×" if base else "     –"
    known = result["known"]
    off = f"{100 * (result['compared'] / known - 1):+.1f} % of {known:,}" if known else ""
    return f"{head} {cycles:>10,} {ratio}  {result['rung']:8} {off:22} {result['coverage']}"


def run(row: Row, limit: float, show: Callable[[str], None]) -> tuple[list[dict[str, Any]], bool]:
    """Every step of a row, and whether the row reaches what is wanted of it."""
    show(row.name)
    results: list[dict[str, Any]] = []
    for step in row.steps:
        results.append(measured(row, step, limit))
        show(line(results[-1], results[0]))
    if row.wanted is None:
        return results, True
    base = results[0].get("cycles")
    rewritten = [
        r["cycles"]
        for step, r in zip(row.steps, results)
        if step.passes and r.get("cycles") and r["rung"] == results[0].get("rung")
    ]
    best = base / min(rewritten) if base and rewritten else 0.0
    held = best >= row.wanted
    show(f"  best rewrite {best:.2f}×, wanted {row.wanted:g}×: {'met' if held else 'NOT MET'}")
    return results, held


def measured_fragment(fragment: Fragment, cut: Cut, side: str, limit: float) -> dict[str, Any]:
    """One fragment of one side, as plain JSON."""
    fn, types = cut.fragment(fragment.targets)
    head: dict[str, Any] = {"row": PART, "step": fragment.name, "how": side, "known": None,
                            "times": fragment.times}  # fmt: skip
    try:
        found: Cost = relower.cost(fn, *types, limit=limit)
    except (InputError, ValueError) as error:
        return {**head, "error": " ".join(str(error).split())}
    total = found.total()
    whole = found.rung == "profile"
    return {
        **head,
        "rung": "fragment" if whole else found.rung,
        "cycles": total.estimate if whole else None,
        "covers": [total.ops, total.ops_of, total.bytes, total.bytes_of],
        "notes": list(found.notes),
        "seconds": round(found.seconds, 1),
        "libtpu": found.versions["libtpu"],
    }


def run_fragments(limit: float, show: Callable[[str], None]) -> tuple[list[dict[str, Any]], bool]:
    """The routing part of a step, cut alike on both sides, and whether it is 3× as fast."""
    show(f"{PART}: fragments of one layer's routing in a step, each profiled alone")
    show(f"  {'':22} {'times':>5} {'as it is':>11} {'every pass':>11}")
    results: list[dict[str, Any]] = []
    plain, rewritten = cuts(TOKENS)
    totals, covers = [0, 0], [[0] * 4, [0] * 4]
    held = True
    for fragment in FRAGMENTS:
        cells = []
        for side, cut in enumerate((plain, rewritten)):
            found = measured_fragment(fragment, cut, ("as it is", "every pass")[side], limit)
            results.append(found)
            cycles = found.get("cycles")
            held = held and cycles is not None
            cells.append(found.get("error", found.get("rung")) if cycles is None else f"{cycles:,}")
            totals[side] += fragment.times * (cycles or 0)
            for i, n in enumerate(found.get("covers", [0] * 4)):
                covers[side][i] += n
        show(f"  {fragment.name:22} {fragment.times:>4}× {cells[0]:>11} {cells[1]:>11}")
    show(f"  {'together':22} {'':>5} {totals[0]:>11,} {totals[1]:>11,}")
    for side, c in zip(("as it is", "every pass"), covers):
        show(f"  {side} covers {c[0]} of {c[1]} operations, {100 * c[2] // c[3]} % of HBM bytes")
    ratio = totals[0] / totals[1] if totals[1] else 0.0
    if held:
        met = ratio >= PART_WANTED
        show(
            f"  {ratio:.2f}×, rung fragment; wanted {PART_WANTED:g}×: {'met' if met else 'NOT MET'}"
        )
        return results, met
    show(f"  no ratio: a fragment has no profile; wanted {PART_WANTED:g}×: NOT MET")
    return results, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*(row.name for row in rows()), PART]
    parser.add_argument("--only", action="append", choices=known, help="may be given again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one compilation")
    options = parser.parse_args()

    def show(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    chosen = [row for row in rows() if not options.only or row.name in options.only]
    everything, missed, off = [], [], []
    for row in chosen:
        results, held = run(row, options.limit, show)
        everything += results
        missed += [] if held else [row.name]
        off += [
            f"{r['row']}: {r['step']}"
            for r in results
            if r.get("libtpu") == TABLE_VERSION
            and r["known"]
            and r["cycles"]
            and abs(r["compared"] / r["known"] - 1) > TOLERANCE
        ]
    if not options.only or PART in options.only:
        results, held = run_fragments(options.limit, show)
        everything += results
        missed += [] if held else [PART]
    if options.json:
        print(json.dumps(everything, indent=2))
    if off:
        show(f"more than {TOLERANCE:.0%} off the known figure: {'; '.join(off)}")
    if missed:
        show(f"ratios not met: {', '.join(missed)}")
    else:
        show("every ratio wanted is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
