"""Pass sets of a gate's file: which passes run, and what they are told of the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..lowering.errors import InputError
from . import values
from .child import PassSet, passes_from

_KEYS = ("names", "contract", "disable", "frozen", "assume", "quiet")
CONTRACTS = ("bitwise", "value", "rounding")


@dataclass(frozen=True)
class PassChoice:
    """What stands under ``[program.passes]``."""

    passes: PassSet = None
    contract: str = "bitwise"
    """The loosest that runs where passes aren't named."""
    disable: tuple[str, ...] = ()
    """Passes, and sites by their addresses, that are off."""
    frozen: str | None = None
    assume: str | None = None
    quiet: bool = False
    """Whether a named pass that applies nowhere is no error."""


NONE = PassChoice()
DEFAULT = PassChoice("default")


def pass_choice(value: Any, where: str) -> PassChoice:
    """A pass set as it is written.

    Args:
        value: a list of names, ``"default"``, or a table with ``names`` or ``contract``, where
            neither stands for what runs by default.
        where: for messages.

    Raises:
        InputError: it is none of these.
    """
    if value == "default" or isinstance(value, list):
        return PassChoice(passes_from(value))
    if not isinstance(value, dict):
        raise InputError(f"{where}: {value!r}; wanted a list of names, 'default', or a table")
    values.check_keys(value, _KEYS, where)
    listed = value.get("names")
    if "contract" in value and isinstance(listed, list) and "default" not in listed:
        raise InputError(
            f"{where}: found both names and a contract, wanted one of them, or 'default' among the "
            "names, which the contract is of"
        )
    if not value:
        raise InputError(f"{where}: found an empty table, wanted one of {', '.join(_KEYS)}")
    names, contract = value.get("names"), value.get("contract", "bitwise")
    if names is not None and (not isinstance(names, list) or not names):
        raise InputError(f"{where} names: {names!r}; wanted a list of names")
    if contract not in CONTRACTS:
        raise InputError(f"{where} contract: {contract!r}; wanted one of {', '.join(CONTRACTS)}")
    quiet = value.get("quiet", False)
    disable = values.names(value.get("disable", []), f"{where} disable", strict=False)
    passes = "default" if names is None else passes_from(names)
    fault = asked_twice(passes, disable) or without_effect(passes, disable)
    if fault is not None:
        raise InputError(f"{where} disable: {fault}")
    if not isinstance(quiet, bool) or (quiet and names is None):
        raise InputError(f"{where} quiet: {quiet!r}; wanted true or false, beside names")
    return PassChoice(
        passes=passes,
        contract=contract,
        disable=disable,
        frozen=values.text(value.get("frozen"), f"{where} frozen"),
        assume=values.text(value.get("assume"), f"{where} assume"),
        quiet=quiet,
    )


def asked_twice(passes: PassSet, disable: Iterable[str]) -> str | None:
    """What is wrong where a pass is both asked for by name and turned off; None where none is."""
    named = () if passes is None or passes == "default" else passes
    both = next((name for name in disable if name in named), None)
    return both and f"{both} is asked for by name, too: wanted it in one of the two"


def without_effect(passes: PassSet, disable: Iterable[str]) -> str | None:
    """What is wrong where something is turned off that doesn't run; None where all may.

    Only where every pass is named is it known without loading them which run.
    """
    if passes is None or passes == "default" or "default" in passes:
        return None
    for off in disable:
        owner, at, _ = off.partition("@")
        if owner not in passes:
            said = f"{off} turns nothing off: the pass {owner}" if at else owner
            return f"{said} doesn't run here; the passes are {', '.join(passes)}"
    return None


def told(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request to a child says of passes, as `optimize` takes it."""
    passes = request["passes"]
    asked = {name: request[name] for name in ("disable", "frozen", "assume")}
    if passes in (None, "default") or "default" in passes:  # else there is nothing it is of
        asked["contract"] = request["contract"]
    return {**asked, "passes": None if passes == "default" else passes}
