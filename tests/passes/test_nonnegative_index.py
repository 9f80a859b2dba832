"""The wrap-around of negative indices against the index itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from relower import assume_range, explain, optimize

NAME = "nonnegative_index"
ONE = {NAME: 1}
TABLE = np.random.RandomState(0).randint(-9, 9, (6, 3)).astype(np.float32)
ROW = TABLE[:, 0]
SCORES = np.random.RandomState(1).randint(-9, 9, (8, 6)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_gather_scatter_and_slice(same, dtype):
    index = np.array([0, 5, 3, 5, 99, 0], dtype)  # out of bounds is clamped or dropped alike
    known = lambda i: assume_range(i, 0, 99)
    same(lambda t, i: t[known(i)], TABLE, index, passes=[NAME], applied=ONE)
    same(lambda t, i: t.at[known(i)].add(2.0), TABLE, index, passes=[NAME], applied=ONE)
    same(lambda t, i: t[known(i)[0]], ROW, index, passes=[NAME], applied=ONE)
    start = lambda t, i: lax.dynamic_slice_in_dim(t, known(i)[1], 2)
    same(start, ROW, index, passes=[NAME], applied=ONE)


def test_wide_indices(same, x64):
    index = np.array([0, 5, 3], np.int64)
    same(lambda t, i: t[assume_range(i, 0, 5)], TABLE, index, passes=[NAME], applied=ONE)


def test_two_indices_at_once(same):
    fn = lambda t, s: t[jnp.argmax(s, -1), jnp.argmin(s, -1) % 3]
    same(fn, TABLE, SCORES, passes=[NAME], applied={NAME: 2}, eager=True)


def test_the_select_is_gone(eqns_of):
    fn = lambda t, s: t[jnp.argmax(s, -1)]
    assert len(eqns_of(fn, TABLE, SCORES, name="select_n")) == 1
    for name in ("select_n", "lt", "add"):
        assert not eqns_of(optimize(fn), TABLE, SCORES, name=name)


def test_counters_of_loops(same, eqns_of):
    zero = jnp.float32(0)
    fori = lambda t: lax.fori_loop(0, 6, lambda i, a: a + t[i], zero)
    bounded = lambda t, n: lax.fori_loop(0, n, lambda i, a: a + t[i], zero)
    scan = lambda t: lax.scan(lambda a, i: (a + t[i], None), zero, jnp.arange(6))[0]
    update = lambda t: lax.fori_loop(0, 6, lambda i, a: a.at[i].set(t[i] * 2), jnp.zeros(6))
    same(fori, ROW, passes=[NAME], applied=ONE)
    same(bounded, ROW, np.int32(4), passes=[NAME], applied=ONE)
    same(scan, ROW, passes=[NAME], applied=ONE)
    same(update, ROW, passes=[NAME], applied={NAME: 2})
    assert not eqns_of(optimize(fori), ROW, name="select_n")


def test_a_counter_that_starts_below_zero(same, why):
    fn = lambda t: lax.fori_loop(-2, 3, lambda i, a: a + t[i], jnp.float32(0))
    report = same(fn, ROW, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["maybe-negative: the index is not known to be at least 0 "
         "(found a lower bound of -2; wanted a lower bound of 0 or more)"]
    ]  # fmt: skip


def test_declines_indices_that_are_only_usually_not_negative(same, why):
    index = np.array([0, 5, -1, 3], np.int32)
    report = same(lambda t, i: t[i], TABLE, index, passes=[NAME], applied={})
    assert why(report, NAME) == [
        ["maybe-negative: the index is not known to be at least 0 "
         "(found no lower bound; wanted a lower bound of 0 or more)"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (lambda i: jnp.where(i > 2, -1, i & 3), "a lower bound of -1"),  # padding ids
        (lambda i: lax.rem(i, jnp.int32(4)), "a lower bound of -3"),  # rem keeps the sign
        (lambda i: jnp.maximum(i, 0) - 1, "a lower bound of -1"),
        (lambda i: (i & 3).at[i].get(mode="fill"), "no lower bound"),  # the dtype's minimum
    ],
)
def test_declines_what_may_be_negative(same, why, make, bound):
    index = np.array([0, 5, -1, 3, -7], np.int32)
    fn = lambda t, i: t[make(i)]
    found = why(same(fn, TABLE, index, passes=[NAME], applied={}), NAME)
    assert f"found {bound};" in found[-1][0]


def test_selects_of_another_kind_are_no_candidates():
    fns = [
        lambda i: jnp.where(i < 1, i + 6, i),
        lambda i: jnp.where(i < 0, i, i + 6),
        lambda i: jnp.where(i > 0, i + 6, i),
        lambda i: jnp.where(i < 0, i - 6, i),
        lambda i: jnp.where(i < 0, i + 6, i + 1),
        lambda i: jnp.where(i[::-1] < 0, i + 6, i),
        lambda i: jnp.where(i <= 0, i + 6, i),
    ]
    for fn in fns:
        known = lambda i, fn=fn: fn(assume_range(i, 0, 5))
        assert not explain(known, np.arange(4, dtype=np.int32), passes=[NAME]).sites


def test_a_conversion_that_changes_the_value_is_not_seen_through():
    def fn(i):
        i = assume_range(i, 0, 5)
        return jnp.where(i < 0, i.astype(np.int8).astype(np.int32) + 6, i)

    assert not explain(fn, np.arange(4, dtype=np.int32), passes=[NAME]).sites


def test_unsigned_indices_have_no_wrap():
    fn = lambda t, i: t[i]
    assert not explain(fn, TABLE, np.arange(4, dtype=np.uint8), passes=[NAME]).sites


def test_gradients_of_what_is_gathered(equal_bits):
    def loss(t, s):
        return (t[jnp.argmax(s, -1)] * jnp.arange(3.0)).sum()

    want = jax.jit(jax.grad(loss))(TABLE, SCORES)
    assert np.any(want)
    equal_bits(jax.jit(jax.grad(optimize(loss)))(TABLE, SCORES), want)
    equal_bits(jax.jit(optimize(jax.grad(loss)))(TABLE, SCORES), want)
    assert explain(jax.grad(loss), TABLE, SCORES, passes=[NAME]).counts() == ONE


def test_under_vmap_in_either_order(equal_bits):
    fn = lambda t, s: t[jnp.argmax(s, -1)]
    batch = (np.stack([TABLE, -TABLE]), np.stack([SCORES, SCORES[::-1]]))
    want = jax.jit(jax.vmap(fn))(*batch)
    equal_bits(jax.jit(jax.vmap(optimize(fn, passes=[NAME])))(*batch), want)
    equal_bits(jax.jit(optimize(jax.vmap(fn), passes=[NAME]))(*batch), want)
