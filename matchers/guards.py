"""What a mask tells of other values at the places where it is true, and where it is false.

`jnp.where(i < 0, 0, i)` is never negative, but no equation of it shows that by itself: the select
must know that its predicate compares the very value that it selects. A `Guard` says so of a mask,
through `&`, `|`, `~`, exact conversions, changes of layout, and the bodies of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compat import jaxprs
from ..compat.primitives import primitive
from .fact import Fact, elements, limits, meet
from .subjects import Subject, Subjects, is_alias, layout_op
from .transfer import elementwise, is_static, rules

Interval = tuple[int, int]
Region = Mapping[Subject, Interval] | None
"""Bounds that all hold at a place; None where there is no such place."""

_DEPTH = 24
"""Equations that one question follows backwards."""
_EVALUATED = 3
"""Equations that are evaluated anew with narrowed operands."""
_NOTHING: dict[Subject, Interval] = {}


@dataclass(frozen=True, slots=True)
class Guard:
    """What holds at each place by the mask's value there."""

    false: Region
    true: Region

    def __bool__(self) -> bool:
        """Whether it tells anything."""
        return self.false is None or self.true is None or bool(self.false) or bool(self.true)

    def without(self, subject: Subject) -> Guard:
        """The same but for what it says of one value."""

        def rest(region: Region) -> Region:
            return region and {s: i for s, i in region.items() if s != subject}

        return Guard(rest(self.false), rest(self.true))


TELLS_NOTHING = Guard(_NOTHING, _NOTHING)


def both(a: Region, b: Region) -> Region:
    """Where the one and the other hold."""
    if a is None or b is None:
        return None
    result = dict(a)
    for subject, (lo, hi) in b.items():
        least, greatest = result.get(subject, (lo, hi))
        result[subject] = max(lo, least), min(hi, greatest)
    return None if any(lo > hi for lo, hi in result.values()) else result


def either(a: Region, b: Region) -> Region:
    """Where the one or the other holds: bounds on values that both speak of."""
    if a is None or b is None:
        return b if a is None else a
    return {s: (min(a[s][0], b[s][0]), max(a[s][1], b[s][1])) for s in a.keys() & b.keys()}


