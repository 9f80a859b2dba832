"""``relower.toml``: the matrix of what must be identical and what must differ, read strictly."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..lowering.errors import InputError
from ..lowering.program import LEVELS, Level
from .child import PassSet, passes_from
from .containment import checked
from .operations import check_operation

DEFAULT_TIMEOUT = 900.0
"""Seconds for one lowering."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TOP = ("gate", "program")
LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""Seconds; what the operating system's waits can't count is refused."""
_GATE = ("target", "route", "level", "timeout", "controls")
_PROGRAM = ("name", "variants", "passes", "cell", "level")
_VARIANT = ("case", "args", "mesh", "target", "route")
_CELL = (
    "variant",
    "passes",
    "identical-to",
    "differs-from",
    "level",
    "only-in",
    "kernels",
    "ops",
    "allow",
)


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

    @property
    def name(self) -> str:
        """``variant`` or ``variant+passes``."""
        return self.variant if self.pass_set == "none" else f"{self.variant}+{self.pass_set}"

    @property
    def work(self) -> tuple[Any, ...]:
        """Equal for nodes that are one lowering."""
        return (self.spec, self.args, self.mesh, self.passes, self.target, self.route)


@dataclass(frozen=True)
class Cell:
    """One expectation."""

    program: str
    node: Node
    other: Node
    identical: bool
    """Must be identical; else must differ."""
    level: Level
    only_in: tuple[str, ...] = ()
    kernels: int | Mapping[str, int] | None = None
    ops: Mapping[str, int] = field(default_factory=dict)
    allow: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As in ``moe: plain+packed = by_hand (dataflow)``."""
        sign = "=" if self.identical else "≠"
        return f"{self.program}: {self.node.name} {sign} {self.other.name} ({self.level})"


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
        return tuple(dict.fromkeys(n for cell in self.cells for n in (cell.node, cell.other)))


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
        given = [key for key in ("identical-to", "differs-from") if key in entry]
        if len(given) != 1:
            both = "both" if given else "neither"
            raise InputError(f"{where}: wanted one of identical-to and differs-from, found {both}")
        reference = entry[given[0]]
        if not isinstance(reference, str):
            raise InputError(f"{where} {given[0]}: {reference!r}; wanted VARIANT or VARIANT+PASSES")
        variant, _, pass_set = reference.partition("+")
        other = self._node(variant, pass_set or "none", f"{where} {given[0]}")
        if other == node:
            raise InputError(f"{where}: {node.name} is compared with itself")
        identical = given[0] == "identical-to"
        only_in = _patterns(entry.get("only-in"), f"{where} only-in")
        if only_in and identical:
            raise InputError(f"{where}: only-in goes with differs-from, not with identical-to")
        return Cell(
            program=self.name,
            node=node,
            other=other,
            identical=identical,
            level=self._level(entry, where),
            only_in=only_in,
            kernels=_kernels(entry.get("kernels"), f"{where} kernels"),
            ops=_operations(entry.get("ops", {}), f"{where} ops"),
            allow=_names(entry.get("allow", []), f"{where} allow", strict=False),
        )

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


def _operations(value: Any, where: str) -> dict[str, int]:
    counts = _counts(value, where)
    for name in counts:
        check_operation(name, where)
    return counts


def _kernels(value: Any, where: str) -> int | Mapping[str, int] | None:
    if value is None or isinstance(value, dict):
        return None if value is None else _counts(value, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{where}: {value!r}; wanted a number of calls, or a table by name")
    return value


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    return () if value is None else checked(_names(value, where), where)
