"""All_gathers and psum_scatters of one body that one of them could do together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..compat import jaxprs
from ..compat.jaxprs import Eqn, Var
from ..compat.primitives import primitive
from .collective_checks import (
    ANY_SUMS,
    CHECKS,
    PARAMS,
    Check,
    Difference,
    dimension,
    is_bfloat16_sum,
    is_gather,
    other_operand,
    roots,
)
from .graph import Scope
from .motion import is_barrier, is_pure, made_after
from .side_by_side import Form, forms


@dataclass
class Group:
    """Collectives that can be one, in order; each alone where it fits no other."""

    members: list[int]
    forms: frozenset[Form]
    """The ways in which all operands fit side by side."""
    needs: int
    """Other groups whose results the operands depend on, however indirectly: bits by position."""


class Collectives:
    """The collectives of one body and how they can be joined."""

    def __init__(self, scope: Scope, *, widened: bool = False) -> None:
        """Of those ``widened``, sums of bfloat16 alone, which are to be taken in float32."""
        self.eqns = scope.eqns
        self._widened = widened
        known = roots()
        self.indices = [
            i
            for i in scope.live
            if scope.eqns[i].primitive in known
            and set(scope.eqns[i].params) <= PARAMS
            and (not widened or is_bfloat16_sum(scope.eqns[i]))
            and jaxprs.is_var(scope.eqns[i].invars[0])
            and scope.readers(scope.eqns[i].outvars[0])  # its axis name alone keeps a dead one live
        ]
        self._place = {index: n for n, index in enumerate(self.indices)}
        self._alike: dict[tuple[Any, Any], bool] = {}

    @cached_property
    def _made(self) -> dict[Var, int]:
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @cached_property
    def _sweep(self) -> tuple[dict[int, int], dict[int, int]]:
        """For each collective, those that its operand depends on, as bits by position.

        And the last equation that has an effect, or is a barrier, that its operand depends on.
        """
        below: dict[Var, int] = {}
        held: dict[Var, int] = {}
        ancestors: dict[int, int] = {}
        latest: dict[int, int] = {}
        for index, eqn in enumerate(self.eqns):
            read = [a for a in eqn.invars if jaxprs.is_var(a)]
            bits, last = 0, -1
            for atom in read:
                bits |= below.get(atom, 0)
                last = max(last, held.get(atom, -1))
            if index in self._place:
                ancestors[index], latest[index] = bits, last
                bits |= 1 << self._place[index]
            if not is_pure(eqn) or is_barrier(eqn):
                last = index
            if bits:
                below.update((v, bits) for v in eqn.outvars)
            if last >= 0:
                held.update((v, last) for v in eqn.outvars)
        return ancestors, latest

    def _checks(self) -> list[Check]:
        return [c for c in CHECKS if not (self._widened and c in ANY_SUMS)]

    def depends(self, index: int, on: int) -> bool:
        """Whether a collective's operand depends on the result of another."""
        return bool(self._sweep[0][index] >> self._place[on] & 1)

    @cached_property
    def primitives(self) -> frozenset[Any]:
        """The primitives, as objects, of the collectives that there are."""
        return frozenset(self.eqns[i].primitive for i in self.indices)

    def group(self, index: int) -> Group | None:
        """The group that a collective belongs to; None of an equation that is none."""
        return self._groups.get(index)

    @cached_property
    def _groups(self) -> dict[int, Group]:
        """Each collective in the first group that it fits, or in one of its own.

        A group is a bit here, so that what can't be is left out at once: a collective is compared
        with each kind of collectives, and not with each of them.
        """
        groups: list[Group] = []
        by_kind: dict[Hashable, int] = {}  # of their first members
        by_operand: dict[Var, int] = {}
        below: dict[Var, int] = {}
        found: dict[int, Group] = {}
        for index, eqn in enumerate(self.eqns):
            bits = 0
            for atom in eqn.invars:
                if jaxprs.is_var(atom):
                    bits |= below.get(atom, 0)
            if index in self._place:
                operand, kind = eqn.invars[0], _kind(eqn)
                closed, same = self._closure(groups, bits), by_operand.get(operand, 0)
                n = self._first_fit(groups, by_kind, index, closed | same)
                if n == len(groups):
                    groups.append(Group([], _forms(eqn), 0))
                    by_kind[kind] = by_kind.get(kind, 0) | 1 << n
                found[index] = groups[n]
                groups[n].members.append(index)
                groups[n].forms &= _forms(eqn)
                self._need(groups, n, closed)
                by_operand[operand] = same | 1 << n
                bits |= 1 << n
            if bits:
                below.update((v, bits) for v in eqn.outvars)
        return found

    def _first_fit(
        self, groups: list[Group], by_kind: dict[Hashable, int], index: int, barred: int
    ) -> int:
        """The first group that a collective fits, but for those ``barred``; else a new one."""
        kind, forms = _kind(self.eqns[index]), _forms(self.eqns[index])
        # An effect or barrier that the operand depends on stands after the first of these groups.
        early = bisect_left(groups, self._sweep[1][index], key=lambda g: g.members[0])
        fitting = 0
        for other, those in by_kind.items():
            first = groups[those.bit_length() - 1].members[0]
            if self._are_alike(kind, other, first, index):
                fitting |= those
        for n in _bits(fitting & ~(barred | (1 << early) - 1)):
            if groups[n].forms & forms and not self._placing(groups[n].members[0], index):
                return n
        return len(groups)

    def _are_alike(self, kind: Hashable, other: Hashable, first: int, index: int) -> bool:
        """Whether nothing but operands and places can keep collectives of two kinds apart."""
        known = self._alike.get((other, kind))
        if known is None:
            a, b = self.eqns[first], self.eqns[index]
            known = all(c(a, b) is None for c in self._checks() if c is not other_operand)
            self._alike[other, kind] = known
        return known

    @staticmethod
    def _closure(groups: list[Group], needs: int) -> int:
        """Groups and all that they need; what a group needs is complete."""
        closed, waiting = needs, needs
        while waiting:
            last = waiting.bit_length() - 1
            closed |= groups[last].needs
            waiting &= ~(groups[last].needs | 1 << last)
        return closed

    @staticmethod
    def _need(groups: list[Group], n: int, closed: int) -> None:
        """State that group ``n``, and so those that need it, need the groups ``closed``."""
        if not closed & ~groups[n].needs:
            return
        groups[n].needs |= closed
        for group in groups:
            if group.needs >> n & 1:
                group.needs |= closed

    def nearest_differences(self, index: int) -> list[Difference] | None:
        """The fewest differences from an earlier gather, or sum; the nearest of several as near.

        None where none is earlier. Of one kind, only three can be it: the nearest that ``index``
        depends on, and, of the others, the nearest with the same operand and with another.
        """
        eqn, place = self.eqns[index], self._place[index]
        same = self._by_operand.get(eqn.invars[0], 0)
        ancestors, before = self._sweep[0][index], (1 << place) - 1
        nearest = set()
        for those in self._by_kind[is_gather(eqn)].values():
            for among in (ancestors, same & ~ancestors, ~(same | ancestors)):
                bits = those & before & among
                if bits:
                    nearest.add(bits.bit_length() - 1)
        earlier = [self.indices[n] for n in sorted(nearest, reverse=True)]
        return min((self.differences(i, index) for i in earlier), key=len, default=None)

    @cached_property
    def _by_kind(self) -> dict[bool, dict[Hashable, int]]:
        """Gathers and sums of each kind, as bits by position."""
        found: dict[bool, dict[Hashable, int]] = {True: {}, False: {}}
        for n, index in enumerate(self.indices):
            eqn = self.eqns[index]
            kinds, kind = found[is_gather(eqn)], _kind(eqn)
            kinds[kind] = kinds.get(kind, 0) | 1 << n
        return found

    @cached_property
    def _by_operand(self) -> dict[Var, int]:
        """Collectives of each operand, as bits by position."""
        found: dict[Var, int] = {}
        for n, index in enumerate(self.indices):
            operand = self.eqns[index].invars[0]
            found[operand] = found.get(operand, 0) | 1 << n
        return found

    def differences(self, first: int, index: int) -> list[Difference]:
        """Everything for which a collective can't be done together with an earlier one."""
        a, b = self.eqns[first], self.eqns[index]
        found = [d for check in self._checks() if (d := check(a, b)) is not None]
        return found + self._placing(first, index)

    def _placing(self, first: int, index: int) -> list[Difference]:
        """Why the operand of the second can't be ready at the first."""
        if self.depends(index, first):
            return [Difference("dependent", "an operand computed from the other's result",
                               "independent operands")]  # fmt: skip
        if self._sweep[1][index] <= first:
            return []
        operand = self.eqns[index].invars[0]
        between = [self.eqns[i] for i in made_after(self.eqns, self._made, [operand], first)]
        wanted = "an operand that can be ready at the first"
        found = []
        effects = sorted({e.primitive.name for e in between if not is_pure(e)})
        if effects:
            found.append(Difference("effects", f"{', '.join(effects)} before it", wanted))
        if any(map(is_barrier, between)):
            found.append(Difference("barrier", "an operand that comes out of a barrier", wanted))
        return found


