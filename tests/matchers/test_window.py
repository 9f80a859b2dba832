"""Masks that restrict a key to a window."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.matchers.assume_range import assume_range
from relower.matchers.dataflow import Dataflow
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.window import key_window

X = jnp.zeros(8, jnp.int32)
S = jnp.int32(0)


def window(fn):
    """The window of the mask that a function of a key and a scalar returns, as (lo, width)."""
    closed = jax.make_jaxpr(lambda k, s: fn(k * 1, s))(X, S)
    root = Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed))).root
    key, mask = root.eqns[0].outvars[0], jaxprs.opened(root.body).outvars[0]
    found = key_window(root, mask, root.resolve(key))
    if found is None:
        return None
    if isinstance(found.lo, int):
        return found.lo, found.width
    scalar = jaxprs.opened(root.body).invars[1]
    return ("s" if found.lo.atom is scalar else "other"), found.width


WINDOWS = {
    "numbers": (lambda k, s: (k >= 2) & (k < 5), (2, 3)),
    "closed": (lambda k, s: (k > 1) & (k <= 4), (2, 3)),
    "turned_round": (lambda k, s: (2 <= k) & (5 > k), (2, 3)),
    "not_outside": (lambda k, s: ~((k < 2) | (k >= 5)), (2, 3)),
    "not_outside_twice": (lambda k, s: ~~((k >= 2) & ~(k > 4)), (2, 3)),
    "logical": (lambda k, s: jnp.logical_and(k >= 2, jnp.logical_not(k >= 5)), (2, 3)),
    "one_key": (lambda k, s: k == 2, (2, 1)),
    "no_other_key": (lambda k, s: ~(k != 2), (2, 1)),
    "nothing": (lambda k, s: (k >= 5) & (k < 2), (5, 0)),
    "more_conditions": (lambda k, s: (k >= 2) & (k < 5) & (k.sum() > 3) & (k != 3), (2, 3)),
    "scalar": (lambda k, s: (k >= s) & (k < s + 4), ("s", 4)),
    "not_outside_a_scalar": (lambda k, s: ~((k < s) | (s + 4 <= k)), ("s", 4)),
    "scalar_in_a_call": (lambda k, s: jax.jit(lambda a, b: (a >= b) & (a <= b))(k, s), ("s", 1)),
    "barrier": (lambda k, s: lax.optimization_barrier((k >= 2) & (k < 5)), (2, 3)),
    "negated_after_a_barrier": (
        lambda k, s: ~lax.optimization_barrier((k < 2) | (k >= 5)), (2, 3)),
    "to_the_end": (lambda k, s: k >= 2, (2, 2**31 - 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_window(name):
    fn, wanted = WINDOWS[name]
    assert window(fn) == wanted


NO_WINDOWS = {
    "one_end": lambda k, s: k < 5,
    "outside": lambda k, s: (k < 2) | (k >= 5),
    "not_inside": lambda k, s: ~((k >= 2) & (k < 5)),
    "not_one_key": lambda k, s: k != 2,
    "not_that_one": lambda k, s: ~(k == 2),
    "two_keys": lambda k, s: (k >= 2) & (k[::-1] < 5),
    "mixed_bases": lambda k, s: (k >= s) & (k < 5),
    "an_array": lambda k, s: (k >= 2) & (k < jnp.arange(8)),
    "floats": lambda k, s: (k.astype(jnp.float32) >= 2) & (k < 5),
    "exclusive_or": lambda k, s: (k >= 2) ^ (k < 5),
    "another_mask": lambda k, s: k.sum() + jnp.zeros(8, jnp.int32) > 3,
}


def widest(fn):
    """As `window`, but no better than what every int32 key lies in counts as none."""
    found = window(fn)
    ends = (-(2**31), 2**31 - 1)
    bounded = found is not None and found[0] not in ends and found[0] + found[1] - 1 not in ends
    return found if bounded else None


@pytest.mark.parametrize("name", sorted(NO_WINDOWS))
def test_no_window(name):
    assert widest(NO_WINDOWS[name]) is None


@pytest.mark.parametrize("name", sorted({**WINDOWS, **NO_WINDOWS}))
def test_where_the_mask_holds_the_key_is_in_the_window(name):
    """On every key near the ends, of this dtype and of the windows."""
    fn = {**{k: v[0] for k, v in WINDOWS.items()}, **NO_WINDOWS}[name]
    found = window(fn)
    if found is None:
        return
    least, most = -(2**31), 2**31 - 1
    for s in (-3, 0, 2, 5, least, least + 1, most - 3, most - 2, most):
        for start in (-4, 0, 4, least, most - 7):
            keys = start + jnp.arange(8, dtype=jnp.int32)
            lo = s if found[0] == "s" else found[0]
            for key, held in zip(keys.tolist(), fn(keys, jnp.int32(s)).tolist(), strict=True):
                assert not held or lo <= key < lo + found[1], (s, key)


def few(s):
    """A scalar that no product of which overflows."""
    return assume_range(s, 0, 7)


PRODUCTS = {
    "next_one": (lambda k, s: (k >= few(s) * 4) & (k < (few(s) + 1) * 4), (0, 4)),
    "plus": (lambda k, s: (k >= few(s) * 4) & (k < few(s) * 4 + 4), (0, 4)),
    "closed": (lambda k, s: (k >= 4 * few(s)) & (k <= (few(s) + 1) * 4 - 1), (0, 4)),
    "less_one": (lambda k, s: (k >= (few(s) - 1) * 4) & (k < 4 * few(s)), (-4, 4)),
    "from_the_start": (
        lambda k, s: (few(k) - few(s) * 4 >= 0) & (few(k) - few(s) * 4 < 4), (0, 4)),
    "two_steps": (lambda k, s: (k >= (few(s) * 2 + 1) * 3) & (k < few(s) * 6 + 5), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_windows_that_start_at_a_product(name):
    fn, (offset, width) = PRODUCTS[name]
    assert window(fn) == ("other", width)
    factor = 6 if name == "two_steps" else 4
    for s in range(8):
        keys = jnp.arange(-8, 64, dtype=jnp.int32)
        keys = jnp.clip(keys, 0, 7) if name == "from_the_start" else keys
        for key, held in zip(keys.tolist(), fn(keys, jnp.int32(s)).tolist(), strict=True):
            assert not held or s * factor + offset <= key < s * factor + offset + width, (s, key)


@pytest.mark.parametrize("fn", [
    lambda k, s: (k >= s * 4) & (k < (s + 1) * 4),  # may overflow
    lambda k, s: (k >= few(s) * 4) & (k < few(s) * 3),
    lambda k, s: (k >= few(s) * 4) & (k < (few(s) + 1) * 3 + 7),
    lambda k, s: (k > few(s) * 4) & (k < few(s) * 4 + 4),  # nothing holds what it starts at
    lambda k, s: (k >= few(s) * -4) & (k < few(s) * -4 + 4),
    lambda k, s: (k >= few(s) * few(s)) & (k < few(s) * few(s) + few(s)),
])  # fmt: skip
def test_no_window_from_other_products(fn):
    assert widest(fn) is None
