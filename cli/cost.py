"""``relower cost``: what a case costs on a TPU, and what a rewrite saves, without a TPU."""

from __future__ import annotations

import argparse
import os
import re
import tempfile

from ..gates.child import passes_from, run
from ..lowering.compile import StagedModule
from ..lowering.cost.compare import compare
from ..lowering.cost.ladder import measure
from ..lowering.cost.model import Cost
from ..lowering.cost.to_json import comparison_json, cost_json
from ..lowering.errors import InputError
from ..lowering.process import Limits
from .cost_report import show_comparison, show_cost
from .options import CASE_HELP, Subparsers, add_command, add_told, job, seconds
from .show import console, print_json, status

OPS_SHOWN = 20


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "cost", _run, summary)
    parser.add_argument("a", help=CASE_HELP)
    parser.add_argument("b", nargs="?", help="compare with this; with --passes-b alone, A again")
    parser.add_argument("--ops", type=int, default=OPS_SHOWN, metavar="N", help="lines to show")
    parser.add_argument("--bundles", action="store_true", help="count the final VLIW bundles too")
    group = parser.add_argument_group("how a case is lowered and compiled")
    group.add_argument("--passes", metavar="A,B", help="'none', 'default', or names of passes")
    group.add_argument(
        "--passes-b", metavar="A,B", help="as --passes, for B alone; then --passes is for A alone"
    )
    add_told(group)
    group.add_argument("--target", metavar="KIND:AxBxC", help="as in TPU7x:2x2x1, the default")
    group.add_argument("--mesh", metavar="AXIS=N,…", help="for a case that has no mesh")
    group.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="SPEC",
        help="'bf16[8,128]', once for each argument of a plain function",
    )
    group.add_argument(
        "--limit",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="for each lowering and each compilation; default: 600",
    )
    group.add_argument(
        "--memory-limit",
        type=seconds,
        default=16.0,
        metavar="GIB",
        help="host memory of each compilation; default: 16",
    )
    parser.set_defaults(route=None)


def _run(options: argparse.Namespace) -> int:
    second = options.b
    if second is None and options.passes_b is not None:
        second = options.a
    a = measured(options, options.a, options.passes)
    if second is None:
        if options.json:
            print_json("cost", cost_json(a))
        else:
            show_cost(console(), a, options.a, options.ops)
        return 0
    passes_b = options.passes if options.passes_b is None else options.passes_b
    b = measured(options, second, passes_b)
    found = compare(a, b)
    if options.json:
        print_json("cost_comparison", comparison_json(found))
    else:
        show_comparison(console(), found, (options.a, second), options.ops)
    return 2 if found.worse is None else int(found.worse)


def measured(options: argparse.Namespace, spec: str, passes: str | None) -> Cost:
    """The cost of a case: lowered in one child, compiled in others."""
    if os.path.isfile(spec) and not re.search(r"\.py:", spec):
        raise InputError(
            f"{spec}: an artifact holds a program's normal form, which can't be compiled; give "
            "the case, as FILE.py:NAME"
        )
    limits = Limits(options.limit, int(options.memory_limit * 2**30))
    with tempfile.TemporaryDirectory(prefix="relower-") as folder:
        request = job(options, "stage", spec, output=folder, passes=passes_from(passes))
        with status(f"lowering {spec}"):
            run(request, timeout=options.limit)
        staged = StagedModule.load(folder)
    with status(f"compiling {spec} for {staged.target}"):
        return measure(staged, limits=limits, bundles=options.bundles)
