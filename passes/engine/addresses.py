"""Addresses of single sites: ``pass@scope:function#k``, the same in every run and process.

An address names a place in the program *as it was traced*: the name-stack scope, the function of
the user's code, and which of the equations there that the pass could start from, counted in program
order whether or not they are sites. So no other site, fact or pass changes it. What one site put in
place is addressed through that site: ``pass@scope:function#k/other_pass#1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...compat import bodies as compat_bodies
from ...compat import jaxprs
from ...compat.jaxprs import Atom, Eqn, Var
from ...compat.source import name_stack, source_place
from ...matchers.dataflow import Dataflow
from ...matchers.graph import Scope, step_name
from ..base import Accepted, Pass
from ..disable import Disabled

_Line = str | None
_NO_NUMBER = "?"
"""The number of an equation of which it isn't known what it was made from."""


@dataclass(eq=False, slots=True)
class _Unit:
    """An equation as called from one line, of the program as traced or of a replacement."""

    primitive: Any
    path: str
    group: list[_Unit] = field(repr=False)
    """The equations it is counted among, in program order."""
    inside: tuple[_Unit, Pass] | None = None
    """The site that put it in place, and that site's pass."""


@dataclass(frozen=True, slots=True)
class _Made:
    """One result of an equation that a replacement consists of."""

    parent: Var
    owner: Pass = field(compare=False)
    primitives: tuple[Any, ...]
    """Those of all equations of the replacement."""
    index: int


@dataclass
class Addresses:
    """The addresses of one program's equations, and which sites are turned off."""

    disabled: Disabled = field(default_factory=Disabled)
    was_read: bool = False
    _units: dict[Var, dict[_Line, _Unit]] = field(default_factory=dict)
    _made: dict[Var, list[_Made]] = field(default_factory=dict)
    _by_path: dict[str, list[_Unit]] = field(default_factory=dict)
    _derived: dict[tuple[int, str], list[_Unit]] = field(default_factory=dict)
    _numbers: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    _keep: list[_Unit] = field(default_factory=list)
    """Units whose ids are keys."""

    def read(self, flow: Dataflow, roots: Iterable[Any]) -> None:
        """Number the equations of a program that nothing has been done to yet."""
        self.was_read = True
        reader = _Reader(self, frozenset(roots))
        reader.visit(flow.root, "", None)
        reader.number_dead()

    def of(self, p: Pass, scope: Scope, index: int) -> tuple[str, ...]:
        """The addresses of one equation of one scope for a pass: one for each line it is run from.

        Raises nothing: what can't be told apart has ``?`` for a number, and can't be turned off.
        """
        eqn = scope.eqns[index]
        lines = [place[0]] if (place := source_place(eqn)) else _lines(scope)
        units = dict.fromkeys(self._unit(eqn, line) for line in lines)
        return tuple(
            f"{p.name}@{self._path(u, p)}" if u is not None
            else f"{p.name}@{scope.name_stack(eqn)}#{_NO_NUMBER}"
            for u in units
        )  # fmt: skip

    def is_off(self, p: Pass, scope: Scope, index: int) -> bool:
        """Whether a site is turned off; asks for its calls to be told apart where only some are."""
        if not self.disabled:
            return False
        off = [self.disabled.is_off(a) for a in self.of(p, scope, index)]
        if any(off) and not all(off):
            _tell_apart(scope)
        return any(off)

    def follow(
        self,
        replaced: Iterable[tuple[Accepted, Sequence[Eqn]]],
        renamed: Iterable[dict[Var, Atom]],
    ) -> None:
        """Take note of what a round of rewriting put in place, and gave other names."""
        for site, eqns in replaced:
            root = next(iter(_named(site.match.eqn)), None)
            if root is None:
                continue
            parts = list(compat_bodies.with_nested(eqns))
            primitives = tuple(eqn.primitive for eqn in parts)
            for index, eqn in enumerate(parts):
                made = _Made(root, site.rewrite, primitives, index)
                for var in _named(eqn):
                    if made not in self._made.setdefault(var, []):
                        self._made[var].append(made)
        for mapping in renamed:
            for var, atom in mapping.items():
                if jaxprs.is_var(atom) and var in self._units and atom not in self._units:
                    self._units[atom] = self._units[var]

    def _unit(self, eqn: Eqn, line: _Line) -> _Unit | None:
        """The unit of an equation run from ``line``, by any of its results."""
        for var in _named(eqn):
            known = self._units.get(var, {}).get(line)
            if known is not None and known.primitive is eqn.primitive:
                return known
        for var in _named(eqn):
            for made in self._made.get(var, ()):
                parent = self._of_var(made.parent, line)
                if parent is not None and made.primitives[made.index] is eqn.primitive:
                    return self._inside(parent, made)
        for var in _named(eqn):
            for unit in self._units.get(var, {}).values():
                if unit.primitive is eqn.primitive:
                    return unit
        return None

    def _of_var(self, var: Var, line: _Line) -> _Unit | None:
        units = self._units.get(var)
        if units:
            return units.get(line) or next(iter(units.values()))
        for made in self._made.get(var, ()):
            parent = None if made.parent is var else self._of_var(made.parent, line)
            if parent is not None:
                return self._inside(parent, made)
        return None

    def _inside(self, parent: _Unit, made: _Made) -> _Unit:
        key = (id(parent), made.owner.name)
        units = self._derived.get(key)
        if units is None or len(units) != len(made.primitives):
            group: list[_Unit] = []
            inside = (parent, made.owner)
            group.extend(_Unit(primitive, "", group, inside) for primitive in made.primitives)
            units = self._derived[key] = group
            self._keep.extend(group)
        return units[made.index]

    def _path(self, unit: _Unit, p: Pass) -> str:
        """``scope:function#k``, k as counted for a pass."""
        number = self._counted(unit.group, p)[id(unit)]
        if unit.inside is None:
            return f"{unit.path}#{number}"
        parent, owner = unit.inside
        return f"{self._path(parent, owner)}/{owner.name}#{number}"

    def _counted(self, group: list[_Unit], p: Pass) -> dict[int, int]:
        """The number of each unit among those of its group that a pass could start from."""
        key = id(group), p.name
        known = self._numbers.get(key)
        if known is None:
            roots, count = p.roots(), 0
            known = self._numbers[key] = {}
            for unit in group:
                count += unit.primitive in roots
                known[id(unit)] = count
        return known


