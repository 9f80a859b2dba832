"""Masks that are windows of a key."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.matchers.fact import UNKNOWN
from relower.matchers.facts import Analysis
from relower.matchers.graph import Dataflow
from relower.matchers.window import find_window, range_where

X = jnp.zeros(8, jnp.int32)
S = jnp.int32(0)


def root_of(fn, *args):
    closed = jax.make_jaxpr(fn)(*args)
    return Dataflow(closed, Analysis(), (UNKNOWN,) * len(jaxprs.invars(closed))).root


def window(fn):
    """The window of the mask that a function of a key and a scalar returns, in words."""
    root = root_of(lambda k, s: fn(k * 1, s), X, S)
    key = root.eqns[0].outvars[0]
    scalar = jaxprs.opened(root.body).invars[1]
    found = find_window(root, jaxprs.opened(root.body).outvars[0])
    if found is None:
        return None
    assert found.key.atom is key

    def end(e):
        if e is None or e.value is None:
            return e and e.shift
        return ("s" if e.value.atom is scalar else "other", e.shift)

    return end(found.lo), end(found.hi)


WINDOWS = {
    "numbers": (lambda k, s: (k >= 2) & (k < 5), (2, 5)),
    "closed": (lambda k, s: (k > 1) & (k <= 4), (2, 5)),
    "turned_round": (lambda k, s: (2 <= k) & (5 > k), (2, 5)),
    "not_outside": (lambda k, s: ~((k < 2) | (k >= 5)), (2, 5)),
    "logical": (lambda k, s: jnp.logical_and(k >= 2, jnp.logical_not(k >= 5)), (2, 5)),
    "one_end": (lambda k, s: k < 5, (None, 5)),
    "other_end": (lambda k, s: k >= 5, (5, None)),
    "scalar": (lambda k, s: (k >= s) & (k < 5), (("s", 0), 5)),
    "scalars": (lambda k, s: (k > s) & (k < s + 4), (("s", 1), ("other", 0))),
    "in_a_call": (lambda k, s: jax.jit(lambda a, b: (a >= b) & (a <= b))(k, s),
                  (("s", 0), ("s", 1))),
    "barrier": (lambda k, s: lax.optimization_barrier((k >= 2) & (k < 5)), (2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_window(name):
    fn, wanted = WINDOWS[name]
    assert window(fn) == wanted


NO_WINDOWS = {
    "outside": lambda k, s: (k < 2) | (k >= 5),
    "not_inside": lambda k, s: ~((k >= 2) & (k < 5)),
    "two_keys": lambda k, s: (k >= 2) & (k[::-1] < 5),
    "three_conditions": lambda k, s: (k >= 2) & (k < 5) & (k < s),
    "equal": lambda k, s: k == 2,
    "an_array": lambda k, s: (k >= 2) & (k < jnp.arange(8)),
    "another_mask": lambda k, s: (k >= 2) & (k.sum() > 3),
    "floats": lambda k, s: (k.astype(jnp.float32) >= 2) & (k < 5),
    "exclusive_or": lambda k, s: (k >= 2) ^ (k < 5),
}


@pytest.mark.parametrize("name", sorted(NO_WINDOWS))
def test_no_window(name):
    assert window(NO_WINDOWS[name]) is None


def test_range_where():
    root = root_of(lambda k: ((k >= 2) & (k < 5), k - 2, k[:4]), X)
    mask, less, part = jaxprs.opened(root.body).outvars
    assert range_where(root, mask, less) == (0, 2)
    assert range_where(root, mask, jaxprs.opened(root.body).invars[0]) == (2, 4)
    assert range_where(root, mask, less, holds=False) == (-(2**31), 2**31 - 1)
    with pytest.raises(ValueError, match="wanted one shape"):
        range_where(root, mask, part)


def test_range_where_there_is_no_place():
    root = root_of(lambda k: (lax.clamp(0, k, 3) > 3, k), X)
    mask, key = jaxprs.opened(root.body).outvars
    assert range_where(root, mask, key) is None