def collectives(scope: Scope, *, widened: bool = False) -> Collectives:
    """Those of a scope; looked for once. ``widened`` are sums of bfloat16, and no others."""
    key = Collectives, widened
    if key not in scope.memo:
        scope.memo[key] = Collectives(scope, widened=widened)
    known: Collectives = scope.memo[key]
    return known


def _bits(mask: int) -> Iterator[int]:
    """The positions of the bits that are set, from the lowest."""
    while mask:
        least = mask & -mask
        yield least.bit_length() - 1
        mask ^= least


def _kind(eqn: Eqn) -> Hashable:
    """All of a collective but which operand it has: two of one kind pass the same checks."""
    params = tuple(sorted((name, _frozen(value)) for name, value in eqn.params.items()))
    kind = (eqn.primitive, params, eqn.ctx, eqn.invars[0].aval, eqn.outvars[0].aval)
    try:
        hash(kind)
    except TypeError:
        return id(eqn)  # a kind of its own
    return kind


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _forms(eqn: Eqn) -> frozenset[Form]:
    return forms(eqn.invars[0].aval.shape, dimension(eqn), bool(eqn.params["tiled"]),
                 is_gather(eqn))  # fmt: skip


def outside(scope: Scope, index: int, *, widened: bool = False) -> list[Difference]:
    """That a collective of the same kind stands in a body around this one's, if one does."""
    eqn = scope.eqns[index]
    while scope.callers:
        caller = scope.callers[0]
        call, scope = caller.scope.eqns[caller.index], caller.scope
        if call.primitive is primitive("custom_jvp_call_p"):
            return []  # as a packed one is, which has its own verdict
        if eqn.primitive in collectives(scope, widened=widened).primitives:
            found = f"one in a body of {call.primitive.name}"
            return [Difference("scope", found, "both in one body")]
    return []
