"""router_grad_from_wo_input where every expert works on every token, however they are combined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from relower import explain, optimize
from relower.compat import tracing

NAME = "router_grad_from_wo_input"
EXPERTS, TOKENS, M, D = 3, 10, 8, 6

einsum = jnp.einsum
COMBINES = {
    "etd,te->td": lambda y, w: einsum("etd,te->td", y, w),
    "etd,et->td": lambda y, w: einsum("etd,et->td", y, w.T),
    "etd,te->dt": lambda y, w: einsum("etd,te->dt", y, w).T,
    "te,etd->td": lambda y, w: einsum("te,etd->td", w, y),
    "weights rounded": lambda y, w: einsum("etd,te->td", y, w.astype(y.dtype)),
    "turned, einsum": lambda y, w: einsum("ted,te->td", y.swapaxes(0, 1), w),
    "turned, sum": lambda y, w: (y.swapaxes(0, 1) * w[..., None]).sum(1),
    "sum": lambda y, w: (y * w.T[..., None]).sum(0),
}


def rows(h, wo):
    return einsum("etm,emd->etd", h, wo)


def vjp_of(combine, product=rows):
    def fn(h, wo, w, g):
        return jax.vjp(lambda h, wo, w: combine(product(h, wo), w), h, wo, w)[1](g)

    return fn


def integers(*shapes, dtype=np.float32, seed=0):
    r = np.random.RandomState(seed)
    return [jnp.asarray(r.choice([-3, -2, -1, 1, 2, 3], s), dtype) for s in shapes]


def data(dtype=np.float32):
    h, wo = integers((EXPERTS, TOKENS, M), (EXPERTS, M, D), dtype=dtype)
    w, g = integers((TOKENS, EXPERTS), (TOKENS, D), seed=1)
    return h, wo, w, g


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("combine", COMBINES)
def test_every_way_to_combine(eqns_of, combine, dtype):
    h, wo, w, g = data(dtype)
    fn = vjp_of(COMBINES[combine])
    if dtype != np.float32:
        g = g.astype(jax.eval_shape(COMBINES[combine], rows(h, wo), w).dtype)
    done = optimize(fn, passes=[NAME])
    assert explain(fn, h, wo, w, g, passes=[NAME]).counts() == {NAME: 1}
    equal(jax.jit(done)(h, wo, w, g), jax.jit(fn)(h, wo, w, g))
    products = lambda f: [e for e in eqns_of(f, h, wo, w, g, name="dot_general")
                          if {a.aval.shape for a in e.invars} == {h.shape, wo.shape}]  # fmt: skip
    assert (len(products(fn)), len(products(done))) == (1, 0)


def test_several_axes_of_tokens_and_of_choices():
    h, wo = integers((2, 3, 4, 5, M), (2, 3, M, D))
    w, g = integers((4, 3, 5, 2), (5, 4, D), seed=1)
    product = lambda h, wo: einsum("abstm,abmd->abstd", h, wo)
    fn = vjp_of(lambda y, w: einsum("abstd,sbta->tsd", y, w), product)
    assert explain(fn, h, wo, w, g, passes=[NAME]).counts() == {NAME: 1}
    equal(jax.jit(optimize(fn, passes=[NAME]))(h, wo, w, g), jax.jit(fn)(h, wo, w, g))


@pytest.mark.parametrize("combine", ["etd,te->td", "turned, sum"])
def test_under_remat_and_with_the_other_passes(combine):
    def loss(h, wo, w):
        y = jax.checkpoint(lambda *a: COMBINES[combine](rows(*a[:2]), a[2]))(jnp.tanh(h), wo, w)
        return jnp.sum(y * jnp.arange(1.0, D + 1))

    args = [a.astype(jnp.float32) for a in data()[:3]]
    fn = jax.grad(loss, (0, 1, 2))
    for which in ({"passes": [NAME]}, {"contract": "rounding"}):
        got, want = jax.jit(optimize(fn, **which))(*args), jax.jit(fn)(*args)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def errors(found, wanted):
    return [np.linalg.norm(np.asarray(f, np.float64) - w) / np.linalg.norm(w)
            for f, w in zip(found, wanted, strict=True)]  # fmt: skip


def op_by_op(fn, *args):
    """Each operation compiled by itself: within one, a CPU keeps bfloat16 unrounded."""
    return tracing.evaluate(jax.make_jaxpr(fn)(*args), *args)


@functools.cache
def drawn(seed, dtype):
    r = np.random.RandomState(seed)
    h, wo = r.randn(EXPERTS, 32, 96), r.randn(EXPERTS, 96, 48) / 10
    w, g = r.dirichlet(np.ones(EXPERTS), 32), r.randn(32, 48)
    return [jnp.asarray(a, d) for a, d in zip((h, wo, w, g), (dtype, dtype, "f4", "f4"))]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_error_is_at_most_a_tenth_larger(dtype):
    before, after = [], []
    fn = vjp_of(COMBINES["etd,te->td"])
    for seed in range(12):
        args = drawn(seed, dtype)
        h, wo, w, g = (np.asarray(a, np.float64) for a in args)
        dh = np.einsum("td,te,emd->etm", g, w, wo)
        dwo = np.einsum("td,te,etm->emd", g, w, h)
        wanted = dh, dwo, np.einsum("td,etm,emd->te", g, h, wo)
        before.append(errors(op_by_op(fn, *args), wanted))
        after.append(errors(op_by_op(optimize(fn, passes=[NAME]), *args), wanted))
    assert (np.mean(after, 0) <= 1.10 * np.mean(before, 0)).all()


# --- near misses ----------------------------------------------------------------------------------


def etd(y, w):
    return einsum("etd,te->td", y, w)


def declined(why, fn, *args):
    report = explain(fn, *args, passes=[NAME])
    assert not report.applied
    return [[r.split(":")[0] for r in reasons] for reasons in why(report, NAME)]


def test_declined_where_the_forward_reads_the_rows_too(why):
    h, wo, w, _ = data()
    loss = lambda h, wo, w: jnp.square(etd(rows(h, wo), w)).sum()
    assert declined(why, jax.grad(loss, (0, 1, 2)), h, wo, w) == [["read-elsewhere"]]


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("rows")])
def test_declined_where_the_rows_have_a_name(why, policy):
    h, wo, w, _ = data()
    layer = lambda h, wo, w: etd(checkpoint_name(rows(h, wo), "rows"), w)
    loss = lambda *a: jnp.sum(jax.checkpoint(layer, policy=policy)(*a) * jnp.arange(1.0, D + 1))
    assert declined(why, jax.grad(loss, (0, 1, 2)), h, wo, w) == [["saved"]]


@pytest.mark.parametrize("combine", ["ted,te->td", "by element"])
def test_declined_where_the_product_is_of_another_layout(why, combine):
    h, wo, w, g = data()
    by = {"ted,te->td": lambda y, w: einsum("ted,te->td", y, w),
          "by element": lambda y, w: (y * w[..., None]).sum(1)}  # fmt: skip
    fn = vjp_of(by[combine], lambda h, wo: einsum("etm,emd->ted", h, wo))
    assert declined(why, fn, h, wo, w, g) == [["layout"]]


def test_declined_where_the_input_has_no_gradient(why):
    h, wo, w, g = data()
    fn = lambda wo, w, g: jax.vjp(lambda wo, w: etd(rows(h, wo), w), wo, w)[1](g)
    assert declined(why, fn, wo, w, g) == [["no-input-gradient"]]


def test_declined_where_the_weighted_cotangents_are_returned(why):
    h, wo, w, g = data()

    def fn(h, wo, w, g):
        d = einsum("td,te->etd", g, w)
        return einsum("td,etd->te", g, rows(h, wo)), einsum("etd,emd->etm", d, wo), d

    assert declined(why, fn, h, wo, w, g) == [["other-reader"]]


def test_declined_in_float32_where_the_sums_would_be_longer(why):
    h, wo = integers((EXPERTS, TOKENS, M), (EXPERTS, M, 7))
    w, g = integers((TOKENS, EXPERTS), (TOKENS, 7))
    assert declined(why, vjp_of(etd), h, wo, w, g) == [["longer-sum"]]


def test_sums_of_other_rows_are_no_candidates():
    h, wo, w, g = data()

    def of(first, second, weights):
        """The weights' gradient, and that of the input, of cotangents that may be others."""

        def fn(h, wo, w, g):
            d = einsum("td,te->etd", second(g), w)
            return einsum(weights, first(g), rows(h, wo)), einsum("etd,emd->etm", d, wo)

        return fn

    same = lambda g: g
    assert explain(of(same, same, "td,etd->te"), h, wo, w, g, passes=[NAME]).counts()
    h, wo = (jnp.concatenate([a] * 4)[:TOKENS] for a in (h, wo))
    square = jnp.ones((TOKENS, TOKENS))  # as many experts as tokens: axes may be confused
    for fn in (of(jnp.negative, same, "td,etd->te"), of(same, same, "ed,etd->te")):
        assert not explain(fn, h, wo, square, g, passes=[NAME]).sites