class Guards:
    """The guards of one body's masks, found when they are asked for."""

    def __init__(
        self,
        fact_of: Callable[[Any], Fact],
        producer: Callable[[Any], Any],
        given: Mapping[Any, Guard],
        of_call: Callable[[Any, Any], Guard | None],
        evaluate_call: Callable[[Any, Sequence[Fact]], Fact | None],
    ) -> None:
        self.subjects = Subjects(fact_of, producer)
        self._fact_of = fact_of
        self._producer = producer
        self._given = given
        self._of_call = of_call
        self._evaluate_call = evaluate_call
        self._known: dict[Any, Guard] = {}

    def of(self, mask: Any, depth: int = _DEPTH) -> Guard:
        """What a bool tells; of a literal, an input and an unknown equation, nothing."""
        if jaxprs.is_literal(mask) or depth == 0:
            return self._decided(mask, TELLS_NOTHING)
        known = self._known.get(mask)
        if known is None:
            known = self._known[mask] = self._decided(mask, self._find(mask, depth))
        return known

    def _decided(self, mask: Any, guard: Guard) -> Guard:
        constant = self._fact_of(mask).constant
        if constant is None:
            return guard
        return Guard(None, guard.true) if constant.value else Guard(guard.false, None)

    def _find(self, mask: Any, depth: int) -> Guard:
        itself = Guard({(mask, ()): (0, 0)}, {(mask, ()): (1, 1)})
        eqn = self._producer(mask)
        if eqn is None:
            given = self._given.get(mask, TELLS_NOTHING)
            return Guard(both(itself.false, given.false), both(itself.true, given.true))
        made = eqn.primitive
        operands = eqn.invars
        if made in _comparisons():
            return self._compared(eqn, _comparisons()[made], depth)
        if made is primitive("xor_p"):
            return self._compared(eqn, "ne", depth)
        if made is primitive("not_p"):
            inner = self.of(operands[0], depth - 1)
            return Guard(inner.true, inner.false)
        if made is primitive("and_p") or made is primitive("or_p"):
            a, b = (self.of(x, depth - 1) for x in operands)
            if made is primitive("and_p"):
                return Guard(either(a.false, b.false), both(a.true, b.true))
            return Guard(both(a.false, b.false), either(a.true, b.true))
        if made is primitive("select_n_p") and len(operands) == 3:
            return self._selected(*(self.of(x, depth - 1) for x in operands))
        if is_alias(eqn):
            return self.of(operands[eqn.outvars.index(mask)], depth - 1)
        if made is primitive("convert_element_type_p"):
            return self._converted(operands[0], depth)
        op = layout_op(eqn)
        if op is not None:
            return _laid_out(self.of(operands[0], depth - 1), op)
        found = self._of_call(eqn, mask)
        return itself if found is None else self._expanded(found, depth)

    def _expanded(self, guard: Guard, depth: int) -> Guard:
        """With what the masks that it speaks of tell in their turn."""

        def more(region: Region) -> Region:
            for (root, ops), (lo, hi) in (region or _NOTHING).items():
                if lo == hi and not ops and limits(root.aval.dtype) == (0, 1):
                    told = self.of(root, depth - 1)
                    region = both(region, told.true if lo else told.false)
            return region

        return Guard(more(guard.false), more(guard.true))

    @staticmethod
    def _selected(which: Guard, no: Guard, yes: Guard) -> Guard:
        return Guard(
            either(both(which.true, yes.false), both(which.false, no.false)),
            either(both(which.true, yes.true), both(which.false, no.true)),
        )

    def _converted(self, source: Any, depth: int) -> Guard:
        """Of a bool itself; of an integer, that it isn't zero."""
        limit = limits(source.aval.dtype)
        if limit == (0, 1):
            return self.of(source, depth - 1)
        if limit is None:
            return TELLS_NOTHING
        return Guard(self._is(source, (0, 0), depth), self._is_not(source, 0, depth))

    def _compared(self, eqn: Any, how: str, depth: int) -> Guard:
        x, y = eqn.invars
        if limits(x.aval.dtype) is None:
            return TELLS_NOTHING
        (a, b), (c, d) = (self._fact_of(v).range(v.aval.dtype) for v in (x, y))
        if how in ("eq", "ne"):
            shared = (max(a, c), min(b, d))
            same = both(self._is(x, shared, depth), self._is(y, shared, depth))
            differ: Region = _NOTHING
            if c == d:
                differ = self._is_not(x, c, depth)
            if a == b:
                differ = both(differ, self._is_not(y, a, depth))
            return Guard(differ, same) if how == "eq" else Guard(same, differ)
        gap = int(how in ("lt", "gt"))
        if how in ("gt", "ge"):
            x, y, a, b, c, d = y, x, c, d, a, b
        # ``x + gap <= y``, or else ``y + 1 - gap <= x``.
        true = both(self._is(x, (a, d - gap), depth), self._is(y, (a + gap, d), depth))
        false = both(self._is(x, (c + 1 - gap, b), depth), self._is(y, (c, b - 1 + gap), depth))
        return Guard(false, true)

    def where(self, atom: Any, lo: int, hi: int) -> Region:
        """What holds where an integer lies in ``[lo, hi]``."""
        return self._is(atom, (lo, hi), _DEPTH)

    def _is(self, atom: Any, interval: Interval, depth: int) -> Region:
        """That a value lies in an interval; of a converted bool, also what that bool tells."""
        lo, hi = self._fact_of(atom).range(atom.aval.dtype)
        lo, hi = max(lo, interval[0]), min(hi, interval[1])
        if lo > hi:
            return None
        subject = self.subjects.of(atom)
        if subject is None:
            return _NOTHING
        region: Region = {subject: (lo, hi)}
        root, ops = subject
        if lo == hi and not ops and limits(root.aval.dtype) == (0, 1):
            guard = self.of(root, depth - 1)
            region = both(region, guard.true if lo else guard.false)
        return both(region, self._clamped(root, lo, hi, depth)) if not ops and depth else region

    def _clamped(self, root: Any, lo: int, hi: int, depth: int) -> Region:
        """What a clamped value tells of the one before: nothing beyond the ends it stopped at."""
        eqn = self._producer(root)
        if eqn is None or eqn.primitive is not primitive("clamp_p"):
            return _NOTHING
        low, x, high = eqn.invars
        limit = limits(x.aval.dtype)
        ends = [self._fact_of(a).constant for a in (low, high)]
        if limit is None or None in ends:
            return _NOTHING
        least, greatest = (int(c.value) for c in ends if c is not None)
        if least >= greatest:
            return _NOTHING
        interval = limit[0] if lo <= least else lo, limit[1] if hi >= greatest else hi
        return self._is(x, interval, depth - 1)

    def _is_not(self, atom: Any, value: int, depth: int) -> Region:
        lo, hi = self._fact_of(atom).range(atom.aval.dtype)
        return self._is(atom, (lo + (lo == value), hi - (hi == value)), depth)

    def narrowed(self, atom: Any, region: Region, depth: int = _EVALUATED) -> Fact | None:
        """What is known of a value at the places of a region; None if there are none.

        No order: the places are some of the array's.
        """
        fact = elements(self._fact_of(atom))
        if region is None:
            return None
        if not region or jaxprs.is_literal(atom) or limits(atom.aval.dtype) is None:
            return fact
        subject = self.subjects.of(atom)
        if subject is not None and subject in region:
            inside = meet(fact, atom.aval, *region[subject])
            if inside is None:
                return None
            fact = inside
        eqn = self._producer(atom) if depth else None
        if eqn is None:
            return fact
        if eqn.primitive is primitive("select_n_p") and len(eqn.invars) == 3:
            better = self._chosen(eqn, region, depth - 1)
        else:
            better = self._evaluated(eqn, region, depth - 1)
        if better is None:
            return fact
        return meet(fact, atom.aval, *better.range(atom.aval.dtype))

    def _evaluated(self, eqn: Any, region: Region, depth: int) -> Fact | None:
        """An equation done anew with operands narrowed to a region; None if that tells no more."""
        is_call = eqn.primitive is primitive("jit_p")
        if not is_call and eqn.primitive not in elementwise():
            return None
        if not is_static(eqn):
            return None
        shape = eqn.outvars[0].aval.shape
        if any(getattr(x.aval, "shape", None) not in ((), shape) for x in eqn.invars):
            return None
        operands = [self.narrowed(x, region, depth) for x in eqn.invars]
        plain = [elements(self._fact_of(x)) for x in eqn.invars]
        known = [f for f in operands if f is not None]
        if len(known) < len(operands) or operands == plain:
            return None
        if is_call:
            return self._evaluate_call(eqn, known)
        found = rules()[eqn.primitive][0](eqn, known)
        assert isinstance(found, Fact)
        return self._remainder(eqn, known, found)

    def _remainder(self, eqn: Any, known: list[Fact], fact: Fact) -> Fact:
        """``rem(a, n) + n`` where the remainder is negative: in ``[1, n - 1]`` for positive n."""
        if eqn.primitive is not primitive("add_p"):
            return fact
        pairs = tuple(zip(eqn.invars, known))
        for (x, f), (n, g) in (pairs, pairs[::-1]):
            made = None if jaxprs.is_literal(x) else self._producer(x)
            if made is None or made.primitive is not primitive("rem_p") or made.invars[1] is not n:
                continue
            least, greatest = g.range(n.aval.dtype)
            if least > 0 and f.range(x.aval.dtype)[1] < 0:
                return meet(fact, eqn.outvars[0].aval, 1, greatest - 1) or fact
        return fact

    def chosen(self, eqn: Any) -> Fact | None:
        """The range of a select, each case only where it is chosen; None if no better."""
        return self._chosen(eqn, _NOTHING, _EVALUATED)

    def _chosen(self, eqn: Any, region: Region, depth: int) -> Fact | None:
        which, *cases = eqn.invars
        regions = self._regions(which, len(cases))
        if regions is None:
            return None
        found = [
            f
            for case, chosen in zip(cases, regions)
            if (f := self.narrowed(case, both(region, chosen), depth)) is not None
        ]
        return _hull(found, eqn.outvars[0].aval)

    def _regions(self, which: Any, count: int) -> list[Region] | None:
        """What holds where a selector picks each of ``count`` cases."""
        if limits(which.aval.dtype) == (0, 1):
            guard = self.of(which)
            return [guard.false, guard.true] if guard else None
        masks = self._first_true(which)
        if masks is None or len(masks) != count:
            return None
        regions: list[Region] = []
        none_yet: Region = _NOTHING
        for mask in masks:
            guard = self.of(mask)
            regions.append(both(none_yet, guard.true))
            none_yet = both(none_yet, guard.false)
        return [either(regions[0], none_yet), *regions[1:]]  # of no true one, argmax is 0

    def _first_true(self, which: Any) -> list[Any] | None:
        """The masks whose first true one an index tells, as `jnp.select` writes it."""
        found = None if jaxprs.is_literal(which) else self._producer(which)
        if found is None or found.primitive is not primitive("argmax_p"):
            return None
        stack = found.invars[0]
        (axis,) = found.params["axes"]
        made = None if jaxprs.is_literal(stack) else self._producer(stack)
        if limits(stack.aval.dtype) != (0, 1) or made is None:
            return None
        is_stack = made.primitive is primitive("stack_p") and made.params["axis"] == axis
        return list(made.invars) if is_stack else None

    def masked(self, eqn: Any) -> Fact | None:
        """The range of a product with a converted mask: zero where that is false."""
        for mask, value in (eqn.invars, eqn.invars[::-1]):
            subject = self.subjects.of(mask)
            if subject is None or limits(subject[0].aval.dtype) != (0, 1):
                continue
            guard = _through(self.of(subject[0]), subject[1])
            kept = self.narrowed(value, guard.true)
            zero = [] if guard.false is None else [Fact(0, 0)]
            return _hull(([] if kept is None else [kept]) + zero, eqn.outvars[0].aval)
        return None


