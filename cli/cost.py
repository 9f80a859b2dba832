"""``relower cost``: what a case costs on a TPU, and what a rewrite saves, without a TPU."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace

from rich.text import Text

from ..gates.child import passes_from, run
from ..gates.cost_page import comparison_page, cost_page
from ..gates.render import indented
from ..lowering.compile import StagedModule
from ..lowering.cost.attribute import Attribution, RewriteSite, attribute
from ..lowering.cost.cache import user_cache
from ..lowering.cost.compare import Comparison, compare
from ..lowering.cost.ladder import measure
from ..lowering.cost.measurement import SiteSum, sum_of_sites
from ..lowering.cost.model import Cost
from ..lowering.cost.to_json import comparison_json, cost_json
from ..lowering.errors import InputError
from ..lowering.process import Limits
from ..lowering.scratch import scratch
from .cost_report import show_comparison, show_cost
from .options import (
    CASE_HELP,
    Subparsers,
    add_command,
    add_told,
    add_where,
    gibibytes,
    job,
    natural,
    seconds,
)
from .show import console, exit_code, folder_exists, print_json, status, written

OPS_SHOWN = 20


def add(commands: Subparsers, summary: str) -> None:
    """Adds the command."""
    parser = add_command(commands, "cost", _run, summary)
    parser.add_argument("a", help=CASE_HELP)
    parser.add_argument("b", nargs="?", help="compare with this; with --passes-b alone, A again")
    parser.add_argument(
        "--ops", type=natural, default=OPS_SHOWN, metavar="N",
        help=f"operations, or places, to list; default: {OPS_SHOWN}",
    )  # fmt: skip
    parser.add_argument("--bundles", action="store_true", help="count the final VLIW bundles too")
    parser.add_argument(
        "--no-analysis", action="store_true", help="counts and memory only: compile once"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as a page here too")
    parser.add_argument(
        "--no-cache", action="store_true", help="compile also what was compiled before"
    )
    group = parser.add_argument_group("how a case is lowered and compiled")
    add_told(group)
    group.add_argument(
        "--passes-b", metavar="A,B", help="as --passes, for B alone; --passes then is for A alone"
    )
    add_where(group)
    group.add_argument(
        "--limit",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="for each lowering and each compilation; default: 600",
    )
    group.add_argument(
        "--memory-limit",
        type=gibibytes,
        default=16.0,
        metavar="GIB",
        help="host memory of each compilation; default: 16",
    )
    parser.set_defaults(route=None)


def _run(options: argparse.Namespace) -> int:
    folder_exists("--html", options.html)
    second = options.b
    if second is None and options.passes_b is not None:
        second = options.a
    a = measured(options, options.a, options.passes)
    if second is None:
        if options.json:
            print_json("cost", cost_json(a))
        else:
            show_cost(console(), a, options.a, options.ops)
        trouble = written("--html", options.html, lambda: cost_page(a, options.a))
        return exit_code(0, trouble)
    passes_b = options.passes if options.passes_b is None else options.passes_b
    b = measured(options, second, passes_b)
    found = compare(a, b)
    whose = sites = None
    if _is_rewritten(options, second, passes_b):
        if found.unlike is None:
            whose = attributed(options, second, passes_b, found)
        if found.worse is None:
            sites = summed(options, second, passes_b)
    titles = (options.a, f"{second} with {passes_b}" if second == options.a else second)
    if options.json:
        print_json("cost_comparison", comparison_json(found, whose, sites))
    else:
        show_comparison(console(), found, titles, options.ops, whose)
        if sites is not None:
            indented(console(), Text(str(sites), style="bold"), 0)
    trouble = written("--html", options.html, lambda: comparison_page(found, titles, whose, sites))
    return exit_code(2 if found.worse is None else int(found.worse), trouble)


def _is_rewritten(options: argparse.Namespace, second: str, passes_b: str | None) -> bool:
    """Whether B is A with passes."""
    plain = passes_from(options.passes) is None
    return second == options.a and plain and passes_from(passes_b) is not None


def attributed(
    options: argparse.Namespace, second: str, passes_b: str | None, found: Comparison
) -> Attribution:
    """The change by rewrite."""
    request = job(options, "explain", second, passes=passes_from(passes_b))
    with status(f"finding the rewrites of {second}"):
        report = run(replace(request, options={"lines": True}), timeout=options.limit)
    return attribute(found, RewriteSite.of_report(report))


def summed(options: argparse.Namespace, second: str, passes_b: str | None) -> SiteSum:
    """The rewritten sites, each compiled alone: the rung below, where the whole has no cycles."""
    how = {
        "decide": False,
        "limit": options.limit,
        "memory_limit": int(options.memory_limit * 2**30),
        "cache": not options.no_cache,
    }
    request = job(options, "explain", second, passes=passes_from(passes_b))
    with status(f"compiling the rewritten sites of {second}"):
        return sum_of_sites(run(replace(request, options={"measure": how})))


def measured(options: argparse.Namespace, spec: str, passes: str | None) -> Cost:
    """The cost of a case: lowered in one child, compiled in others."""
    if os.path.isfile(spec) and not re.search(r"\.py:", spec):
        raise InputError(
            f"{spec}: an artifact holds a program's normal form, which can't be compiled; give "
            "the case, as FILE.py:NAME"
        )
    limits = Limits(options.limit, int(options.memory_limit * 2**30))
    with scratch() as folder:
        request = job(options, "stage", spec, output=folder, passes=passes_from(passes))
        with status(f"lowering {spec}"):
            run(request, timeout=options.limit)
        staged = StagedModule.load(folder)
    with status(f"compiling {spec} for {staged.target}"):
        cache = None if options.no_cache else user_cache()
        how = {"bundles": options.bundles, "analysis": not options.no_analysis}
        return measure(staged, limits=limits, cache=cache, **how)
