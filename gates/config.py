"""``relower.toml``: the matrix of what must be identical and what must differ, read strictly."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Level
from .budget import OTHER, Budget, check_metric, parse_bounds, parse_budget, references
from .child import PassSet, passes_from
from .containment import checked

Kind = Literal["identical", "differs", "snapshot"]
DEFAULT_TIMEOUT = 900.0
"""Seconds for one lowering."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
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


@dataclass(frozen=True)
class Node:
    """One program to lower: a variant under a pass set."""

    program: str
    variant: str
    pass_set: str
    spec: str
    args: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...] | None
    passes: PassSet
    target: str | None
    route: str | None
    inputs: tuple[str, ...] = ()
    """Patterns of files that the case reads besides its sources."""

    @property
    def name(self) -> str:
        """``variant`` or ``variant+passes``."""
        return self.variant if self.pass_set == "none" else f"{self.variant}+{self.pass_set}"

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for nodes that are one lowering."""
        where = (self.target, self.route)
        return (self.spec, self.args, self.mesh, self.passes, *where, self.inputs)


@dataclass(frozen=True)
class Cell:
    """One expectation."""

    program: str
    node: Node
    other: Node | None
    """What it is compared with; None is its snapshot."""
    identical: bool
    """Must be identical; else must differ."""
    level: Level
    only_in: tuple[str, ...] = ()
    kernels: int | Mapping[str, int] | None = None
    ops: Mapping[str, int] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    budgets: tuple[Budget, ...] = ()
    references: Mapping[str, Node] = field(default_factory=dict)
    """The programs that budgets name."""

    @property
    def name(self) -> str:
        """As in ``moe: plain+packed = by_hand (dataflow)``."""
        sign = "=" if self.identical else "≠"
        other = "snapshot" if self.other is None else self.other.name
        return f"{self.program}: {self.node.name} {sign} {other} ({self.level})"

    @property
    def kind(self) -> Kind:
        """What it expects."""
        if self.other is None:
            return "snapshot"
        return "identical" if self.identical else "differs"

    def nodes(self) -> tuple[Node, ...]:
        """Every program that has to be lowered for it."""
        other = () if self.other is None else (self.other,)
        return (self.node, *other, *self.references.values())


@dataclass(frozen=True)
class Matrix:
    """All cells of one file."""

    path: Path
    cells: tuple[Cell, ...]
    timeout: float
    controls: bool
    """Whether there must be a negative control."""

    @property
    def folder(self) -> Path:
        """What paths in the file are relative to."""
        return self.path.parent

    def nodes(self) -> tuple[Node, ...]:
        """Every program that a cell names, once."""
        return tuple(dict.fromkeys(node for cell in self.cells for node in cell.nodes()))


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
    _keys(data, _TOP, "the file")
    gate = _table(data.get("gate", {}), "[gate]")
    _keys(gate, _GATE, "[gate]")
    programs = data.get("program", [])
    if not isinstance(programs, list):
        raise InputError("program: wanted [[program]], with two brackets")
    cells: list[Cell] = []
    names: set[str] = set()
    for number, entry in enumerate(programs, 1):
        reader = _Program(gate, _table(entry, f"[[program]] {number}"), number)
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
        self.name = _name(entry.get("name"), f"[[program]] {number} name")
        self._where = f"program {self.name!r}"
        _keys(entry, _PROGRAM, self._where)
        self._gate = gate
        self._entry = entry
        self._variants = _table(entry.get("variants", {}), f"{self._where} variants")
        self._sets: dict[str, PassSet] = {"none": None, "default": "default"}
        for name, value in _table(entry.get("passes", {}), f"{self._where} passes").items():
            if name in ("none", "default"):
                raise InputError(f"{self._where} passes: {name!r} is defined already")
            where = f"{self._where} passes.{name}"
            if value != "default" and not isinstance(value, list):
                raise InputError(f"{where}: {value!r}; wanted a list of names, or 'default'")
            self._sets[_name(name, where)] = passes_from(value)
        for name in self._variants:
            _name(name, f"{self._where} variants")

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
            entry = _table(value, where)
            _keys(entry, _CELL, where)
            for variant in _names(entry.get("variant"), f"{where} variant"):
                for pass_set in _names(entry.get("passes", "none"), f"{where} passes"):
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
            () if written is None else _names(written, f"{where} only-in"), f"{where} only-in"
        )
        if only_in and identical:
            raise InputError(f"{where}: only-in goes with differs-from, not with {given[0]}")
        allow = _names(entry.get("allow", []), f"{where} allow", strict=False)
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
        _known(variant, self._variants, f"{where}: variant")
        _known(pass_set, self._sets, f"{where}: pass set")
        value = self._variants[variant]
        what = f"{self._where} variants.{variant}"
        table = {"case": value} if isinstance(value, str) else _table(value, what)
        _keys(table, _VARIANT, what)
        spec = table.get("case")
        if not isinstance(spec, str) or ":" not in spec:
            raise InputError(f"{what} case: {spec!r}; wanted 'FILE.py:NAME'")
        mesh = table.get("mesh")
        extents = None if mesh is None else tuple(_counts(mesh, f"{what} mesh").items())
        return Node(
            program=self.name,
            variant=variant,
            pass_set=pass_set,
            spec=spec,
            args=_names(table.get("args", []), f"{what} args", strict=False),
            mesh=extents,
            passes=self._sets[pass_set],
            target=_text(table.get("target", self._gate.get("target")), f"{what} target"),
            route=_text(table.get("route", self._gate.get("route")), f"{what} route"),
            inputs=_inputs(self._entry, self._where) + _inputs(table, what),
        )


def _keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"{where}: unknown key {key!r}; {hint}")


def _known(name: str, names: Mapping[str, Any], where: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
        raise InputError(f"{where} {name!r} isn't defined; {hint}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {value!r}; wanted a table")
    return value


def _text(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}: {value!r}; wanted a string")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(f"{where}: {value!r}; wanted letters, digits, '_', '-' and '.'")
    return value


def _names(value: Any, where: str, strict: bool = True) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) and strict else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        kind = "a string or a list of strings" if strict else "a list of strings"
        raise InputError(f"{where}: {value!r}; wanted {kind}")
    if strict and not values:
        raise InputError(f"{where}: the list is empty")
    return tuple(values)


def _counts(value: Any, where: str) -> dict[str, int]:
    table = _table(value, where)
    for name, count in table.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InputError(
                f"{where}.{name}: {count!r}; wanted a number (write names with dots in quotes)"
            )
    return table


def _inputs(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    return _names(table.get("inputs", []), f"{where} inputs", strict=False)


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
    elif kernels is not None and not _is_count(kernels):
        raise InputError(f"{where} kernels: {kernels!r}; wanted a number of calls, bounds as in "
                         "'<= 3', or a table by name")  # fmt: skip
    if "budget" in entry:
        for sentence in _names(entry["budget"], f"{where} budget"):
            budgets.append(parse_budget(sentence, f"{where} budget"))
    return ops, kernels, tuple(budgets)


def _split(value: Any, family: str, where: str, budgets: list[Budget]) -> dict[str, int]:
    """The exact counts of a table; its bounds are added to ``budgets``."""
    counts: dict[str, int] = {}
    for name, count in _table(value, f"{where} {family}").items():
        here = f"{where} {family}.{name}"
        if not _is_count(count) and not isinstance(count, str):
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