class _Reader:
    """Walks a program in its order, as if each call had its body to itself."""

    def __init__(self, addresses: Addresses, roots: frozenset[Any]) -> None:
        self.addresses = addresses
        self.roots = roots
        self.seen: set[tuple[int, _Line]] = set()
        self.places: dict[int, tuple[str, str] | None] = {}
        self.visited: list[tuple[Scope, str, tuple[str, str] | None]] = []

    def visit(self, scope: Scope, prefix: str, caller: tuple[str, str] | None) -> None:
        """One call of a scope; equations without a line of their own have that of the caller."""
        key = id(scope), caller and caller[0]
        if key in self.seen:
            return
        self.seen.add(key)
        self.visited.append((scope, prefix, caller))
        for index in scope.live:
            eqn = scope.eqns[index]
            children = scope.children.get(index)
            is_root = eqn.primitive in self.roots
            if not is_root and not children:
                continue
            place = self.place(eqn) or caller
            if is_root:
                self.add(eqn, prefix, place)
            for body_key, child in (children or {}).items():
                step = step_name(eqn, scope.entered(index, body_key))
                self.visit(child, f"{prefix}/{step}" if prefix else step, place)

    def number_dead(self) -> None:
        """What nothing reads, as a gradient that a mask drops, counts behind all that is live."""
        for scope, prefix, caller in self.visited:
            live = set(scope.live)
            for index, eqn in enumerate(scope.eqns):
                if index not in live and eqn.primitive in self.roots:
                    self.add(eqn, prefix, self.place(eqn) or caller)

    def place(self, eqn: Eqn) -> tuple[str, str] | None:
        if id(eqn) not in self.places:
            self.places[id(eqn)] = source_place(eqn)
        return self.places[id(eqn)]

    def add(self, eqn: Eqn, prefix: str, place: tuple[str, str] | None) -> None:
        line, function = place or (None, "")
        known = [self.addresses._units.setdefault(v, {}) for v in _named(eqn)]
        if not known or line in known[0]:
            return
        scope = "/".join(part for part in (prefix, name_stack(eqn)) if part)
        path = f"{scope}:{function}" if scope and function else scope or function
        group = self.addresses._by_path.setdefault(path, [])
        unit = _Unit(eqn.primitive, path, group)
        group.append(unit)
        for units in known:
            units[line] = unit


def _named(eqn: Eqn) -> Iterator[Var]:
    """The results that name an equation, the last first."""
    return (var for var in reversed(eqn.outvars) if not jaxprs.is_dropped(var))


def _lines(scope: Scope) -> list[_Line]:
    """The lines from which a scope is run, the innermost known of each call."""
    known: list[_Line] | None = scope.memo.get("lines")
    if known is None:
        found: Counter[_Line] = Counter()
        for caller in scope.callers:
            place = source_place(caller.scope.eqns[caller.index])
            found.update([place[0]] if place else _lines(caller.scope))
        known = scope.memo["lines"] = list(found) or [None]
    return known


def _tell_apart(scope: Scope) -> None:
    """Ask for each call of a body, and of those that run it, to be judged by itself."""
    waiting, seen = [scope], set()
    while waiting:
        scope = waiting.pop()
        if id(scope) in seen:
            continue
        seen.add(id(scope))
        scope.several_asked = scope.several_asked or len(scope.callers) > 1
        waiting += [caller.scope for caller in scope.callers]
