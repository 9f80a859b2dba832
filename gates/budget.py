"""Budgets: what a count or a cost may be, by itself or relative to another program.

A budget is a metric and bounds, as in ``ops.total <= 1.00x base`` or ``kernels >= 1, <= 4``. A
bound is a comparison with a number, or with a multiple (``0.9x``) of what another variant has;
``x`` without a name means the program that the cell refers to. Arithmetic is exact.
"""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..lowering.errors import InputError
from ..lowering.program import Program
from .operations import check_operation

Number = int | float | Fraction
Measure = Callable[[str, str | None], Number | None]
"""The value of a metric for the cell's program (None) or for a reference; None if not known."""

COMPARISONS: Mapping[str, Callable[[Fraction, Fraction], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
OTHER = ""
"""The reference that stands for the program the cell refers to."""

_BOUND = re.compile(
    r"(?P<sign><=|>=|==|!=|<|>)\s*(?P<number>\d+(?:\.\d+)?(?:e\d+)?)"
    r"(?:\s*(?P<unit>KiB|MiB|GiB)|(?P<times>x)(?:\s+(?P<reference>[A-Za-z0-9_.+-]+))?)?"
)
_SENTENCE = re.compile(r"(?P<metric>[^<>=!]+?)\s*(?P<bounds>[<>=!].*)", re.S)
_WANTED = "wanted bounds such as '<= 2', '>= 1, <= 4' or '<= 1.00x VARIANT'"


@dataclass(frozen=True)
class Bound:
    """One comparison."""

    sign: str
    amount: Fraction
    """The number to compare with, or the factor."""
    reference: str | None = None
    """``VARIANT`` or ``VARIANT+PASSES``, `OTHER`, or None for a plain number."""
    text: str = ""
    """As the user wrote it."""


@dataclass(frozen=True)
class Budget:
    """Bounds of one metric, all of which must hold."""

    metric: str
    bounds: tuple[Bound, ...]


@dataclass(frozen=True)
class Miss:
    """A bound that doesn't hold, or can't be decided."""

    kind: Literal["broken", "undecided"]
    text: str


def _operation(rest: str, where: str) -> None:
    if rest != "total":
        check_operation(rest, where)


def _anything(rest: str, where: str) -> None:
    pass


def _operands(rest: str, where: str) -> None:
    if rest != "operands":
        raise InputError(f"{where}: no metric 'sorts.{rest}'; wanted 'sorts.operands'")


_HLO = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _compiled_operation(rest: str, where: str) -> None:
    if not _HLO.fullmatch(rest):
        raise InputError(f"{where}: 'hlo.{rest}'; wanted an HLO operation, as in 'hlo.all-gather'")


FAMILIES: dict[str, Callable[[str, str], None] | None] = {
    "ops": _operation,
    "kernels": _anything,
    "cycles": None,
    "temp": None,
    "peak": None,
    "code": None,
    "sorts": _operands,
    "hlo": _compiled_operation,
}
"""What a metric may begin with, and the check of what follows its first dot; None: nothing may."""
COMPILED = frozenset(("cycles", "temp", "peak", "code", "sorts", "hlo"))
"""Families of the program as the TPU compiler leaves it; all others are of the lowered one."""
_BARE = frozenset(("kernels",))
"""Families that are a metric without anything following."""


def parse_budget(sentence: str, where: str) -> Budget:
    """``METRIC BOUNDS``, as in ``ops.total <= 1.00x base``.

    Raises:
        InputError: another form, an unknown metric, or a bound that can't fail or can't hold.
    """
    match = _SENTENCE.fullmatch(sentence.strip())
    if match is None:
        raise InputError(f"{where}: {sentence!r}; wanted METRIC and bounds: 'ops.total <= 1x base'")
    check_metric(match["metric"], where)
    return Budget(match["metric"], parse_bounds(match["bounds"], where))


def check_metric(metric: str, where: str) -> None:
    """Raises `InputError` where nothing measures ``metric``."""
    family, dot, rest = metric.partition(".")
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FAMILIES)}"
        raise InputError(f"{where}: no metric {metric!r}; {hint}")
    check = FAMILIES[family]
    if check is None or not dot:
        if bool(dot) or not (check is None or family in _BARE):
            raise InputError(f"{where}: no metric {metric!r}")
        return
    if not rest:
        raise InputError(f"{where}: {metric!r} names nothing after its dot")
    check(rest, where)


