"""What all passes save in a layer of the hybrid decoder, forward and backward, over all of it.

    python benchmarks/qwen_hybrid_layer.py
    python benchmarks/qwen_hybrid_layer.py --kinds delta --limit 600 --json

One device's program of a layer at the real size, as it is and with all passes that the rounding
contract admits, is cut into fragments, everything but collectives, and these are compiled for one
TPU7x core by libtpu on this host (install relower[tpu]); layer_fragments.py says how. Matrix
products, attention and normalisation are in the sums too. What the compiler gives no figure for
isn't, and coverage says how much that is. Exit code 1 where the sum is less than 1.25 times smaller
after than before, 2 where nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from layer_fragments import TARGET, Bench, Figure, Layer, Piece, short
from qwen_hybrid import cases
from qwen_hybrid.config import BLOCK

import relower
from relower.lowering.targets import make_mesh, parse_target

WANTED = 1.25
FROZEN = relower.Frozen("router", grads=lambda out: out[3])


@dataclass(frozen=True)
class Sum:
    """A layer's fragments, each as often as it stands there."""

    figure: Figure
    collectives: int
    places: Mapping[str, float]
    """Cycles by ``part file.py:function``."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is missing counted by reason."""
        found = vars(self.figure) | {"collectives": self.collectives, "places": dict(self.places)}
        return found | {"missing": dict(Counter(map(short, self.figure.missing)))}


def cut(kind: str, optimized: bool) -> tuple[Layer, list[Piece]]:
    """A layer's program and its pieces."""
    case = cases.layers()[kind]
    fn, args, _ = case.built(make_mesh(parse_target(TARGET), case.mesh, "auto", "abstract"))
    if optimized:
        fn = relower.optimize(fn, contract="rounding", frozen=FROZEN)
    layer = Layer(fn, args)
    return layer, list(layer.pieces())


def summed(layer: Layer, pieces: list[Piece], bench: Bench) -> Sum:
    """Compiles what isn't yet, and adds up."""
    bench.measure(pieces, layer)
    whole, places = Figure(), Counter[str]()
    for piece in pieces:
        found = bench.figures[piece.key]
        whole = whole + found
        places[f"{piece.steps[0].part} {piece.steps[0].where}"] += found.cycles
    return Sum(whole, layer.collectives, places)


def share(part: int, of: int) -> str:
    return f"{100 * part / of:.0f} %" if of else "-"


def show(kind: str, before: Sum, after: Sum, lines: int) -> None:
    """The sums of a kind of layer, what they cover, and where most is saved."""
    for name, found in (("as it is", before.figure), ("all passes", after.figure)):
        print(
            f"{kind:9} {name:10} {found.cycles:14,.0f} cycles; covers {found.ops:,} of "
            f"{found.ops_of:,} operations, {share(found.bytes, found.bytes_of)} of HBM bytes, "
            f"{share(found.flops, found.flops_of)} of FLOPs"
        )
    print(f"{kind:9} {before.figure.cycles / after.figure.cycles:.2f}×")
    by_function: list[Counter[str]] = []
    for found in (before, after):
        by_function.append(Counter())
        for place, cycles in found.places.items():
            by_function[-1][place.partition(" ")[2]] += round(cycles)
    was, now = by_function
    saved = sorted({*was, *now}, key=lambda place: now[place] - was[place])
    for place in saved[:lines]:
        print(f"    {place:36} {was[place]:14,} {now[place]:14,}")
    for name, found in (("as it is", before), ("all passes", after)):
        for why, count in found.to_json()["missing"].items():
            print(f"    {name}: {count} × no figure: {why}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="delta,attention", help="default: both")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one compilation")
    parser.add_argument("--lines", type=int, default=14, help="functions to show for a kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.limit, lambda line: print(line, file=sys.stderr, flush=True))
    found = {}
    for kind in options.kinds.split(","):
        found[kind] = [summed(*cut(kind, optimized), bench) for optimized in (False, True)]
        if not options.json:
            show(kind, *found[kind], options.lines)
    times = {"delta": BLOCK - 1, "attention": 1}
    before, after = (
        sum(times[kind] * sums[i].figure.cycles for kind, sums in found.items()) for i in (0, 1)
    )
    if options.json:
        print(json.dumps({k: [s.to_json() for s in sums] for k, sums in found.items()}, indent=1))
    elif after:
        print(f"a block: {before:,.0f} → {after:,.0f} cycles, {before / after:.2f}×")
        print(f"operations without a scope, in no sum: {bench.unnamed:,.0f} cycles")
    if not after:
        return 2
    return 0 if before / after >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
