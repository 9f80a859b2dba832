"""A product of lower precision than the one whose place it takes: no CPU shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from relower import verify
from relower.compat.primitives import primitive
from relower.gates.verify.verdict import Verdict
from relower.passes.base import Contract

X, GROUPS = np.ones((4, 4), np.float32), np.array([1, 3], np.int32)
PAIR = np.ones((2, 4, 4), np.float32)


def dense(precision, dtype=jnp.float32):
    return lambda a, b: jnp.matmul(a.astype(dtype), b.astype(dtype), precision=precision)


def grouped(a, b, sizes):
    return lax.ragged_dot(a, b, sizes, precision="highest")


def convolved(a, b):
    return lax.conv(a[None, None], b[None, None], (1, 1), "VALID", precision="high")


def checked(fn, args, p, quick):
    (site,) = verify(fn, *args, passes=[p], limits=quick).sites
    return site.checked


@pytest.mark.parametrize(
    ("fn", "args", "root", "was"),
    [
        (dense("highest"), (X, X), primitives.dot_general_p, "HIGHEST"),
        (grouped, (X, PAIR, GROUPS), primitive("ragged_dot_general_p"), "HIGHEST"),
        (convolved, (X, X), primitives.conv_general_dilated_p, "HIGH"),
    ],
    ids=["dense", "grouped", "convolution"],
)
def test_a_lower_precision_is_a_violation(quick, fn, args, root, was, other):
    found = checked(fn, args, other(root, precision=None), quick)
    assert found.verdict is Verdict.VIOLATION
    assert f"at precision DEFAULT, and what it replaces at {was}:" in found.reason


def test_a_higher_one_is_none(quick, other):
    highest = (lax.Precision.HIGHEST,) * 2
    p = other(primitives.dot_general_p, precision=highest)
    assert checked(dense(None), (X, X), p, quick).verdict is Verdict.VERIFIED


def test_products_of_bfloat16_are_exact_at_any(quick, other):
    p = other(primitives.dot_general_p, precision=None)
    found = checked(dense("highest", jnp.bfloat16), (X, X), p, quick)
    assert found.verdict is Verdict.VERIFIED


def test_one_of_two_products_is_seen(quick, wrong):
    @jax.jit
    def site(a, b):
        return dense("highest")(dense(None)(a, b), b.T)

    one_lower = lambda params, a, b: [dense(None)(dense(None)(a, b), b.T)]
    p = wrong(primitives.jit_p, one_lower, lambda e: e.params["name"] == "site")
    assert checked(lambda a, b: site(a, b), (X, X), p, quick).verdict is Verdict.VIOLATION


def test_a_product_that_takes_no_products_place_asks_for_what_it_wants(quick, wrong):
    """A sum of rows by a product of ones."""

    @jax.jit
    def site(a):
        return a.sum(1)

    by_ones = lambda params, a: [a @ jnp.ones(4)]
    p = wrong(primitives.jit_p, by_ones, lambda e: e.params["name"] == "site", Contract.ROUNDING)
    assert checked(lambda a: site(a), (X,), p, quick).verdict is Verdict.VERIFIED


def test_a_named_algorithm_is_not_compared(quick, other):
    p = other(primitives.dot_general_p, precision=lax.DotAlgorithmPreset.F32_F32_F32)
    found = checked(dense(None), (X, X), p, quick)
    said = [n for n in found.notes if "precision not comparable" in n]
    assert len(said) == 1
    assert "F32_F32_F32" in said[0]