def parse_bounds(text: str, where: str) -> tuple[Bound, ...]:
    """``<= 2``, ``>= 1, <= 4`` or ``<= 1.00x base``.

    Raises:
        InputError: another form, or a bound that can't fail or can't hold.
    """
    return tuple(_bound(part.strip(), where) for part in text.split(","))


def _bound(text: str, where: str) -> Bound:
    match = _BOUND.fullmatch(text)
    if match is None:
        raise InputError(f"{where}: {text!r}; {_WANTED}")
    sign = match["sign"]
    amount = Fraction(match["number"]) * UNITS.get(match["unit"] or "", 1)
    reference = (match["reference"] or OTHER) if match["times"] else None
    if match["times"] and not amount:
        raise InputError(f"{where}: {text!r} has a factor of 0; {_WANTED}")
    if not amount and sign in (">=", "<"):  # nothing that is measured is below 0
        says = "always" if sign == ">=" else "never"
        raise InputError(f"{where}: {text!r} {says} holds")
    return Bound(sign, amount, reference, text)


def references(budgets: Sequence[Budget]) -> tuple[str, ...]:
    """The programs that bounds refer to by name."""
    names = (bound.reference for budget in budgets for bound in budget.bounds)
    return tuple(dict.fromkeys(name for name in names if name))


def check(budgets: Sequence[Budget], name: str, other: str, measure: Measure) -> list[Miss]:
    """The bounds that don't hold.

    Args:
        budgets: what is wanted.
        name: what messages call the program.
        other: what messages call the program that the cell refers to.
        measure: the value of a metric, for the program or for a reference.
    """
    return [
        miss
        for budget in budgets
        for bound in budget.bounds
        if (miss := _miss(budget.metric, bound, name, other, measure)) is not None
    ]


def _miss(metric: str, bound: Bound, name: str, other: str, measure: Measure) -> Miss | None:
    value = measure(metric, None)
    if value is None:
        return Miss("undecided", f"{name}: {metric} isn't known")
    limit, of = bound.amount, ""
    base: Number | None = None
    if bound.reference is not None:
        called = bound.reference or other
        base = measure(metric, bound.reference)
        if base is None:
            return Miss("undecided", f"{called}: {metric} isn't known")
        limit = bound.amount * Fraction(base)
        of = f", which has {_shown(base)}" if bound.reference else f" of {called}, {_shown(base)}"
        if not base and bound.sign in (">=", "<"):
            says = "can't fail" if bound.sign == ">=" else "can't hold"
            return Miss("broken", f"{name}: {metric} {bound.text}: {called} has none, so it {says}")
    unmet = metric.startswith("kernels.") and not value and not base and bound.amount
    if unmet and bound.sign in ("<=", "<"):
        text = "no kernel is called so, and then the bound can't fail (0 says that there is none)"
        return Miss("broken", f"{name}: {metric} {bound.text}: {text}")
    if COMPARISONS[bound.sign](Fraction(value), limit):
        return None
    return Miss("broken", f"{name}: {metric} is {_shown(value)}; wanted {bound.text}{of}")


def _shown(value: Number) -> str:
    if isinstance(value, int) or Fraction(value).denominator == 1:
        return f"{int(value):,}"
    return f"{float(value):,g}"


def measured(program: Program, metric: str) -> int | None:
    """The value of a metric that a lowered program shows by itself; None for any other.

    None too for the calls of a kernel by name, where its body is called by other names as well.
    """
    family, _, rest = metric.partition(".")
    if family == "ops":
        return sum(program.ops.values()) if rest == "total" else program.ops.get(rest, 0)
    if family != "kernels":
        return None
    total = 0
    for key, count in program.kernel_calls.items():
        meant = {not rest or fnmatch.fnmatchcase(name, rest) for name in program.kernels[key].names}
        if len(meant) > 1:
            return None
        total += count * meant.pop()
    return total
