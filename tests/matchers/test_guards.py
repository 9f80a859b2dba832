"""What a mask tells of the values that it was computed from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower.compat import jaxprs
from relower.matchers.assume_range import assume_range
from relower.matchers.facts import Analysis
from relower.matchers.guards import Guard, both, either

X = jnp.zeros((4, 6), jnp.int32)
M = jnp.zeros((4, 6), bool)


def bounds(fn, *args):
    (found,) = Analysis().enter(jax.make_jaxpr(fn)(*args)).outputs
    return found.lo, found.hi


def between(x, lo, hi):
    return (x >= lo) & (x < hi)


@jax.jit
def is_valid(x, n):
    return between(x, 0, n)


def through_cond(x):
    i = x[0, 0]
    return lax.cond(i < 0, lambda i: i * 0, lambda i: i, i)


def through_switch(x):
    i = x[0, 0]
    return lax.switch(
        i, [lambda i: jnp.maximum(i, -1), lambda i: i, lambda i: jnp.minimum(i, 5)], i
    )


def through_two_conditions(x, m):
    i = x[0, 0]
    return lax.cond(m[0, 0] & (i >= 0) & (i < 9), lambda i: i, lambda i: jnp.int32(-1), i)


NARROWED = {
    "where_negative": (lambda x: jnp.where(x < 0, 0, x), (0, None)),
    "where_above": (lambda x: jnp.where(x > 7, 7, x), (None, 7)),
    "where_literal_first": (lambda x: jnp.where(0 > x, 0, x), (0, None)),
    "where_ge": (lambda x: jnp.where(x >= 0, x, 3), (0, None)),
    "where_le": (lambda x: jnp.where(x <= -1, 5, x), (0, None)),
    "where_window": (lambda x: jnp.where(between(x, 0, 8), x, 8), (0, 8)),
    "where_window_padding": (lambda x: jnp.where(between(x, 0, 8), x, -1), (-1, 7)),
    "where_logical_and": (lambda x: jnp.where(jnp.logical_and(x >= 0, x < 8), x, 8), (0, 8)),
    "where_outside": (lambda x: jnp.where((x < 0) | (x >= 8), 8, x), (0, 8)),
    "where_not": (lambda x: jnp.where(~between(x, 0, 8), 8, x), (0, 8)),
    "where_not_of_one_side": (lambda x: jnp.where(~(x < 0) & (x < 8), x, 8), (0, 8)),
    "where_logical_not": (lambda x: jnp.where(jnp.logical_not(x < 3), x, 3), (3, None)),
    "where_with_another_mask": (lambda x, m: jnp.where(m & between(x, 0, 8), x, 8), (0, 8)),
    "where_equal": (lambda x: jnp.where(x == 5, x, 0), (0, 5)),
    "where_padding": (lambda x: jnp.where(jnp.maximum(x, -1) == -1, 64, jnp.maximum(x, -1)),
                      (-1, None)),  # two maxima are two values
    "where_the_same_padding": (lambda x: (lambda i: jnp.where(i == -1, 64, i))(jnp.maximum(x, -1)),
                               (0, None)),
    "nested": (lambda x: jnp.where(x < 0, 0, jnp.where(x > 7, 7, x)), (0, 7)),
    "nested_the_other_way": (
        lambda x: (lambda i: jnp.where(i < 0, 0, i))(jnp.where(x > 7, 7, x)), (0, 7)),
    "jnp_select": (lambda x: jnp.select([x < 0, x < 8], [0, x], 8), (0, 8)),
    "lax_select": (lambda x: lax.select(x < 0, jnp.zeros_like(x), x), (0, None)),
    "shifted": (lambda x: jnp.where(between(x, 8, 16), x - 8, 8), (0, 8)),
    "wrapped": (lambda x: (lambda i: jnp.where(i < 0, i + 6, i))(jnp.clip(x, -6, 5)), (0, 5)),
    "converted": (lambda x: jnp.where(between(x, 0, 8), x, 8).astype(jnp.int8), (0, 8)),
    "mask_of_the_wide_value": (
        lambda x: (lambda i: jnp.where(i > 3, i.astype(jnp.int8), 4))(x & 63), (4, 63)),
    "product": (lambda x: x * between(x, 0, 8), (0, 7)),
    "product_of_converted": (lambda x: between(x, 3, 8).astype(jnp.int32) * x, (0, 7)),
    "mask_as_integer": (lambda x: jnp.where(between(x, 0, 8).astype(jnp.int32) > 0, x, 8), (0, 8)),
    "mask_as_integer_and_back": (
        lambda x: jnp.where(between(x, 0, 8).astype(jnp.int8).astype(bool), x, 8), (0, 8)),
    "mask_is_true": (lambda x: jnp.where(between(x, 0, 8) == True, x, 8), (0, 8)),  # noqa: E712
    "reshaped": (lambda x: jnp.where((x >= 0).reshape(-1), x.reshape(-1), 0), (0, None)),
    "transposed": (lambda x: jnp.where((x >= 0).T, x.T, 0), (0, None)),
    "expanded": (lambda x: jnp.where((x >= 0)[:, None], x[:, None], 0), (0, None)),
    "sliced": (lambda x: jnp.where((x >= 0)[:, 1:], x[:, 1:], 0), (0, None)),
    "barrier": (lambda x: (lambda i, m: jnp.where(m, i, 0))(
        *lax.optimization_barrier((x, x >= 0))), (0, None)),
    "mask_from_a_call": (lambda x: jnp.where(is_valid(x, 8), x, 8), (0, 8)),
    "call_on_a_reshaped": (
        lambda x: jnp.where(is_valid(x.reshape(-1), 8), x.reshape(-1), 8), (0, 8)),
    "inside_a_call": (
        lambda x: jax.jit(lambda m, a, b: jnp.where(m, a, b))(x >= 0, x, -x * 0), (0, None)),
    "inside_remat": (
        lambda x: jax.checkpoint(lambda m, a: jnp.where(m, a, 0))(x >= 0, x), (0, None)),
    "unsigned": (lambda x: (lambda i: jnp.where(i < 8, i, 8))(x.astype(jnp.uint32)), (0, 8)),
    "saturated_count": (lambda x: lax.fori_loop(
        0, 3, lambda _, a: jnp.where(a < 15, a + 1, a), x & 7), (0, 15)),
    "mod": (lambda x: x % 5, (0, 4)),
    "jnp_mod": (lambda x: jnp.mod(x, jnp.int32(8)), (0, 7)),
    "jnp_remainder": (lambda x: jnp.remainder(x, 5), (0, 4)),
    "mod_by_an_array": (lambda x: x % jnp.clip(x, 1, 5), (0, 4)),
    "mod_of_narrow": (lambda x: x.astype(jnp.int8) % 100, (0, 99)),
    "mod_by_negative": (lambda x: x % -5, (-5, 0)),
    "divmod": (lambda x: divmod(x, 5)[1], (0, 4)),
    "rem_and_fix": (lambda x: (lambda r: jnp.where(r < 0, r + 5, r))(lax.rem(x, 5)), (0, 4)),
    "xor_with_false": (lambda x: jnp.where((x < 0) ^ jnp.zeros_like(x, bool), 0, x), (0, None)),
    "cond": (through_cond, (0, None)),
    "switch": (through_switch, (-1, 5)),
    "cond_of_two": (through_two_conditions, (-1, 8)),
    "select_of_masks": (
        lambda x, m: jnp.where(lax.select(m, x >= 0, x > 5), x, 0), (0, None)),
}  # fmt: skip


def arguments(fn):
    return (X, M)[: fn.__code__.co_argcount]


@pytest.mark.parametrize("name", sorted(NARROWED))
def test_narrowed(name):
    fn, wanted = NARROWED[name]
    assert bounds(fn, *arguments(fn)) == wanted


NOT_NARROWED = {
    "another_value": lambda x: jnp.where(x < 0, 0, x[::-1]),
    "wrong_case": lambda x: jnp.where(x < 0, x, 0),
    "one_of_two": lambda x, m: jnp.where((x < 0) & m, 0, x),
    "usually": lambda x, m: jnp.where(m, 0, x),
    "either_of_two": lambda x: jnp.where((x >= 0) | (x < -9), x, 0),
    "not_of_both": lambda x: jnp.where(~((x < 0) & (x < 8)), x, 0)[:1].at[0].set(-1),
    "or_of_values": lambda x: jnp.where((x >= 0) | (x[::-1] >= 0), x, 0),
    "another_place": lambda x: jnp.where((x >= 0).reshape(6, 4).T, x, 0),
    "moved_by_one": lambda x: jnp.where((x >= 0)[:, 1:], x[:, :-1], 0),
    "flipped": lambda x: jnp.where(jnp.flip(x >= 0, 0), x, 0),
    "narrowed_first": lambda x: jnp.where(x.astype(jnp.int8) >= 0, x, 0),
    "narrowed_after": lambda x: jnp.where(x >= 0, x.astype(jnp.int8), 0),
    "float_mask": lambda x: jnp.where(x.astype(jnp.float32) * 0.5 >= 0, x, 0),
    "cumulated": lambda x: jnp.where(x >= 0, jnp.cumsum(x, 0), 0),
    "cumulated_in_a_call": lambda x: jnp.where(
        x >= 0, jax.jit(lambda a: lax.cumsum(a, axis=0))(x), 0
    ),
    "mask_of_any": lambda x: jnp.where((x >= 0).any(0), x, 0),
    "shifted_may_wrap": lambda x: jnp.where(x > 0, x + 1, 0),
    "cond_by_another": lambda x: lax.cond(x[0, 0] < 0, lambda i: i * 0, lambda i: i, x[1, 1]),
    "cond_of_an_array": lambda x: lax.cond(x[0, 0] < 0, lambda i: i * 0, lambda i: i, x),
    "mod_by_unknown": lambda x: x % x,
    "rem": lambda x: lax.rem(x, 5),
    "rem_plus_another": lambda x: (lambda r: jnp.where(r < 0, r + 4, r))(lax.rem(x, 9)),
}


@pytest.mark.parametrize("name", sorted(NOT_NARROWED))
def test_not_narrowed(name):
    fn = NOT_NARROWED[name]
    lo, _ = bounds(fn, *arguments(fn))
    assert lo is None or lo < 0


def test_a_mask_that_another_call_got_says_nothing():
    """One body with two masks: each call has its own."""
    pick = jax.jit(lambda m, a: jnp.where(m, a, 0))

    def fn(x):
        return pick(x >= 0, x), pick(x[::-1] >= 0, x), pick(x < 0, x)

    found = Analysis().enter(jax.make_jaxpr(fn)(X)).outputs
    assert [(f.lo, f.hi) for f in found] == [(0, None), (None, None), (None, 0)]


def test_a_branch_that_is_never_taken_tells_nothing():
    def fn(x):
        i = x[0, 0] & 7
        return lax.cond(i < 0, lambda i: assume_range(i, -4, -1), lambda i: i, i)

    lo, _ = bounds(fn, X)
    assert lo is not None
    assert lo <= 0


def test_an_index_beyond_the_branches_takes_the_last():
    """`cond` clamps its index, so that the last branch runs for any greater one too."""
    inner = jax.make_jaxpr(lambda i: lax.switch(i, [lambda i: i * 0, lambda i: i], i))(jnp.int32(0))
    params = next(e for e in jaxprs.opened(inner).eqns if e.primitive.name == "cond").params

    def fn(i):
        return lax.cond_p.bind(i, i, **params)[0]

    assert bounds(fn, jnp.int32(0)) == (0, None)
    assert fn(jnp.int32(9)) == 9


def test_masks_that_are_the_same_agree():
    def fn(x, m):
        return jnp.where(m, jnp.where(m, x & 7, x), 0)

    assert bounds(fn, X, M) == (0, 7)


def test_regions():
    a, b = ("a", ()), ("b", ())
    assert both({a: (0, 5)}, {a: (3, 9), b: (1, 1)}) == {a: (3, 5), b: (1, 1)}
    assert both({a: (0, 5)}, {a: (6, 9)}) is None
    assert either({a: (0, 5)}, {a: (6, 9), b: (1, 1)}) == {a: (0, 9)}
    assert either(None, {b: (1, 1)}) == {b: (1, 1)}
    assert both(None, {}) is None
    assert not Guard({}, {})
    assert Guard(None, {})


def test_what_a_mask_tells_is_found_once():
    """A chain of masks costs what it has of equations."""

    def fn(x):
        m = x >= 0
        for i in range(10):
            m = (m & (x < 1000 - i)) | m
        return jnp.where(m, x, 0)

    body = jax.make_jaxpr(fn)(X)
    facts = Analysis().enter(body)
    mask = next(e for e in jaxprs.opened(body).eqns if e.primitive.name == "jit").invars[0]
    assert facts.guards.of(mask)
    assert len(facts.guards._known) < 50


def test_values_lie_in_what_is_claimed():
    extremes = np.array([-(2**31), -9, -1, 0, 1, 5, 7, 8, 9, 2**31 - 1], np.int32)
    rng = np.random.default_rng(0)
    for name, (fn, (lo, hi)) in NARROWED.items():
        for _ in range(3):
            x = jnp.asarray(rng.choice(extremes, X.shape))
            m = jnp.asarray(rng.integers(0, 2, X.shape).astype(bool))
            y = np.asarray(fn(*(x, m)[: fn.__code__.co_argcount])).astype(np.int64)
            assert lo is None or y.min() >= lo, name
            assert hi is None or y.max() <= hi, name
