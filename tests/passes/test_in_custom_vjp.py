"""Passes inside a `jax.custom_vjp` whose rules have run: in its forward and its backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular

from relower import explain, optimize
from relower.passes import late_cast


def with_own_rule(fn):
    """``fn`` behind a `jax.custom_vjp` that computes what jax would, in rules of its own."""
    made = jax.custom_vjp(lambda *args: fn(*args))
    made.defvjp(lambda *args: (fn(*args), args), lambda args, ct: jax.vjp(fn, *args)[1](ct))
    return made


def inverse(a):
    eye = jnp.broadcast_to(jnp.eye(32), a.shape)
    return solve_triangular(eye + jnp.tril(a, -1), eye, lower=True, unit_diagonal=True)


def conv(x, taps):
    wide = x.astype(jnp.float32)
    return sum(wide[:, i : i + 8] * taps[i] for i in range(4))


def parts(x):
    return sum(x[:, i : i + 1] * (i + 1) for i in range(6))


def weighted(h, wo, w):
    return (h @ wo) * w[:, None]


def normal(*shape, dtype=np.float32):
    return jnp.asarray(np.random.RandomState(0).randn(*shape) / 8, dtype)


CASES = {  # how many sites at least: the forward and the backward pass have one each
    "triangular_inverse": (inverse, (normal(2, 32, 32),), 2),
    "late_cast": (conv, (normal(2, 11, 6, dtype=jnp.bfloat16), normal(4, 6)), 2),
    "concat_cotangents": (parts, (normal(4, 6),), 1),
    "router_grad_from_wo_input": (weighted, (normal(24, 8), normal(8, 6), normal(24)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_rules_are_rewritten(monkeypatch, name):
    monkeypatch.setattr(late_cast, "LEAST_BYTES", 0)
    fn, args, sites = CASES[name]
    own = with_own_rule(fn)
    gradient = jax.value_and_grad(
        lambda *args: jnp.square(own(*args)).sum(), tuple(range(len(args)))
    )
    found = explain(gradient, *args, passes=[name])
    assert found.counts()[name] >= sites, found
    got = jax.jit(optimize(gradient, passes=[name]))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(gradient)(*args)), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2 if name == "late_cast" else 1e-4, atol=1e-5)
