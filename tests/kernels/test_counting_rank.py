"""Counted ranks against sorted ones."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from relower.kernels import counting_rank as module
from relower.kernels.counting_rank import BLOCK, NOWHERE, counting_rank, counting_ranks

DTYPES = [np.int8, np.uint8, np.int16, np.int32, np.uint32]


def sorted_ranks(keys, lo, values):
    keys = keys.astype(np.int64)
    ranks = np.argsort(np.argsort(keys, kind="stable"), kind="stable")
    return np.where((keys >= lo) & (keys < lo + values), ranks, NOWHERE)


def check(keys, lo, values):
    got = jax.jit(counting_rank, static_argnums=2)(keys, np.asarray(lo, keys.dtype), values)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(got), sorted_ranks(keys, lo, values))


def check_all(keys, lo, values):
    got = jax.jit(counting_ranks, static_argnums=(1, 2))(keys, lo, values)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(got), sorted_ranks(keys, lo, values))


@pytest.mark.parametrize("n", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("values", [1, 2, 3, 11])
def test_ranks_of_all(n, values):
    random = np.random.RandomState(0)
    check_all(random.randint(-2, values - 2, n).astype(np.int32), -2, values)
    check_all(np.full(n, values - 3, np.int32), -2, values)  # the last value alone
    check_all(np.full(n, -2, np.int32), -2, values)
    check_all(random.choice([-2, values - 3], n).astype(np.int32), -2, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_all_at_the_ends_of_a_dtype(dtype):
    info = np.iinfo(dtype)
    for lo, values in ((info.min, 5), (info.max - 4, 5), (info.min, 256)):
        keys = lo + np.random.RandomState(0).randint(0, min(values, int(info.max) - int(lo)), 300)
        check_all(keys.astype(dtype), int(lo), values)


@pytest.mark.parametrize("n", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_lengths(n):
    keys = np.random.RandomState(0).randint(-2, 9, n).astype(np.int32)
    check(keys, -2, 11)
    check(keys, 3, 2)
    check(keys, 3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_at_the_ends_of_a_dtype(dtype):
    info = np.iinfo(dtype)
    pool = np.array([info.min, info.min + 1, 3, 4, info.max - 2, info.max - 1, info.max], dtype)
    keys = np.random.RandomState(0).choice(pool, 300)
    windows = ((info.min, 2), (info.min, 9), (3, 2), (info.max - 2, 3), (info.max, 9), (3, 127))
    for lo, values in windows:
        check(keys, int(lo), values)


def test_one_expert_takes_all_and_empty_experts():
    check(np.full(2 * BLOCK, 4, np.int32), 0, 8)
    check(np.full(2 * BLOCK, 4, np.int32), 5, 3)


def test_wide_keys():
    jax.config.update("jax_enable_x64", True)
    try:
        keys = np.random.RandomState(0).choice([2**40, 2**40 + 1, -(2**62), 2**63 - 1], 300)
        check(keys, 2**40, 2)
        check(keys, 2**63 - 2, 5)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_counts_of_a_full_block_are_exact():
    """The product adds ones in float32, of which there are at most as many as slots in a block."""
    assert BLOCK <= 2**8, "a bfloat16 accumulator, if a compiler chose one, would lose counts"
    check(np.zeros(4 * BLOCK, np.int32), 0, 1)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(-128, 127), min_size=1, max_size=40),
                  st.integers(-128, 127), st.integers(1, 300))  # fmt: skip
def test_any_keys_in_any_window(keys, lo, values):
    keys = np.array(keys, np.int8)
    got = counting_rank(jnp.asarray(keys), jnp.int8(lo), values)
    np.testing.assert_array_equal(np.asarray(got), sorted_ranks(keys, lo, values))


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(-128, 107))
def test_ranks_of_any_keys(keys, lo):
    keys = (np.array(keys) + lo).astype(np.int8)
    got = counting_ranks(jnp.asarray(keys), lo, 21)
    np.testing.assert_array_equal(np.asarray(got), sorted_ranks(keys, lo, 21))


MUTANTS = {
    "slots of the same block counted twice": ("_earlier_in_block", lambda f: lambda h: f(h) * 2),
    "the key itself counted": ("_earlier_in_block", lambda f: lambda h: f(h) + 1),
    "a window one too wide": ("_last", lambda f: lambda lo, values: f(lo, values + 1)),
    "blocks that overlap": ("_one_hot_blocks", lambda f: lambda s, v: f(s, v)[:, ::-1]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    name, change = MUTANTS[mutant]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    keys = np.random.RandomState(0).randint(-2, 9, 2 * BLOCK + 3).astype(np.int32)
    with pytest.raises(AssertionError):
        check(keys, 3, 2)
    if name != "_last":  # of no part in the ranks of all
        with pytest.raises(AssertionError):
            check_all(keys, -2, 11)
