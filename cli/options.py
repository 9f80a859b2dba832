"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from ..gates.child import Job, passes_from
from ..gates.config import LONGEST_TIMEOUT
from ..gates.pass_sets import CONTRACTS, asked_twice, without_effect
from ..lowering.errors import InputError

DEFAULT = "default"
FILE_HELP = (
    "FILE.py:NAME: a relower.case, a function that returns one, or a plain function with an --arg "
    "for each argument; NAME[KEY] is one of a dict of cases"
)
CASE_HELP = f"{FILE_HELP}, NAME@REV takes the files of a git revision"
EXIT_CODES = "Exit codes: 0 same or holds, 1 different or broken, 2 could not be decided."
Subparsers = Any


def add_command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    """A parser for one command, with ``--json``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=EXIT_CODES
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def add_lowering(parser: argparse.ArgumentParser, passes: str = "none") -> None:
    """The options that say how a case is traced and lowered; ``passes`` is what runs unasked."""
    group = parser.add_argument_group("how a case is lowered")
    add_told(group, passes)
    add_where(group)
    group.add_argument(
        "--route", choices=("abstract", "topology"),
        help="who knows the target's devices: relower, or libtpu; default: abstract",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=seconds, metavar="SECONDS",
        help="give up where one lowering, or what is done here in its place, takes longer; "
        "default: none",
    )  # fmt: skip


def add_where(group: Any) -> None:
    """What a case is lowered for, and the arguments of a plain function."""
    group.add_argument(
        "--target", metavar="KIND:AxBxC", help="kind and grid of chips; default: TPU7x:2x2x1"
    )
    group.add_argument(
        "--mesh", metavar="AXIS=N,…", help="as in data=4,model=2; for a case that has no mesh"
    )
    group.add_argument(
        "--arg", action="append", default=[], metavar="SPEC",
        help="as in 'bf16[8,128]': once for each argument of a plain function; a case has its own",
    )  # fmt: skip


def add_told(group: Any, passes: str = "none") -> None:
    """Which passes run, which ``default`` stands for, and what they are told of a program."""
    group.add_argument(
        "--passes", metavar="A,B",
        help=f"'none', 'default', or names of passes, as `relower passes` lists them; default: "
        f"{passes}",
    )  # fmt: skip
    group.add_argument(
        "--contract", choices=CONTRACTS,
        help="the loosest contract of the passes that 'default' stands for; default: bitwise",
    )  # fmt: skip
    group.add_argument(
        "--disable",
        action="append",
        default=[],
        metavar="PASS|ADDRESS",
        help="a pass not to run, or the address of a site to leave alone, as explain shows it; may "
        "be given again",
    )
    group.add_argument(
        "--frozen", metavar="REGEX",
        help="paths of output leaves that are gradients of frozen parameters (docs/optimize.md)",
    )  # fmt: skip
    group.add_argument(
        "--assume", choices=("finite_grads",),
        help="what holds of every run: gradients are neither inf nor NaN (docs/optimize.md)",
    )  # fmt: skip


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """``--jobs``."""
    parser.add_argument(
        "--jobs", "-j", type=count, default=1, metavar="N",
        help="work on N at once, each in a process of its own; default: 1",
    )  # fmt: skip


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """A number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: wanted a number of at least 0")
    return int(text)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    return _positive(text, LONGEST_TIMEOUT, "seconds above 0, below a month")


def gibibytes(text: str) -> float:
    """A positive amount of memory."""
    return _positive(text, 2.0**20, "GiB above 0, below a million")


def _positive(text: str, most: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < most:
        raise argparse.ArgumentTypeError(f"{text}: wanted {wanted}")
    return value


def job(options: argparse.Namespace, do: Any, spec: str, **more: Any) -> Job:
    """The request to a child that these options describe.

    Raises:
        InputError: something is said for passes of which none is to run, or a contract where each
            is named.
    """
    _fits(options, do)
    return Job(
        do,
        spec=spec,
        args=tuple(options.arg),
        target=options.target,
        contract=options.contract or CONTRACTS[0],
        disable=tuple(options.disable),
        frozen=options.frozen,
        assume=options.assume,
        route=options.route,
        mesh=None if options.mesh is None else mesh_from(options.mesh),
        **{"passes": passes_from(options.passes), **more},
    )


def _fits(options: argparse.Namespace, do: str) -> None:
    """Raises where options speak of passes that don't run."""
    sides = [passes_from(s) for s in (options.passes, getattr(options, "passes_b", None))]
    if do in ("verify", "bisect") and options.passes is not None and not sides[0]:
        raise InputError(
            f"--passes {options.passes}: there is nothing to {do}; wanted 'default', names of "
            "passes, or no --passes"
        )
    if do in ("explain", "bisect") and options.passes is None:
        sides[0] = sides[0] or "default"  # what they take to be meant
    told = [n for n in ("contract", "frozen", "assume", "disable") if getattr(options, n)]
    if told and not any(sides):
        raise InputError(f"--{told[0]} is for passes: found none, wanted --passes default or names")
    run = [side for side in sides if side]
    twice = next((fault for side in run if (fault := asked_twice(side, options.disable))), None)
    idle = [without_effect(side, options.disable) for side in run]
    if twice or (idle and all(idle)):
        raise InputError(f"--disable: {twice or idle[0]}")
    if options.contract and not any(side and DEFAULT in side for side in sides):
        raise InputError(
            f"--contract says what 'default' stands for: found --passes {options.passes}, wanted "
            "'default' in it, or no --contract"
        )


def mesh_from(text: str) -> dict[str, int]:
    """``data=4,model=2`` as extents by axis.

    Raises:
        InputError: the text has another form.
    """
    mesh: dict[str, int] = {}
    for item in text.split(","):
        name, equals, extent = item.strip().partition("=")
        if not name or not equals or not extent.isdecimal() or int(extent) < 1 or name in mesh:
            raise InputError(f"--mesh {text!r}: wanted AXIS=N,AXIS=N, as in 'data=4,model=2'")
        mesh[name] = int(extent)
    return mesh
