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
    layers: int = 2

    @property
    def config(self):
        return replace(
            BASE, layers=self.layers, experts=self.experts, experts_per_token=self.k,
            chunks=self.chunks, buffer=self.buffer, padding=self.padding, dtype=self.dtype,
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


def inputs(setting, seed=0):
    """Parameters of all layers, tokens of all devices, and which of them are real."""
    names = ("router", "gate", "up", "down")
    params = moe.init_params(jax.random.key(2 * seed), setting.config)["layers"]
    params = {name: params[name] for name in names}
    params["router"] = ROUTERS[setting.router](params["router"])
    tokens = setting.tokens * 8
    x = jnp.abs(jax.random.normal(jax.random.key(2 * seed + 1), (tokens, HIDDEN))).astype(
        setting.dtype
    )
    return params, x, jnp.arange(tokens) % 3 != 1


def loss_fn(params, x, mask, config):
    """One number that every entry of the routed layers' output enters."""

    @jax.checkpoint
    def layer(x, params):
        y = moe.mixture_of_sharded_experts(params, x, mask, config)
        return x + y, None

    x, _ = lax.scan(layer, x, params)
    weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
    return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) * weights)


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


# One layer where activations are bfloat16: the second would see other rows than the reference's.
ROUNDED = {
    "full_buffer": Setting(chunks=2, padding=True),
    "drops": Setting(chunks=2, buffer=8),
    "bf16_drops": Setting(layers=1, chunks=2, buffer=8, dtype=jnp.bfloat16),
}
SEEDS = range(5)


def in_float64(setting, mesh, args):
    """Loss and gradients computed in float64, of the same parameters and tokens."""
    wide = replace(setting, dtype=jnp.float64, router_dtype=jnp.float64)
    jax.config.update("jax_enable_x64", True)
    try:
        fn = jax.jit(loss_and_grads(wide, mesh))
        given = [jax.tree.map(lambda leaf: as_wide(leaf), one) for one in args]
        return [jax.tree.map(np.asarray, fn(*one)) for one in given]
    finally:
        jax.config.update("jax_enable_x64", False)


def as_wide(leaf):
    leaf = np.asarray(leaf)
    return leaf if leaf.dtype == bool else leaf.astype(np.float64)


def errors(found, wanted):
    """The root mean square of the difference from the reference by leaf, over all seeds."""
    pairs = [(named(a), named(b)) for a, b in zip(found, wanted, strict=True)]
    squares = {
        name: [np.mean((np.asarray(a[name]).astype(np.float64) - b[name]) ** 2) for a, b in pairs]
        for name in pairs[0][1]
    }
    return {name: np.sqrt(np.mean(each)) for name, each in squares.items()}


@pytest.mark.parametrize("name", ROUNDED)
def test_all_passes_err_no_more_than_the_original(name, mesh):
    """At most 1.10 times as far from float64, outside of the gradient and inside of it."""
    setting = ROUNDED[name]
    args = [inputs(setting, seed) for seed in SEEDS]
    rounding = partial(optimize, contract="rounding")
    plain = loss_and_grads(setting, mesh)
    fns = plain, rounding(plain), loss_and_grads(setting, mesh, inner=rounding)
    results = [[fn(*one) for one in args] for fn in map(jax.jit, fns)]
    for found in results:
        for one in found:
            assert_gradients_arrive(one, setting)
    wanted = in_float64(setting, mesh, args)
    original, *rewritten = (errors(found, wanted) for found in results)
    for leaf, scale in errors([jax.tree.map(np.zeros_like, one) for one in wanted], wanted).items():
        # The same routing: else the reference is another program's.
        assert original[leaf] < (0.1 if setting.dtype == jnp.bfloat16 else 1e-4) * scale, leaf
        for error in rewritten:
            assert error[leaf] <= 1.10 * original[leaf], (leaf, error[leaf], original[leaf])
