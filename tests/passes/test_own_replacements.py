"""What a rewrite put in place is no site of the user's that another pass, or it, declined."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from swiglu_layers import F32, FULL, apart, data, gradients, layer, split

from relower import explain, optimize


def sites(report, name):
    return [s for s in report.declined if s.pass_name == name]


@pytest.mark.parametrize("form", [split, apart], ids=lambda f: f.__name__)
@pytest.mark.parametrize("of", ["forward", "gradients"])
def test_the_kernels_plain_program_has_no_declined_sites(form, of):
    """Off TPU the kernel is two GEMMs of one x with the parts of one w, as a user might write."""
    x, w, wo, ct = data(0, F32)
    fn, args = (form, (x, w)) if of == "forward" else (gradients(form), (x, w, wo, ct))
    names = ["gmm_swiglu", "shared_lhs_dot"]
    report = explain(fn, *args, FULL, passes=names)
    assert report.counts() == {"gmm_swiglu": 1}
    assert not sites(report, "gmm_swiglu")
    codes = {r.code for s in sites(report, "shared_lhs_dot") for r in s.reasons}
    assert codes <= {"swiglu"}, codes  # the two GEMMs that the user wrote


def parts(x):
    return sum(jnp.sum(x[:, 3 * i : 3 * i + 3] * (i + 1.5)) for i in range(5))


def beside_a_users_own(x, y):
    """Two concatenations, of which concat_cotangents makes one."""
    joined = jnp.concatenate([jnp.tanh(y[:, :3]), jnp.sin(y[:, 3:6])], 1)
    return jax.grad(parts)(x), joined


def test_the_users_own_site_is_still_told():
    x, y = jnp.ones((4, 15)), jnp.ones((4, 6))
    names = ["concat_cotangents", "split_fused_wi"]
    report = explain(beside_a_users_own, x, y, passes=names)
    assert report.counts() == {"concat_cotangents": 1}
    (site,) = sites(report, "split_fused_wi")
    assert [r.code for r in site.reasons] == ["different-ops"]


def test_a_site_that_is_turned_off_is_told_wherever_it_stands():
    """Also one of what another rewrite has put there."""

    def fn(w):
        gate, up = (jnp.tanh(half) for half in jnp.split(w, 2, axis=1))
        return lax.pad(gate, 0.0, [(0, 0, 0), (0, 4, 0)]) + lax.pad(up, 0.0, [(0, 0, 0), (4, 0, 0)])

    name, x = "split_fused_wi", jnp.ones((4, 8))
    (site,) = [s for s in explain(fn, x, contract="value").applied if s.pass_name == name]
    report = explain(fn, x, contract="value", disable=site.addresses)
    assert [r.code for s in sites(report, name) for r in s.reasons] == ["disabled"]


def test_a_pass_that_stood_back_says_why_it_has_nothing_left():
    def weighted(p, x, w, wo, ct):
        rows = layer(split, x, w, wo, FULL) * p[:, None]
        return (rows.astype(F32) * ct.astype(F32)).sum()

    args = jnp.ones(FULL.sum(), jnp.bfloat16), *data()
    names = ["router_grad_from_wo_input", "gmm_dswiglu"]
    report = explain(jax.grad(weighted, (0, 1, 2, 3)), *args, passes=names)
    assert report.counts() == {names[0]: 1}
    assert sites(report, names[1])


def test_applied_sites_in_what_was_put_there_are_counted():
    """shared_lhs_dot makes one GEMM of two in bfloat16; gmm_swiglu applies to that."""
    x, w, _, _ = data()

    def fn(x, w):
        gate, up = jnp.split(w, 2, -1)
        return jax.nn.silu(lax.ragged_dot(x, gate, FULL)) * lax.ragged_dot(x, up, FULL)

    report = explain(fn, x, w, passes=["shared_lhs_dot", "gmm_swiglu"])
    assert report.counts() == {"shared_lhs_dot": 1, "gmm_swiglu": 1}
    assert not report.declined
    jax.block_until_ready(jax.jit(optimize(fn, contract="rounding"))(x, w))
