"""What `optimize` makes of the example is what its twin writes by hand."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routed_moe as plain
import routed_moe_by_hand as twin

from relower.lowering import lower
from relower.passes.optimize import assert_applied, explain, optimize

# Not part of what the twin writes by hand.
OTHERS = ["nonnegative_index", "inverse_permutation", "top_k_by_argmax", "counting_scatter"]
SMALL = replace(plain.TINY, vocab=17, hidden=16, head_dim=8, expert_width=8, batch=2, sequence=16)


def loss(config):
    def loss(params, batch):
        return plain.loss_fn(params, batch, config)

    return loss


def digest(fn, args, level):
    return lower(fn, *args, levels=(level,)).forms[level].digest


@pytest.fixture(scope="module", params=["tiny", "tiny_padded", "real"])
def config(request):
    return {
        "tiny": plain.TINY,
        "tiny_padded": replace(plain.TINY, padding=True),
        "real": plain.REAL,
    }[request.param]


def test_gradient_of_the_optimized_loss_is_the_twins(config):
    state, batch = plain.abstract_inputs(config)
    found, wanted, unchanged = (
        digest(jax.jit(jax.value_and_grad(fn)), (state.params, batch), "inlined")
        for fn in (
            optimize(loss(config), disable=OTHERS),
            loss(twin.by_hand(config)),
            loss(config),
        )
    )
    assert found == wanted
    assert found != unchanged


def test_optimized_step_is_the_twins(config):
    args = plain.abstract_inputs(config)
    step = optimize(plain.make_step(config), disable=OTHERS)
    found, wanted, unchanged = (
        digest(fn, args, "dataflow")
        for fn in (
            jax.jit(step, donate_argnums=0),
            plain.make_train_step(twin.by_hand(config)),
            plain.make_train_step(config),
        )
    )
    assert found == wanted
    assert found != unchanged


@pytest.mark.parametrize(
    ("base", "packed", "inverses"), [(plain.TINY, 2, 2), (plain.REAL, 2, 2)], ids=["tiny", "real"]
)
@pytest.mark.parametrize("padding", [False, True])
def test_all_argsorts_and_top_ks_are_rewritten(base, packed, inverses, padding):
    # Order and inverse, in the forward pass and in its recomputation. Two row numbers of the
    # real size don't fit one word.
    config = replace(base, padding=padding)
    expected = {"argsort_packed_key": packed, "inverse_permutation": inverses,
                "argsort_unique_pairs": 0, "top_k_by_argmax": 2}  # fmt: skip
    assert_applied(plain.make_step(config), plain.abstract_inputs(config), expected)


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, padding=True, router_dtype=jnp.bfloat16, experts_per_token=1)],
    ids=["plain", "bf16_padding_one_expert"],
)
def test_optimized_loss_and_gradients_have_the_same_bits(config):
    def loss_and_grads(params, batch):
        return jax.value_and_grad(plain.loss_fn)(params, batch, config)

    fn, better = jax.jit(loss_and_grads), jax.jit(optimize(loss_and_grads))
    for router in (lambda router: router, jnp.zeros_like):  # Zeros: every choice is a tie.
        params = plain.init_params(jax.random.key(0), config)
        params["layers"]["router"] = router(params["layers"]["router"])
        args = params, plain.synthetic_batch(jax.random.key(1), config)
        pairs = zip(jax.tree.leaves(fn(*args)), jax.tree.leaves(better(*args)), strict=True)
        for wanted, found in pairs:
            assert np.asarray(wanted).tobytes() == np.asarray(found).tobytes()


@pytest.mark.parametrize("padding", [False, True])
def test_the_transpose_of_taking_rows_back_is_a_gather_by_the_order(padding):
    """Within the value contract; the scatters of tokens, sizes and logits are no permutations."""
    config = replace(SMALL, padding=padding)

    def loss_and_grads(params, batch):
        return jax.value_and_grad(plain.loss_fn)(params, batch, config)

    args = (
        plain.init_params(jax.random.key(0), config),
        plain.synthetic_batch(jax.random.key(1), config),
    )
    report = explain(loss_and_grads, *args, passes=["permutation_scatter"])
    (site,) = report.applied
    line = int(site.source.rpartition(":")[2])
    assert "rows[inverse]" in inspect.getsource(plain).splitlines()[line - 1]
    assert "rematted_computation" not in site.scope
    codes = {r.code for s in report.declined for r in s.reasons}
    assert codes <= {"layout", "not-permutation"}
    # Without top_k's scatter a CPU fuses what stood around it, and rounds the softmax elsewhere.
    better = jax.jit(optimize(loss_and_grads, contract="value", disable=["top_k_scatter"]))(*args)
    wanted = jax.jit(loss_and_grads)(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(better), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(np.asarray(a), np.asarray(b))  # -0.0 equals 0.0


SCATTERS = ["permutation_scatter", "sorted_scatter", "counting_scatter", "top_k_scatter"]


@pytest.mark.parametrize("padding", [False, True])
def test_no_scatter_by_the_routing_is_left(padding):
    """Those of the embedding and of the labels stay, each declined with its reason."""
    config = replace(SMALL, padding=padding)

    def loss_and_grads(params, batch):
        return jax.value_and_grad(plain.loss_fn)(params, batch, config)

    state, batch = plain.abstract_inputs(config)
    report = explain(loss_and_grads, state.params, batch, passes=SCATTERS)
    counts = report.counts()
    assert counts == dict.fromkeys(SCATTERS, 1) | {"counting_scatter": 2}, str(report)
    left = explain(optimize(loss_and_grads, passes=SCATTERS), state.params, batch, passes=SCATTERS)
    assert not left.applied
    lines = inspect.getsource(plain).splitlines()
    for site in left.declined:
        file, _, line = site.source.rpartition(":")
        assert "routed_moe" not in file or "embedding" in lines[int(line) - 1], str(left)
    codes = {r.code for s in left.declined if s.pass_name == "sorted_scatter" for r in s.reasons}
    assert "not-routing" in codes
