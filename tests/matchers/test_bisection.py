"""The bounds of a binary search stay between the first ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.matchers.facts import Analysis

X = jnp.zeros(6, jnp.uint32)


def bounds(fn, *args):
    return [(f.lo, f.hi) for f in Analysis().enter(jax.make_jaxpr(fn)(*args)).outputs]


def search(step, low=0, high=9):
    def fn(x):
        first = jnp.full_like(x, low), jnp.full_like(x, high)
        body = lambda c, _: (step(*c, x % 7 < 3), None)
        return lax.scan(body, first, None, length=4)[0]

    return fn


def half(low, high):
    return low + (high - low) // 2


def plain(low, high, left):
    mid = half(low, high)
    return jnp.where(left, low, mid), jnp.where(left, mid, high)


def unlike_masks(low, high, left):
    mid = half(low, high)
    return jnp.where(left, low, mid), jnp.where(mid > 3, mid, high)


FOUND = {
    "plain": plain,
    "unlike_masks": unlike_masks,
    "sum_turned_round": lambda a, b, m: (
        (mid := (b - a) // 2 + a),
        (jnp.where(m, mid, a), jnp.where(m, mid, b)),
    )[1],
    "a_third": lambda a, b, m: (
        (mid := a + lax.div(b - a, jnp.uint32(3))),
        (lax.select(m, mid, a), lax.select(m, mid, b)),
    )[1],
}


@pytest.mark.parametrize("name", sorted(FOUND))
def test_bounds_stay_between_the_first(name):
    assert bounds(search(FOUND[name]), X) == [(0, 9), (0, 9)]


@pytest.mark.parametrize("method", ["scan", "scan_unrolled", "sort", "compare_all"])
def test_searchsorted(method):
    fn = lambda x: jnp.searchsorted(jnp.arange(9, dtype=jnp.uint32), x, method=method)
    ((lo, hi),) = bounds(fn, X)
    if method == "scan":
        assert (lo, hi) == (0, 9)
    assert lo is None or lo <= 0
    assert hi is None or hi >= 9


def beyond(low, high, left):
    mid = half(low, high)
    return jnp.where(left, low, mid + 1), jnp.where(left, mid, high)


def whole_gap(low, high, left):
    mid = low + (high - low) * 2
    return jnp.where(left, low, mid), jnp.where(left, mid, high)


def other_gap(low, high, left):
    mid = low + (low - high) // 2
    return jnp.where(left, low, mid), jnp.where(left, mid, high)


def a_number(low, high, left):
    mid = half(low, high)
    return jnp.where(left, jnp.uint32(100), mid), jnp.where(left, mid, high)


def changed_places(low, high, left):
    mid = half(low, high)
    return jnp.where(left, mid, high), jnp.where(left, low, mid)


NOT_FOUND = {
    "beyond": (beyond, 0, 9),
    "whole_gap": (whole_gap, 0, 9),
    "other_gap": (other_gap, 0, 9),
    "a_number": (a_number, 0, 9),
    "changed_places": (changed_places, 0, 9),
    "wrong_way_round": (plain, 9, 0),
}


@pytest.mark.parametrize("name", sorted(NOT_FOUND))
def test_not_claimed(name):
    step, low, high = NOT_FOUND[name]
    fn = search(step, low, high)
    rng = np.random.default_rng(0)
    claimed = bounds(fn, X)
    assert (0, 9) not in claimed
    for _ in range(20):
        x = jnp.asarray(rng.integers(0, 2**32, 6).astype(np.uint32))
        for (lo, hi), value in zip(claimed, fn(x)):
            assert lo is None or int(value.min()) >= lo
            assert hi is None or int(value.max()) <= hi
