"""The routing of the example with sharded experts: what is left of it, and its bits.

Eight devices, the experts sharded four ways, forward and backward, two layers under scan and remat.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routed_moe as moe
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.passes.optimize import optimize

AXES = {"data": 2, "expert": 4}
HIDDEN = 16
BASE = replace(moe.TINY, layers=2, hidden=HIDDEN, expert_width=8)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True)
class Setting:
    """One way to route; ``tokens`` is what each device has."""

    experts: int = 8
    k: int = 2
    tokens: int = 8
    chunks: int = 1
    buffer: int | None = None
    padding: bool = False
    router: str = "random"
    dtype: jnp.dtype = jnp.float32
    router_dtype: jnp.dtype = jnp.float32

    @property
    def config(self):
        return replace(
            BASE, experts=self.experts, experts_per_token=self.k, chunks=self.chunks,
            buffer=self.buffer, padding=self.padding, dtype=self.dtype,
            router_dtype=self.router_dtype,
        )  # fmt: skip


SETTINGS = {
    "plain": Setting(),
    "chunks": Setting(chunks=2),
    "odd_tokens_padding": Setting(tokens=7, chunks=2, padding=True),
    "one_expert_a_token": Setting(k=1, chunks=2, padding=True),
    "drops": Setting(chunks=2, buffer=8),
    "drops_odd_padding": Setting(tokens=7, buffer=5, padding=True),
    "roomy_buffer": Setting(chunks=2, buffer=32),
    "last_takes_all": Setting(router="last_takes_all", chunks=2),
    "last_takes_all_drops": Setting(router="last_takes_all", chunks=2, buffer=4),
    "empty_expert": Setting(router="empty_expert", chunks=2),
    "ties": Setting(router="ties", chunks=2, router_dtype=jnp.bfloat16),
    "bf16_router": Setting(router_dtype=jnp.bfloat16, chunks=2, padding=True),
    "bf16_model": Setting(dtype=jnp.bfloat16, router_dtype=jnp.bfloat16, chunks=2),
    "128_experts": Setting(experts=128, k=2, chunks=2, buffer=16),
    "512_experts_top_10": Setting(experts=512, k=10, tokens=6, chunks=2, padding=True),
    "512_experts_bf16": Setting(experts=512, k=10, tokens=5, router_dtype=jnp.bfloat16),
}
ROUTERS = {
    "random": lambda router: router,
    "ties": jnp.zeros_like,  # Equal logits: the first experts take all.
    "last_takes_all": lambda router: jnp.zeros_like(router).at[..., -1].set(1.0),
    "empty_expert": lambda router: router.at[..., 1].set(-9.0),
}


def inputs(setting):
    """Parameters of both layers, tokens of all devices, and which of them are real."""
    names = ("router", "gate", "up", "down")
    params = moe.init_params(jax.random.key(0), setting.config)["layers"]
    params = {name: params[name] for name in names}
    params["router"] = ROUTERS[setting.router](params["router"])
    tokens = setting.tokens * 8
    x = jnp.abs(jax.random.normal(jax.random.key(1), (tokens, HIDDEN))).astype(setting.dtype)
    return params, x, jnp.arange(tokens) % 3 != 1


def loss_fn(params, x, mask, config):
    """One number that every entry of the routed layers' output enters."""

    @jax.checkpoint
    def layer(x, params):
        y = moe.mixture_of_sharded_experts(params, x, mask, config)
        return x + y, None

    x, _ = lax.scan(layer, x, params)
    weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
    return jnp.sum(x.astype(jnp.float32) * weights)


def loss_and_grads(setting, mesh, inner=lambda loss: loss):
    """``(params, x, mask) -> (loss, gradients)``, each with a leading axis of devices."""
    config = setting.config

    def local(params, x, mask):
        loss = inner(partial(loss_fn, mask=mask if setting.padding else None, config=config))
        found = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda leaf: leaf[None], found)

    def whole(params, x, mask):
        specs = moe.param_specs(params, mesh)
        rows = P(mesh.axis_names)
        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, rows, rows), out_specs=rows, check_vma=False
        )(params, x, mask)

    return whole


def named(found):
    loss, (params, x) = found
    return {"loss": loss, "x": x, **params}


def assert_same_bits(found, wanted):
    found, wanted = named(found), named(wanted)
    for name, value in wanted.items():
        value, other = np.asarray(value), np.asarray(found[name])
        assert value.dtype == other.dtype
        same = value.view(f"u{value.itemsize}") == other.view(f"u{value.itemsize}")
        assert same.all(), f"{name}: {np.count_nonzero(~same)} of {same.size} differ"


def assert_gradients_arrive(found, setting):
    """No gradient is silently zero: not x's, not the experts', nor, for k > 1, the router's."""
    found = named(found)
    for name in ("x", "gate", "up", "down", *(["router"] if setting.k > 1 else [])):
        assert np.count_nonzero(np.asarray(found[name])), name


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bitwise_passes_keep_every_bit(name, mesh):
    setting = SETTINGS[name]
    args = inputs(setting)
    plain = loss_and_grads(setting, mesh)
    wanted = jax.jit(plain)(*args)
    assert_gradients_arrive(wanted, setting)
    assert_same_bits(jax.jit(optimize(plain))(*args), wanted)


@pytest.mark.parametrize("name", ["chunks", "drops_odd_padding", "bf16_router"])
def test_an_outer_gradient_keeps_every_bit(name, mesh):
    setting = SETTINGS[name]
    args = inputs(setting)
    wanted = jax.jit(loss_and_grads(setting, mesh))(*args)
    found = jax.jit(loss_and_grads(setting, mesh, inner=optimize))(*args)
    assert_gradients_arrive(found, setting)
    assert_same_bits(found, wanted)
