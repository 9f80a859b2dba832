"""The twin's sorts are the plain ones, so the model's bits are the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routed_moe as plain
import routed_moe_by_hand as twin

SMALL = replace(plain.TINY, vocab=17, hidden=16, head_dim=8, expert_width=8, batch=2, sequence=16)
CONFIGS = {
    "plain": SMALL,
    "padding": replace(SMALL, padding=True, router_dtype=jnp.bfloat16),
    "bf16_one_expert": replace(
        SMALL, router_dtype=jnp.bfloat16, dtype=jnp.bfloat16, padding=True, experts_per_token=1
    ),
}
ROUTERS = {
    "random": lambda router: router,
    "ties": jnp.zeros_like,
    "one_takes_all": lambda router: router.at[..., 3].add(100.0),
}


def assert_same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def inputs(config, router="random"):
    params = plain.init_params(jax.random.key(0), config)
    params["layers"]["router"] = ROUTERS[router](params["layers"]["router"])
    return params, plain.synthetic_batch(jax.random.key(1), config)


def loss_and_grads(params, batch, config):
    return jax.value_and_grad(plain.loss_fn)(params, batch, config)


jitted_loss_and_grads = jax.jit(loss_and_grads, static_argnums=2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("router", ROUTERS)
def test_loss_and_gradients_have_the_same_bits(name, router):
    config = CONFIGS[name]
    args = inputs(config, router)
    wanted = jitted_loss_and_grads(*args, config)
    assert np.isfinite(wanted[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted[1]))
    assert_same_bits(jitted_loss_and_grads(*args, twin.by_hand(config)), wanted)


def test_loss_and_gradients_have_the_same_bits_without_jit():
    config = CONFIGS["padding"]
    args = inputs(config)
    assert_same_bits(loss_and_grads(*args, twin.by_hand(config)), loss_and_grads(*args, config))


@pytest.mark.parametrize("rows", [1, 3, 256, 257])
@pytest.mark.parametrize(("low", "high"), [(-1, 6), (0, 0), (0, 7), (-1, 511)])
def test_packed_sort_is_the_stable_argsort(rows, low, high):
    keys = jax.random.randint(jax.random.key(rows), (rows,), low, high + 1)
    keys = keys.at[0].set(high).at[-1].set(low)
    for sort in (twin.stable_argsort, twin.order_of_small_keys):
        order = sort(keys, low, high)
        assert order.dtype == jnp.argsort(keys).dtype
        np.testing.assert_array_equal(order, np.argsort(keys, stable=True))
    np.testing.assert_array_equal(twin.order_of_pairs(keys), np.argsort(keys, stable=True))


def test_packed_keys_fill_all_32_bits():
    rows = 1 << 12
    high = (1 << 20) - 1
    keys = jax.random.randint(jax.random.key(0), (rows,), high - 3, high + 1)
    order = twin.order_of_small_keys(keys, 0, high)
    np.testing.assert_array_equal(order, np.argsort(keys, stable=True))


def sorts(keys, low, high):
    jaxpr = jax.make_jaxpr(partial(twin.stable_argsort, low=low, high=high))(keys)
    return [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "sort"]


@pytest.mark.parametrize(
    ("rows", "high", "operands"),
    [
        (plain.REAL.batch * plain.REAL.sequence * plain.REAL.experts_per_token, 511, 1),
        (81_920, 81_919, 2),
        (1 << 16, (1 << 16) - 1, 1),
        ((1 << 16) + 1, 1 << 16, 2),
    ],
)
def test_pairs_are_sorted_only_where_keys_do_not_fit(rows, high, operands):
    (sort,) = sorts(jax.ShapeDtypeStruct((rows,), jnp.int32), 0, high)
    assert len(sort.invars) == operands
    assert not sort.params["is_stable"]


def test_the_twin_has_no_stable_sort():
    args = plain.abstract_inputs(SMALL)
    text = {
        name: plain.make_train_step(config).lower(*args).as_text()
        for name, config in {"plain": SMALL, "twin": twin.by_hand(SMALL)}.items()
    }
    assert "is_stable = true" in text["plain"]
    assert "is_stable = true" not in text["twin"]
    assert "is_stable = false" in text["twin"]
