"""``relower``: parse the command line, run one command, turn what happens into an exit code.

0 the programs are the same, or what was claimed holds; 1 they differ, or something is broken;
2 it could not be decided: bad input, a construct no rule knows, mixed environments.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from ..lowering.errors import InputError

COMMANDS = {
    "passes": "list the passes, and when each applies",
    "explain": "show every site that a pass would rewrite, or why it won't",
    "lower": "lower a case for the TPU and show what it holds",
    "diff": "compare two programs and say where they differ",
    "cost": "compile a case for a TPU on this host: cycles, memory, what a rewrite saves",
    "verify": "run every rewrite against what it replaces; with --mutants, broken ones too",
    "probe": "lower a case several times and say what isn't the same each time",
    "gate": "check what must be identical and what must differ",
    "lock": "write down which sites are rewritten, for the gate to notice what is lost",
    "bisect": "find the site that breaks a check",
    "fuzz": "test the passes: random programs with their patterns, and what must be true of them",
    "selftest": "test the comparison itself: it must see every mutant, and no noise",
}
"""Name and summary; each is a module of this package, loaded only when it is asked for."""

_OUTPUT_FAULTS = frozenset(
    (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
)
"""Errors without a file's name that writing to standard output can end in."""

UNDECIDED = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``relower`` with ``argv`` and returns the exit code; `sys.argv` where it is None."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know ASCII only
    previous = _end_on(signal.SIGTERM)
    try:
        options = build_parser(arguments).parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except InputError as error:
        return _refused(" ".join(str(error).split()), arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _fault(error, arguments)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _refused(message: str, arguments: Sequence[str]) -> int:
    """One line about bad input; with ``--json`` as an object as well, for whoever reads those."""
    print(f"relower: {message}", file=sys.stderr)
    if "--json" in arguments:
        try:
            print(json.dumps({"schema": "relower.error/1", "error": message}, ensure_ascii=False))
            sys.stdout.flush()
        except OSError as error:
            return _fault(error)
    return UNDECIDED


def _fault(error: OSError, arguments: Sequence[str] = ()) -> int:
    """One line about a file that can't be used, or about a report that can't be written."""
    if error.filename is None and error.errno in _OUTPUT_FAULTS:
        # The output's reader has gone or its disk is full: a verdict nobody can read is none. Keep
        # the interpreter from complaining again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"relower: can't write the report: {error}", file=sys.stderr)
        return UNDECIDED
    what = str(error) if error.filename is None else f"{error.filename}: {error.strerror or error}"
    return _refused(" ".join(what.split()), arguments)


def _end_on(number: signal.Signals) -> Any:
    """Lets a signal unwind the stack, which ends the children; returns the handler it had."""

    def end(*_: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(number, end)


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` reports."""
        raise InputError(f"{message.removeprefix('argument ')} (`{self.prog} --help` says more)")


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command line, filled in for the commands that ``arguments`` name."""
    parser = _Parser(
        prog="relower",
        description="Rewrite JAX programs, and prove on a CPU host what the rewrite did to the "
        "TPU program.",
        epilog="`relower COMMAND --help` says more. Exit codes: 0 same or holds, 1 different or "
        "broken, 2 could not be decided.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in arguments:
            importlib.import_module(f".{name}", __package__).add(commands, summary)
        else:
            commands.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
