"""``relower.toml``: the matrix of what must be identical and what must differ, read strictly."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Level
from . import pass_sets, values
from .budget import OTHER, Budget, check_metric, parse_bounds, parse_budget, references
from .cells import Cell, Matrix, Node
from .containment import checked

DEFAULT_TIMEOUT = 900.0
"""Seconds for one lowering."""

_TOP = ("gate", "program")
LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""Seconds; what the operating system's waits can't count is refused."""
_GATE = ("target", "route", "level", "timeout", "controls")
_PROGRAM = ("name", "variants", "passes", "cell", "level", "inputs")
_VARIANT = ("case", "args", "mesh", "target", "route", "inputs")
_CELL = (
    "variant",
    "passes",
    "identical-to",
    "differs-from",
    "snapshot",
    "level",
    "only-in",
    "kernels",
    "ops",
    "budget",
    "allow",
)
_EXPECTATIONS = ("identical-to", "differs-from", "snapshot")


def load_matrix(path: str | Path) -> Matrix:
    """Reads a gate file.

    Raises:
        InputError: no such file, not TOML, an unknown key, or a name that nothing defines. One
            line that names the key and what was wanted.
    """
    file = Path(path)
    try:
        data = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise InputError(f"{file}: can't be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file}: not TOML: {error}") from error
    try:
        return _matrix(file.resolve(), data)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _matrix(path: Path, data: dict[str, Any]) -> Matrix:
    values.check_keys(data, _TOP, "the file")
    gate = values.table(data.get("gate", {}), "[gate]")
    values.check_keys(gate, _GATE, "[gate]")
    programs = data.get("program", [])
    if not isinstance(programs, list):
        raise InputError("program: wanted [[program]], with two brackets")
    cells: list[Cell] = []
    names: set[str] = set()
    for number, entry in enumerate(programs, 1):
        reader = _Program(gate, values.table(entry, f"[[program]] {number}"), number)
        if reader.name in names:
            raise InputError(f"two programs are named {reader.name!r}")
        names.add(reader.name)
        cells.extend(reader.cells())
    timeout = gate.get("timeout", DEFAULT_TIMEOUT)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < LONGEST_TIMEOUT:
        raise InputError(f"[gate] timeout: {timeout!r}; wanted seconds above 0")
    controls = gate.get("controls", True)
    if not isinstance(controls, bool):
        raise InputError(f"[gate] controls: {controls!r}; wanted true or false")
    return Matrix(path, tuple(cells), float(timeout), controls)


