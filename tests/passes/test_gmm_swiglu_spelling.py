"""gmm_swiglu where silu is written out, and what is said of products that are nearly SwiGLU's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from swiglu_layers import BF16, DROPPING, F32, FULL, N, close, data, dense, gradients, loss

from relower import PassNotApplicable, explain, optimize

NAME = "gmm_swiglu"
ours = functools.partial(optimize, passes=[NAME])


def halves(product):
    """``product(gate, up)`` of the halves of one GEMM."""

    def form(x, w, sizes):
        return product(*jnp.split(lax.ragged_dot(x, w, sizes), 2, -1))

    return form


def apart(product):
    """The same of two GEMMs."""

    def form(x, w, sizes):
        dot = lambda w: lax.ragged_dot(x, w, sizes)
        return product(dot(w[..., :N] * 1), dot(w[..., N:] * 1))

    return form


silu, sigmoid = jax.nn.silu, jax.nn.sigmoid


@jax.jit
def in_a_call(x):
    return x / (1 + jnp.exp(-x))


def wide(gate, up):
    gate = gate.astype(F32)
    return (gate / (1.0 + jnp.exp(-gate))).astype(BF16) * up


WRITTEN_OUT = {
    "quotient": lambda g, u: g / (1 + jnp.exp(-g)) * u,
    "one last": lambda g, u: u * (g / (jnp.exp(-g) + 1)),
    "reciprocal": lambda g, u: g * (1 / (1 + jnp.exp(-g))) * u,
    "power": lambda g, u: (1 + jnp.exp(-g)) ** -1 * g * u,
    "in a call": lambda g, u: in_a_call(g) * u,
    "in float32": wide,
}


@pytest.mark.parametrize("gemms", [halves, apart], ids=["one GEMM", "two GEMMs"])
@pytest.mark.parametrize("how", WRITTEN_OUT)
def test_written_out_it_is_the_same_kernel(gemms, how):
    form, args = gemms(WRITTEN_OUT[how]), (*data(), FULL)
    grad = gradients(form)
    assert explain(form, *args[:2], FULL, passes=[NAME]).counts() == {NAME: 1}
    assert explain(grad, *args, passes=[NAME]).counts() == {NAME: 1}
    want = jax.jit(grad)(*args)
    close(jax.jit(ours(grad))(*args), want, "optimize(grad)")
    inside = jax.value_and_grad(ours(functools.partial(loss, form)), (0, 1, 2))
    close(jax.jit(inside)(*args), want, "grad(optimize)")


@pytest.mark.parametrize("how", ["quotient", "reciprocal"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_the_error_is_at_most_1_10_of_the_originals(how, dtype):
    form = halves(WRITTEN_OUT[how])
    plain, rewritten = jax.jit(form), jax.jit(ours(form))
    for seed in range(6):
        for sizes in (FULL, DROPPING):
            x, w, wo, ct = data(seed, dtype)
            identity = jnp.broadcast_to(jnp.eye(N, dtype=dtype), (*wo.shape[:2], N))
            want = np.asarray(dense(x, w, identity, ct, sizes)[0], np.float64)
            before, after = (
                np.sqrt(np.mean((np.asarray(f(x, w, sizes), np.float64) - want) ** 2))
                for f in (plain, rewritten)
            )
            # `dense` is of float32 too: what it can't tell is no error.
            assert after <= max(1.10 * before, 1e-6 * np.abs(want).max())


def test_gates_beyond_the_range_of_exp():
    """``exp(100)`` is infinite, and what is divided by it is a zero, as by the kernel."""
    x, w, _, _ = data(0, F32)
    x, w = jnp.sign(x), jnp.full_like(w, 1.0)
    form = halves(WRITTEN_OUT["quotient"])
    x = jnp.where(jnp.arange(x.shape[0])[:, None] % 2 == 0, -1.0, 1.0) * jnp.ones_like(x)
    want, got = jax.jit(form)(x, w, FULL), jax.jit(ours(form))(x, w, FULL)
    assert not np.asarray(want[0]).any()
    assert np.isfinite(np.asarray(want)).all()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_derivative_is_that_of_the_program_as_written():
    """``1 / (1 + exp(-gate))`` has none where ``exp`` is infinite: nor has the rewritten one."""
    form = halves(WRITTEN_OUT["quotient"])
    x, w, _, _ = data(0, F32)
    x, w = -jnp.ones_like(x), jnp.ones_like(w)
    of = lambda form: jax.jit(jax.grad(lambda x: form(x, w, FULL).sum()))(x)
    assert np.isnan(np.asarray(of(form))).any()
    np.testing.assert_array_equal(np.isnan(of(ours(form))), np.isnan(of(form)))


# --- near misses ----------------------------------------------------------------------------------

ORDER = "gate, its logistic and up in another order"
FURTHER = "a further factor"
NEARLY = {
    "both": ("up", "silu of both factors", lambda g, u: silu(g) * silu(u)),
    "both, one written out": (
        "up", "silu of both factors", lambda g, u: g / (1 + jnp.exp(-g)) * silu(u)),
    "both, by sigmoids": (
        "up", "silu of both factors", lambda g, u: (g * sigmoid(g)) * (u * sigmoid(u))),
    "sigmoid * up first": ("product", ORDER, lambda g, u: g * (sigmoid(g) * u)),
    "gate * up first": ("product", ORDER, lambda g, u: g * u * sigmoid(g)),
    "up divided": ("product", ORDER, lambda g, u: g * (u / (1 + jnp.exp(-g)))),
    "a number on up": ("up", FURTHER, lambda g, u: silu(g) * (u * 2)),
    "a number on silu": ("product", FURTHER, lambda g, u: silu(g) * 2 * u),
    "rows' weights": (
        "up", FURTHER, lambda g, u: silu(g) * (u * jnp.arange(g.shape[0], dtype=u.dtype)[:, None])),
    "swish of another slope": (
        "gate", "the logistic of a multiple of it", lambda g, u: g * sigmoid(1.702 * g) * u),
}  # fmt: skip


@pytest.mark.parametrize("gemms", [halves, apart], ids=["one GEMM", "two GEMMs"])
@pytest.mark.parametrize("miss", NEARLY)
def test_why_it_is_none_is_told(gemms, miss):
    path, found, product = NEARLY[miss]
    x, w, _, _ = data()
    form = gemms(product)
    (site,) = explain(form, x, w, FULL, passes=[NAME]).declined
    (reason,) = site.reasons
    assert reason.code == "near-miss"
    assert reason.sentence.endswith(f"ragged_dot_general → {path}")
    assert reason.found.startswith(found), reason.found
    assert "test_gmm_swiglu_spelling.py:" in reason.found
    with pytest.raises(PassNotApplicable, match=found):
        ours(form)(x, w, FULL)


OTHERS = {
    "another sign": lambda g, u: g / (1 + jnp.exp(g)) * u,
    "another number": lambda g, u: g / (2 + jnp.exp(-g)) * u,
    "no gate": lambda g, u: sigmoid(g) * u,
    "another activation": lambda g, u: jax.nn.gelu(g) * u,
    "squared": lambda g, u: silu(g) * silu(g),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_even_near_is_not_told(other):
    x, w, _, _ = data()
    assert not explain(halves(OTHERS[other]), x, w, FULL, passes=[NAME]).sites


@pytest.mark.parametrize("product", [lambda g, u: silu(g) * u, *(p for *_, p in NEARLY.values())])
def test_a_backward_alone_is_no_near_miss(product):
    """No product is computed where only gradients are asked for: nothing to tell of it."""
    x, w, _, _ = data()
    grad = jax.grad(lambda x, w: halves(product)(x, w, FULL).astype(F32).sum(), (0, 1))
    assert not explain(grad, x, w, passes=[NAME]).sites