def _hull(found: list[Fact], aval: Any) -> Fact | None:
    ranges = [f.range(aval.dtype) for f in found]
    if not ranges:
        return None
    return meet(Fact(), aval, min(lo for lo, _ in ranges), max(hi for _, hi in ranges))


def _laid_out(guard: Guard, op: Any) -> Guard:
    def moved(region: Region) -> Region:
        return region and {(root, (*ops, op)): i for (root, ops), i in region.items()}

    return Guard(moved(guard.false), moved(guard.true))


def _through(guard: Guard, ops: tuple[Any, ...]) -> Guard:
    for op in ops:
        guard = _laid_out(guard, op)
    return guard


_NAMES = ("lt", "le", "gt", "ge", "eq", "ne")
_found: dict[Any, str] = {}


def _comparisons() -> dict[Any, str]:
    if not _found:
        _found.update({primitive(f"{name}_p"): name for name in _NAMES})
    return _found


def translated(
    guard: Guard, names: Mapping[Subject, Subject], *, whole: bool = True
) -> Guard | None:
    """A guard in the words of another body; None where nothing of it can be said there.

    Args:
        guard: What a mask tells in one body.
        names: For subjects of that body, those of the other body with the same value.
        whole: Whether the other body has arrays as they are, and not parts of them: then what one
            says of a value is said of the value laid out otherwise too.
    """

    def named(subject: Subject) -> Subject | None:
        root, ops = subject
        for cut in range(len(ops), -1 if whole else len(ops) - 1, -1):
            found = names.get((root, ops[:cut]))
            if found is not None:
                return found[0], (*found[1], *ops[cut:])
        return None

    def said(region: Region) -> Region:
        return region and {n: i for s, i in region.items() if (n := named(s)) is not None}

    result = Guard(said(guard.false), said(guard.true))
    return result if result else None