class _Program:
    """Reads one ``[[program]]``."""

    def __init__(self, gate: dict[str, Any], entry: dict[str, Any], number: int) -> None:
        self.name = values.name(entry.get("name"), f"[[program]] {number} name")
        self._where = f"program {self.name!r}"
        values.check_keys(entry, _PROGRAM, self._where)
        self._gate = gate
        self._entry = entry
        self._variants = values.table(entry.get("variants", {}), f"{self._where} variants")
        self._sets = {"none": pass_sets.NONE, "default": pass_sets.DEFAULT}
        for name, value in values.table(entry.get("passes", {}), f"{self._where} passes").items():
            if name in ("none", "default"):
                raise InputError(f"{self._where} passes: {name!r} is defined already")
            where = f"{self._where} passes.{name}"
            self._sets[values.name(name, where)] = pass_sets.pass_choice(value, where)
        for name in self._variants:
            values.name(name, f"{self._where} variants")

    def cells(self) -> list[Cell]:
        """Every cell, lists of variants and of pass sets multiplied out."""
        written = self._entry.get("cell", [])
        if not isinstance(written, list):
            raise InputError(f"{self._where} cell: wanted [[program.cell]], with two brackets")
        if not written:
            raise InputError(f"{self._where} has no [[program.cell]]")
        found: list[Cell] = []
        for number, value in enumerate(written, 1):
            where = f"{self._where} cell {number}"
            entry = values.table(value, where)
            values.check_keys(entry, _CELL, where)
            for variant in values.names(entry.get("variant"), f"{where} variant"):
                for pass_set in values.names(entry.get("passes", "none"), f"{where} passes"):
                    found.append(self._cell(entry, self._node(variant, pass_set, where), where))
        return found

    def _cell(self, entry: dict[str, Any], node: Node, where: str) -> Cell:
        given = [key for key in _EXPECTATIONS if key in entry]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InputError(f"{where}: wanted one of {', '.join(_EXPECTATIONS)}; found {found}")
        other = self._other(given[0], entry[given[0]], node, where)
        identical = given[0] != "differs-from"
        written = entry.get("only-in")
        only_in = checked(
            () if written is None else values.names(written, f"{where} only-in"), f"{where} only-in"
        )
        if only_in and identical:
            raise InputError(f"{where}: only-in goes with differs-from, not with {given[0]}")
        allow = values.names(entry.get("allow", []), f"{where} allow", strict=False)
        if allow and other is None:
            raise InputError(f"{where}: allow doesn't go with snapshot, of which each environment "
                             "has its own")  # fmt: skip
        ops, kernels, budgets = _expected(entry, where)
        return Cell(
            program=self.name,
            node=node,
            other=other,
            identical=identical,
            level=self._level(entry, where),
            only_in=only_in,
            kernels=kernels,
            ops=ops,
            allow=allow,
            budgets=budgets,
            references=self._references(budgets, node, other, where),
        )

    def _other(self, key: str, value: Any, node: Node, where: str) -> Node | None:
        if key == "snapshot":
            if value is not True:
                raise InputError(f"{where} snapshot: {value!r}; wanted true")
            return None
        if not isinstance(value, str):
            raise InputError(f"{where} {key}: {value!r}; wanted VARIANT or VARIANT+PASSES")
        other = self._named(value, f"{where} {key}")
        if other == node:
            raise InputError(f"{where}: {node.name} is compared with itself")
        return other

    def _references(
        self, budgets: Sequence[Budget], node: Node, other: Node | None, where: str
    ) -> dict[str, Node]:
        if other is None and any(b.reference == OTHER for x in budgets for b in x.bounds):
            raise InputError(
                f"{where}: a budget in 'x' alone has nothing to refer to beside a snapshot; name a "
                "VARIANT, as in '1x base'"
            )
        found = {name: self._named(name, f"{where} budget") for name in references(budgets)}
        if node in found.values():
            raise InputError(f"{where}: the budget of {node.name} is relative to itself")
        return found

    def _named(self, name: str, where: str) -> Node:
        variant, _, pass_set = name.partition("+")
        return self._node(variant, pass_set or "none", where)

    def _level(self, entry: dict[str, Any], where: str) -> Level:
        for table in (entry, self._entry, self._gate):
            if "level" in table:
                level = table["level"]
                if level not in LEVELS:
                    raise InputError(f"{where} level: {level!r}; wanted one of {', '.join(LEVELS)}")
                return level  # type: ignore[no-any-return]
        return "exact"

    def _node(self, variant: str, pass_set: str, where: str) -> Node:
        values.check_defined(variant, self._variants, f"{where}: variant")
        values.check_defined(pass_set, self._sets, f"{where}: pass set")
        value = self._variants[variant]
        what = f"{self._where} variants.{variant}"
        table = {"case": value} if isinstance(value, str) else values.table(value, what)
        values.check_keys(table, _VARIANT, what)
        spec = table.get("case")
        if not isinstance(spec, str) or ":" not in spec:
            raise InputError(f"{what} case: {spec!r}; wanted 'FILE.py:NAME'")
        mesh = table.get("mesh")
        extents = None if mesh is None else tuple(values.counts(mesh, f"{what} mesh").items())
        return Node(
            program=self.name,
            variant=variant,
            pass_set=pass_set,
            spec=spec,
            args=values.names(table.get("args", []), f"{what} args", strict=False),
            mesh=extents,
            choice=self._sets[pass_set],
            target=values.text(table.get("target", self._gate.get("target")), f"{what} target"),
            route=values.text(table.get("route", self._gate.get("route")), f"{what} route"),
            inputs=_inputs(self._entry, self._where) + _inputs(table, what),
        )


def _inputs(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    return values.names(table.get("inputs", []), f"{where} inputs", strict=False)


def _expected(
    entry: Mapping[str, Any], where: str
) -> tuple[dict[str, int], int | dict[str, int] | None, tuple[Budget, ...]]:
    """Exact counts of operations and kernels, and the budgets of both and of all else."""
    budgets: list[Budget] = []
    ops = _split(entry.get("ops", {}), "ops", where, budgets)
    kernels = entry.get("kernels")
    if isinstance(kernels, dict):
        kernels = _split(kernels, "kernels", where, budgets)
    elif isinstance(kernels, str):
        budgets.append(Budget("kernels", parse_bounds(kernels, f"{where} kernels")))
        kernels = None
    elif kernels is not None and not values.is_count(kernels):
        raise InputError(f"{where} kernels: {kernels!r}; wanted a number of calls, bounds as in "
                         "'<= 3', or a table by name")  # fmt: skip
    if "budget" in entry:
        for sentence in values.names(entry["budget"], f"{where} budget"):
            budgets.append(parse_budget(sentence, f"{where} budget"))
    return ops, kernels, tuple(budgets)


def _split(value: Any, family: str, where: str, budgets: list[Budget]) -> dict[str, int]:
    """The exact counts of a table; its bounds are added to ``budgets``."""
    counts: dict[str, int] = {}
    for name, count in values.table(value, f"{where} {family}").items():
        here = f"{where} {family}.{name}"
        if not values.is_count(count) and not isinstance(count, str):
            raise InputError(f"{here}: {count!r}; wanted a number, or bounds as in '<= 2' (write "
                             "names with dots in quotes)")  # fmt: skip
        check_metric(f"{family}.{name}", f"{where} {family}")
        if isinstance(count, str):
            budgets.append(Budget(f"{family}.{name}", parse_bounds(count, here)))
        elif (family, name) == ("ops", "total"):
            budgets.append(Budget("ops.total", parse_bounds(f"== {count}", here)))
        else:
            counts[name] = count
    return counts
