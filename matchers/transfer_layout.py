"""Transfer rules of operations that make, move, repeat or drop elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..compat.primitives import axis_sizes
from .fact import (
    Affine,
    Aval,
    Fact,
    complete,
    elements,
    integer,
    join,
    limits,
    mix,
    rising_axes,
    whole,
)
from .transfer_numeric import Facts, Rule, affine_of


def iota(eqn: Any, facts: Facts) -> Fact:
    """The index along one dimension; one that is too long for the dtype wraps around."""
    out = eqn.outvars[0].aval
    dimension = eqn.params["dimension"]
    if limits(out.dtype) is None:
        return whole(out, 0, max(out.shape[dimension] - 1, 0))
    strides = tuple(int(d == dimension) for d in range(len(out.shape)))
    greatest = max(out.shape[dimension] - 1, 0)
    return integer(out, 0, greatest, Affine(0, strides))


def axis_index(eqn: Any, facts: Facts) -> Fact:
    """A device's position along mesh axes of known sizes."""
    names = eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    sizes = axis_sizes(eqn)
    out = eqn.outvars[0].aval
    if not all(name in sizes for name in names):
        return integer(out, 0, limits(out.dtype)[1])  # type: ignore[index]
    return integer(out, 0, math.prod(sizes[name] for name in names) - 1)


