"""What each contract allows, and what it doesn't."""

import jax.numpy as jnp
import numpy as np
import pytest

from relower.gates.verify.compare import Errors, difference
from relower.passes.base import Contract


def f32(*words):
    return np.array(words, np.uint32).view(np.float32)


NAN, OTHER_NAN, NEGATIVE_NAN = f32(0x7FC00000), f32(0x7FC00005), f32(0xFFC00000)
ZERO, MINUS = f32(0), f32(0x80000000)
TINY, ONE, INF = f32(1), f32(0x3F800000), f32(0x7F800000)


@pytest.mark.parametrize(
    ("before", "after", "bitwise", "moved", "value"),
    [
        (ONE, ONE, True, True, True),
        (ZERO, MINUS, False, False, True),
        (NAN, OTHER_NAN, True, False, True),
        (NAN, NEGATIVE_NAN, True, False, True),
        (NAN, ONE, False, False, False),
        (ONE, NAN, False, False, False),
        (TINY, ZERO, False, False, True),
        (INF, -INF, False, False, False),
        (ONE, ONE * np.float32(1 + 2**-23), False, False, False),
    ],
)
def test_bits_and_numbers(before, after, bitwise, moved, value):
    holds = lambda contract, arithmetic: difference([before], [after], contract, arithmetic) is None
    assert holds(Contract.BITWISE, True) == bitwise
    assert holds(Contract.BITWISE, False) == moved
    assert holds(Contract.VALUE, True) == value


def test_other_types_and_integers():
    a = np.arange(3, dtype=np.int32)
    for contract in Contract:
        assert difference([a], [a], contract, False) is None
        assert difference([a], [a + 1], contract, False) is not None
        assert difference([a], [a.astype(np.int16)], contract, False) is not None
    place = difference([a], [np.array([0, 1, 3], np.int32)], Contract.VALUE, False)
    assert (place.index, place.before, place.after, place.count) == ((2,), "2", "3", 1)


def test_rounding_keeps_what_is_finite():
    assert difference([ONE], [INF], Contract.ROUNDING, True) is not None
    assert difference([INF], [ONE], Contract.ROUNDING, True) is None
    large = np.array([3e38, 1.0], np.float32)
    assert difference([large], [np.array([np.inf, 1], np.float32)], Contract.ROUNDING, True) is None


def exact(seed):
    return np.random.default_rng(seed).standard_normal(500)


def test_errors():
    errors = {1.0: Errors(), 1.05: Errors(), 1.2: Errors()}
    for seed in range(4):
        truth = exact(seed)
        noise = np.random.default_rng(100 + seed).standard_normal(500) * 1e-4
        before = (truth + noise).astype(np.float32)
        for scale in errors:
            after = (truth - scale * noise).astype(np.float32)
            errors[scale] = errors[scale].plus(before, after, truth)
    assert errors[1.0].holds
    assert errors[1.05].holds
    assert not errors[1.2].holds
    assert errors[1.2].ratios == pytest.approx((1.2, 1.2), rel=1e-3)


def test_one_rounding_is_always_allowed():
    truth = exact(0)
    wide = truth.astype(np.float32).astype(np.float64)
    rounded = wide.astype(jnp.bfloat16)
    # The original is exact, but for a rounding that its type makes anyway.
    assert Errors().plus(rounded, rounded, wide).holds
    assert not Errors().plus(truth.astype(np.float32), (truth * 0.995).astype(np.float32),
                             truth).holds  # fmt: skip
    assert not Errors().plus(ONE, ONE * np.float32(1.5), ONE.astype(np.float64)).holds


def test_scalars():
    one, two = np.float32(1), np.array(2, np.float32)
    for contract in (Contract.BITWISE, Contract.VALUE):
        assert difference([np.array(one)], [two], contract, False).index == ()
