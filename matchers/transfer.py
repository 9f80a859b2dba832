"""The table of transfer rules, keyed by primitive objects."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..compat.assume_range import assume_range_p
from ..compat.primitives import primitive
from . import transfer_bits, transfer_exact, transfer_layout, transfer_numeric, transfer_search
from .fact import Fact, limits, meet
from .transfer_numeric import Rule


@functools.cache
def rules() -> dict[Any, tuple[Rule, bool]]:
    """For each primitive its rule, and whether that tells something of unknown operands."""
    table: dict[Any, tuple[Rule, bool]] = {assume_range_p: (assumed, True)}
    for module in (
        transfer_numeric,
        transfer_exact,
        transfer_bits,
        transfer_layout,
        transfer_search,
    ):
        for name, rule in module.RULES.items():
            found = primitive(name)
            if found is not None:
                table[found] = rule, name in module.SOURCES
    return table


@functools.cache
def elementwise() -> frozenset[Any]:
    """Primitives with a rule, each element of whose result is made of those at its own place."""
    names = """add_p sub_p mul_p neg_p div_p rem_p sign_p abs_p integer_pow_p square_p max_p min_p
    clamp_p convert_element_type_p and_p or_p xor_p not_p shift_left_p shift_right_arithmetic_p
    shift_right_logical_p""".split()
    return frozenset(primitive(name) for name in names) - {None}


@functools.cache
def _selecting() -> frozenset[Any]:
    names = "select_n_p eq_p ne_p lt_p le_p gt_p ge_p".split()
    return frozenset(primitive(name) for name in names) - {None}


def is_positionwise(eqn: Any) -> bool:
    """Whether an equation is elementwise, a select, or spreads a scalar."""
    if eqn.primitive is primitive("broadcast_in_dim_p"):
        return eqn.invars[0].aval.shape == ()  # type: ignore[no-any-return]
    return eqn.primitive in elementwise() or eqn.primitive in _selecting()


def assumed(eqn: Any, facts: Sequence[Fact]) -> Fact:
    """The range that the program states, narrowed by what is known anyway.

    Where the two contradict each other, what is proven stands (see `contradicts`).
    """
    aval = eqn.outvars[0].aval
    if contradicts(eqn, facts):
        return facts[0]
    found = meet(facts[0], aval, eqn.params["lo"], eqn.params["hi"])
    assert found is not None
    return found


def contradicts(eqn: Any, facts: Sequence[Fact]) -> bool:
    """Whether an assumed range has no value in common with what is known of the operand."""
    aval = eqn.outvars[0].aval
    if limits(aval.dtype) is None:
        return False
    return meet(facts[0], aval, eqn.params["lo"], eqn.params["hi"]) is None


def is_static(eqn: Any) -> bool:
    """Whether every shape is made of plain integers, not of an export's symbolic dimensions."""
    for variables in (eqn.invars, eqn.outvars):  # of each equation: generators would cost more
        for var in variables:
            for n in getattr(var.aval, "shape", ()):
                if type(n) is not int:
                    return False
    return True