def same(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Results are the operands."""
    return facts


def last(eqn: Any, facts: Facts) -> Fact:
    """The result is the last operand."""
    return facts[-1]


def _moved(
    fact: Fact,
    out: Aval,
    affine: Affine | None,
    permutation: int | None,
    rising: Sequence[int],
) -> Fact:
    """The fact with the same elements in another order, as the affine form says."""
    if limits(out.dtype) is None:
        return elements(fact)
    return integer(out, *fact.range(out.dtype), affine, permutation, rising)


def broadcast_in_dim(eqn: Any, facts: Facts) -> Fact:
    """New and stretched dimensions have stride zero."""
    fact = facts[0]
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    placed = eqn.params["broadcast_dimensions"]
    if limits(out.dtype) is None:
        return fact
    permutation = None
    if fact.permutation is not None:
        target = placed[fact.permutation]
        kept = source.shape[fact.permutation] == out.shape[target]
        permutation = target if kept else None
    form = affine_of(fact, source, len(source.shape))
    affine = None
    if form is not None:
        strides = [0] * len(out.shape)
        for d, target in enumerate(placed):
            strides[target] = form.strides[d] if source.shape[d] > 1 else 0
        affine = Affine(form.offset, tuple(strides))
    rising = [placed[d] for d in rising_axes(fact, source.shape)]
    return _moved(fact, out, affine, permutation, rising)


def reshape(eqn: Any, facts: Facts) -> Fact:
    """Strides are carried over where runs of dimensions are merged or split evenly."""
    fact = facts[0]
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    if eqn.params.get("dimensions") is not None:
        return elements(fact)
    affine = None
    form = affine_of(fact, source, len(source.shape))
    if form is not None:
        strides = _reshaped(source.shape, form.strides, out.shape)
        affine = None if strides is None else Affine(form.offset, strides)
    moved = [_reshaped_axis(d, source.shape, out.shape) for d in rising_axes(fact, source.shape)]
    axis = _reshaped_axis(fact.permutation, source.shape, out.shape)
    return _moved(fact, out, affine, axis, [d for d in moved if d is not None])


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Pairs the dimensions of two shapes of equal size; those of size one are left out."""
    a = [d for d, n in enumerate(old) if n != 1]
    b = [d for d, n in enumerate(new) if n != 1]
    if 0 in old or 0 in new:
        return None
    groups = []
    i = j = 0
    while i < len(a) and j < len(b):
        left, right = [a[i]], [b[j]]
        m, n = old[a[i]], new[b[j]]
        while m != n:
            if m < n:
                i += 1
                left.append(a[i])
                m *= old[a[i]]
            else:
                j += 1
                right.append(b[j])
                n *= new[b[j]]
        groups.append((left, right))
        i, j = i + 1, j + 1
    return groups


def _reshaped(
    old: Sequence[int], strides: Sequence[int], new: Sequence[int]
) -> tuple[int, ...] | None:
    groups = _groups(old, new)
    if groups is None:
        return None
    result = [0] * len(new)
    for left, right in groups:
        stride = strides[left[-1]]
        expected = stride
        for d in reversed(left):
            if strides[d] != expected:
                return None
            expected *= old[d]
        for d in reversed(right):
            result[d] = stride
            stride *= new[d]
    return tuple(result)


def _reshaped_axis(axis: int | None, old: Sequence[int], new: Sequence[int]) -> int | None:
    """Where an axis that is neither merged nor split ends up."""
    for left, right in (_groups(old, new) or ()) if axis is not None else ():
        if left == [axis] and len(right) == 1:
            return right[0]
    return None


def squeeze(eqn: Any, facts: Facts) -> Fact:
    """Dimensions of size one go."""
    fact = facts[0]
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    kept = [d for d in range(len(source.shape)) if d not in eqn.params["dimensions"]]
    form = affine_of(fact, source, len(source.shape))
    affine = None if form is None else Affine(form.offset, tuple(form.strides[d] for d in kept))
    axis = fact.permutation
    rising = [kept.index(d) for d in fact.rising if d in kept]
    return _moved(fact, out, affine, kept.index(axis) if axis in kept else None, rising)


def transpose(eqn: Any, facts: Facts) -> Fact:
    """Axes are renamed."""
    fact = facts[0]
    order = tuple(eqn.params["permutation"])
    form, axis = fact.affine, fact.permutation
    affine = None if form is None else Affine(form.offset, tuple(form.strides[d] for d in order))
    axis = None if axis is None else order.index(axis)
    rising = [order.index(d) for d in fact.rising]
    return _moved(fact, eqn.outvars[0].aval, affine, axis, rising)


def rev(eqn: Any, facts: Facts) -> Fact:
    """Strides change sign; a permutation stays one."""
    fact = facts[0]
    out = eqn.outvars[0].aval
    form, affine = fact.affine, None
    if form is not None:
        turned = eqn.params["dimensions"]
        offset = form.offset
        if offset is not None:
            offset += sum(form.strides[d] * (out.shape[d] - 1) for d in turned)
        strides = tuple(-s if d in turned else s for d, s in enumerate(form.strides))
        affine = Affine(offset, strides)
    rising = [d for d in fact.rising if d not in eqn.params["dimensions"]]
    return _moved(fact, out, affine, fact.permutation, rising)


def _window(
    fact: Fact, source: Aval, out: Aval, starts: Sequence[int | None], steps: Sequence[int]
) -> Fact:
    """A strided window; a start of None isn't known."""
    affine = None
    if fact.affine is not None:
        offset = fact.affine.offset
        for start, stride in zip(starts, fact.affine.strides):
            if stride and (start is None or offset is None):
                offset = None
            elif stride:
                offset += stride * start  # type: ignore[operator]
        affine = Affine(offset, tuple(s * t for s, t in zip(fact.affine.strides, steps)))
    axis = fact.permutation
    if axis is not None and source.shape[axis] != out.shape[axis]:
        axis = None
    return _moved(fact, out, affine, axis, fact.rising)


def slice_(eqn: Any, facts: Facts) -> Fact:
    """A strided window whose place is known."""
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    steps = eqn.params["strides"] or (1,) * len(source.shape)
    return _window(facts[0], source, out, eqn.params["start_indices"], steps)


def dynamic_slice(eqn: Any, facts: Facts) -> Fact:
    """A window whose place isn't known, except along dimensions that it covers whole."""
    source, out = eqn.invars[0].aval, eqn.outvars[0].aval
    starts = [0 if m == n else None for m, n in zip(source.shape, out.shape)]
    return _window(facts[0], source, out, starts, (1,) * len(source.shape))


def split(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Windows one after another."""
    source = eqn.invars[0].aval
    axis = eqn.params["axis"]
    results, start = [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"]):
        starts = [start if d == axis else 0 for d in range(len(source.shape))]
        results.append(_window(facts[0], source, var.aval, starts, (1,) * len(source.shape)))
        start += int(size)
    return results


def unstack(eqn: Any, facts: Facts) -> Sequence[Fact]:
    """Each result is one slice."""
    return [elements(facts[0])] * len(eqn.outvars)


def concatenate(eqn: Any, facts: Facts) -> Fact:
    """What all parts have in common, and along other axes their order too."""
    out = eqn.outvars[0].aval
    dimension = eqn.params["dimension"]
    result, permutation = facts[0], facts[0].permutation
    for fact in facts[1:]:
        permutation = permutation if fact.permutation == permutation else None
        result = mix(result, fact)
    affine = result.affine
    if len(facts) > 1:
        if affine is not None and affine.strides[dimension]:
            affine = None  # each part starts anew
        if permutation == dimension:
            permutation = None
    rising = _all_rise(eqn, facts)
    if len(facts) > 1:
        rising = [d for d in rising if d != dimension]
    return _moved(result, out, affine, permutation, rising)


def _all_rise(eqn: Any, facts: Facts) -> list[int]:
    """The axes of the operands along which each of them rises."""
    found = set(rising_axes(facts[0], eqn.invars[0].aval.shape))
    for fact, var in zip(facts[1:], eqn.invars[1:]):
        found &= set(rising_axes(fact, var.aval.shape)) if found else found
    return sorted(found)


def stack(eqn: Any, facts: Facts) -> Fact:
    """As concatenate, along a new axis."""
    out = eqn.outvars[0].aval
    axis = eqn.params["axis"]
    result, permutation = facts[0], facts[0].permutation
    for fact in facts[1:]:
        permutation = permutation if fact.permutation == permutation else None
        result = mix(result, fact)
    return _stacked(result, out, axis, permutation, _all_rise(eqn, facts))


def _stacked(
    fact: Fact, out: Aval, axis: int, permutation: int | None, rising: Sequence[int]
) -> Fact:
    form, affine = fact.affine, None
    if form is not None:
        affine = Affine(form.offset, (*form.strides[:axis], 0, *form.strides[axis:]))
    if permutation is not None:
        permutation += permutation >= axis
    return _moved(fact, out, affine, permutation, [d + (d >= axis) for d in rising])


def tile(eqn: Any, facts: Facts) -> Fact:
    """Repetition along a dimension keeps order along the others, and where nothing changes."""
    fact = facts[0]
    repeats = eqn.params["reps"]
    form, axis = fact.affine, fact.permutation
    if form is not None and any(s and r != 1 for s, r in zip(form.strides, repeats)):
        form = None
    if axis is not None and repeats[axis] != 1:
        axis = None
    known = rising_axes(fact, eqn.invars[0].aval.shape)
    rising = [d for d in known if repeats[d] == 1]
    return _moved(fact, eqn.outvars[0].aval, form, axis, rising)


def pad(eqn: Any, facts: Facts) -> Fact:
    """Elements and padding; without any, the operand."""
    fact, padding = facts
    config = eqn.params["padding_config"]
    if all(tuple(c) == (0, 0, 0) for c in config):
        return fact
    out = eqn.outvars[0].aval
    grows = any(low > 0 or high > 0 or inner > 0 for low, high, inner in config)
    return complete(elements(join(elements(fact), elements(padding)) if grows else fact), out)


def dynamic_update_slice(eqn: Any, facts: Facts) -> Fact:
    """Elements of the operand and of the update."""
    out = eqn.outvars[0].aval
    return complete(elements(mix(facts[0], elements(facts[1]))), out)


def scanned_slice(fact: Fact, aval: Aval) -> Fact:
    """One slice of an array along its leading axis, of type ``aval``, at an unknown index."""
    form, affine = fact.affine, None
    if form is not None:
        affine = Affine(None if form.strides[0] else form.offset, form.strides[1:])
    axis = fact.permutation
    rising = [d - 1 for d in fact.rising if d]
    return _moved(fact, aval, affine, axis - 1 if axis else None, rising)


def scanned_stack(fact: Fact, aval: Aval) -> Fact:
    """Values that each satisfy ``fact``, stacked along a new leading axis to ``aval``'s type."""
    rising = rising_axes(fact, aval.shape[1:])
    if fact.affine is not None and fact.affine.offset is None:
        fact = Fact(fact.lo, fact.hi, None, fact.permutation, fact.constant)
    return _stacked(fact, aval, 0, fact.permutation, rising)


def shard(fact: Fact, outer: Aval, inner: Aval) -> Fact:
    """One device's part, of type ``inner``: a block of those of ``outer``."""
    whole = [m == n for m, n in zip(outer.shape, inner.shape)]
    starts = [0 if w else None for w in whole]
    return _window(fact, outer, inner, starts, (1,) * len(whole))


def unshard(fact: Fact, inner: Aval, outer: Aval) -> Fact:
    """Blocks that each satisfy ``fact``, put together."""
    whole = [m == n for m, n in zip(outer.shape, inner.shape)]
    form, axis = fact.affine, fact.permutation
    if form is not None and not all(whole):
        moves = any(s and not w for s, w in zip(form.strides, whole))
        form = None if moves or form.offset is None else form
    if axis is not None and not whole[axis]:
        axis = None
    rising = [d for d in rising_axes(fact, inner.shape) if whole[d]]
    return _moved(fact, outer, form, axis, rising)


RULES: dict[str, Rule] = {
    "iota_p": iota,
    "axis_index_p": axis_index,
    "broadcast_in_dim_p": broadcast_in_dim,
    "reshape_p": reshape,
    "squeeze_p": squeeze,
    "transpose_p": transpose,
    "rev_p": rev,
    "slice_p": slice_,
    "dynamic_slice_p": dynamic_slice,
    "split_p": split,
    "unstack_p": unstack,
    "concatenate_p": concatenate,
    "stack_p": stack,
    "tile_p": tile,
    "pad_p": pad,
    "dynamic_update_slice_p": dynamic_update_slice,
    "tie_p": last,
    **dict.fromkeys(
        (
            "copy_p",
            "optimization_barrier_p",
            "stop_gradient_p",
            "name_p",
            "pvary_p",
            "reduced_vary_cast_p",
            "sharding_constraint_p",
            "layout_constraint_p",
            "reshard_p",
            "device_put_p",
        ),
        same,
    ),
}

SOURCES = frozenset({"iota_p", "axis_index_p", "broadcast_in_dim_p", "reshape_p", "squeeze_p"})
