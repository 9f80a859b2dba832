"""Functions of somebody else's pass, called so that a fault in them is told as theirs.

What such a function raises, or returns of another type than a pass is asked for, is a fault of the
pass: neither of the program that is rewritten nor of relower. It is said in one line, with the
function and where it stands, where it happens and not where it would first do harm.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compat import jaxprs
from ..lowering.errors import InputError
from ..matchers.pattern import Mismatch
from .base import Match, Pass, Reason, Replacement, SiteDeclined, Whole

LONGEST = 300
"""Characters of somebody's message or value that are shown."""


class PassFault(InputError):
    """A function of a pass failed, or returned what no pass may; one line that names it."""


@dataclass(frozen=True)
class Guarded:
    """A function of a pass, its errors and results looked at. Equal where the function is."""

    fn: Callable[..., Any]
    owner: str
    role: str
    """What it is in the pass, as in ``find``."""
    kinds: tuple[type, ...]
    """Of which its result must be one."""
    wanted: str
    """The same, in words."""
    at: str = ""
    """On which equation, where its arguments don't tell."""
    count: int | None = None
    """How many arrays its result has."""

    def __call__(self, *args: Any) -> Any:
        """What the function returns.

        Raises:
          PassFault: it failed, or that is of another type.
        """
        try:
            found = self.fn(*args)
        except (PassFault, SiteDeclined):
            raise
        except Exception as error:
            raise failed(self.owner, self.role, self.fn, error, args, self.at) from error
        if not isinstance(found, self.kinds):
            raise self._returned(f"{_short(repr(found))} of type {type(found).__name__}", args)
        for way in _replacements(found):
            for atom in (*way.operands, *way.results):
                if not (jaxprs.is_var(atom) or jaxprs.is_literal(atom)):
                    said = f"{_short(repr(atom))} of type {type(atom).__name__} in a Replacement"
                    raise self._returned(said, args, "variables and literals, as value.atom is")
        if self.count is None:
            return found
        several: Any = found
        if len(several) != self.count:
            raise self._returned(f"a {type(found).__name__} of {len(several)}", args)
        for i, value in enumerate(several):
            if not hasattr(value, "dtype") and not isinstance(value, bool | int | float | complex):
                said = f"{_short(repr(value))} of type {type(value).__name__}"
                raise self._returned(f"{said} as result {i}", args)
        return found

    def _returned(self, what: str, args: tuple[Any, ...], wanted: str = "") -> PassFault:
        return PassFault(
            f"the pass {self.owner}: its {self.role}, {place_of(self.fn)}, returned {what}"
            f"{self.at or _at(args)}; wanted {wanted or self.wanted}"
        )


def _replacements(found: Any) -> list[Replacement]:
    """What a function returned that is to be put in place."""
    several = found.values() if isinstance(found, Mapping) else (found,)
    return [way for way in several if isinstance(way, Replacement)]


def guarded(p: Pass) -> Pass:
    """``p``, whose functions say what is wrong with them."""
    none = type(None)

    def of(fn: Any, role: str, kinds: tuple[type, ...], wanted: str) -> Any:
        return fn if fn is None else Guarded(fn, p.name, role, kinds, wanted)

    return replace(
        p,
        roots=of(p.roots, "roots", (frozenset, set), "a frozenset of primitives"),
        find=of(p.find, "find", (Match, Mismatch, none),
                "a Match, a Mismatch, or None where the equation is no candidate"),
        requirements=tuple(
            replace(q, check=of(q.check, f"check of the requirement {q.code!r}", (Reason, none),
                                "None where it holds, or a Reason why it doesn't"))
            for q in p.requirements
        ),
        profitable=of(p.profitable, "profitable", (Reason, none),
                      "None where the rewrite pays, or a Reason why it doesn't"),
        replace=of(p.replace, "replace", (Replacement,), "a Replacement"),
        alternatives=of(p.alternatives, "alternatives", (Mapping,),
                        "a dict of Replacement or Reason by name"),
        program=of(p.program, "program", (Whole, none), "a Whole, or None"),
    )  # fmt: skip


def guarded_way(owner: str, match: Match, way: Replacement) -> Replacement:
    """A replacement of a match whose ``fn`` says what is wrong with it."""
    if way.fn is None or isinstance(way.fn, Guarded):
        return way
    n = len(way.results)
    wanted = f"a list of {n} array{'' if n == 1 else 's'}, one for each of `results`"
    role, kinds = "fn of its Replacement", (list, tuple)
    return replace(way, fn=Guarded(way.fn, owner, role, kinds, wanted, _at((match,)), n))


def failed(
    owner: str,
    role: str,
    fn: Any,
    error: BaseException,
    args: tuple[Any, ...] = (),
    at: str = "",
) -> PassFault:
    """What a function of a pass raised, as one line that says where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = _short(": ".join([type(error).__name__, *lines[:1]]))
    file = _code_of(fn).co_filename if _code_of(fn) is not None else None
    inside = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if file is not None and Path(frame.filename).parent == Path(file).parent
    ]  # fmt: skip
    where = f" at {inside[-1].filename}:{inside[-1].lineno}" if inside else ""
    return PassFault(
        f"the pass {owner}: its {role}, {place_of(fn)}, failed{at or _at(args)}: {said}{where}"
    )


def place_of(fn: Any) -> str:
    """A function's name and ``file.py:line`` of its definition."""
    name = getattr(unwrapped(fn), "__name__", type(fn).__name__)
    code = _code_of(fn)
    return f"{name}" if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def unwrapped(fn: Any) -> Any:
    """The function in a partial, a bound method, a decorated one or a `Guarded`."""
    while True:
        if isinstance(fn, Guarded):
            fn = fn.fn
        elif isinstance(fn, functools.partial):
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif hasattr(fn, "__func__"):
            fn = fn.__func__
        else:
            return fn


def _code_of(fn: Any) -> Any:
    return getattr(unwrapped(fn), "__code__", None)


def _at(args: tuple[Any, ...]) -> str:
    """Which equation a pass was asked about."""
    match = args[0] if args else None
    if isinstance(match, Match):
        eqn, scope = match.eqn, match.scope
    elif len(args) == 2 and isinstance(args[1], int) and hasattr(args[0], "eqns"):
        scope, eqn = args[0], args[0].eqns[args[1]]
    else:
        return ""
    line = scope.source_line(eqn)
    shape = eqn.outvars[-1].aval.str_short(short_dtypes=True) if eqn.outvars else "no result"
    return f" on {eqn.primitive.name} → {shape}" + ("" if line is None else f" of {line}")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
