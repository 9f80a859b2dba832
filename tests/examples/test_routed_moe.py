"""The example trains, routes correctly in the corners, and traces at the real size."""

import math
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routed_moe as moe
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from routed_moe import TINY

LAYER = replace(TINY, hidden=32, experts=6, expert_width=48)
"""One routed layer small enough to run a kernel in interpret mode."""
TOKENS = 64

CONFIGS = {
    "plain": LAYER,
    "one_expert_per_token": replace(LAYER, experts_per_token=1),
    "every_expert": replace(LAYER, experts_per_token=6),
    "bf16_router": replace(LAYER, router_dtype=jnp.bfloat16),
}
MASKS = {
    "no_mask": None,
    "half": np.arange(TOKENS) % 2 == 0,
    "one_token": np.arange(TOKENS) == 5,
    "all_padding": np.zeros(TOKENS, bool),
    "no_padding": np.ones(TOKENS, bool),
}
ROUTERS = {
    "random": lambda router: router,
    # Equal logits everywhere: top_k takes the first experts, the others are empty.
    "ties": jnp.zeros_like,
    # The tokens of `layer_inputs` are positive, so the last expert always comes first.
    "last_takes_all": lambda router: jnp.zeros_like(router).at[:, -1].set(1.0),
    # Expert 1 is the last choice of every token, and empty unless all are taken.
    "empty_expert": lambda router: router.at[:, 1].set(-9.0),
}


def layer_inputs(config, router="random"):
    params = moe.init_params(jax.random.key(0), replace(config, layers=1))["layers"]
    params = {name: params[name][0] for name in ("router", "gate", "up", "down")}
    params["router"] = ROUTERS[router](params["router"])
    x = jnp.abs(jax.random.normal(jax.random.key(1), (TOKENS, config.hidden)))
    return params, x


def dense_reference(params, x, mask, config):
    """Every expert on every token, then a weighted sum; no sort, no groups, no top_k."""
    logits = x.astype(config.router_dtype) @ params["router"].astype(config.router_dtype)
    probabilities = jax.nn.softmax(logits, axis=-1)
    ranks = jnp.argsort(jnp.argsort(-probabilities, axis=-1), axis=-1)
    weights = jnp.where(ranks < config.experts_per_token, probabilities, 0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if mask is not None:
        weights = weights * mask[:, None].astype(weights.dtype)
    y = jnp.zeros_like(x)
    for expert in range(config.experts):
        hidden = jax.nn.silu(x @ params["gate"][expert]) * (x @ params["up"][expert])
        y += weights[:, expert, None].astype(x.dtype) * (hidden @ params["down"][expert])
    return y


# Jitted once per layer, config and presence of a mask, not once per case.
@partial(jax.jit, static_argnums=(0, 1, 2))
def value_and_grads(layer, config, tpu, params, x, mask):
    """The layer's output, and the gradients of one number that every output entry enters."""
    del tpu  # Only so that traces as another backend aren't shared.

    def scalar(params, x):
        y = layer(params, x, mask, config)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), grads = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, x)
    return {"y": y, **grads[0], "x": grads[1]}


def assert_close(found, wanted, rtol, zero=()):
    """Close relative to each array's largest entry: sums that cancel can't do better.

    Gradients named in ``zero`` are zero in exact arithmetic; they may be as wrong as that of x.
    """
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert np.isfinite(found[name]).all(), name
        scale = "x" if name in zero else name
        atol = rtol * float(jnp.max(jnp.abs(wanted[scale])))
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=atol, err_msg=name)


# Both compute the same float32 products and sum up to 64 of them in another order: a few times
# 64 * 2**-24 of the largest entry. The weights of a bf16 router are themselves rounded to 2**-9,
# and its gradient is summed over 32 hidden entries of that precision.
RTOL = {"plain": 2e-5, "one_expert_per_token": 2e-5, "every_expert": 2e-5, "bf16_router": 2e-2}


@pytest.mark.parametrize(
    ("name", "mask"), [(name, "half") for name in CONFIGS] + [("plain", "no_mask")]
)
def test_layer_matches_every_expert_on_every_token(name, mask):
    config = CONFIGS[name]
    inputs = (*layer_inputs(config), MASKS[mask])
    found = value_and_grads(moe.mixture_of_experts, config, False, *inputs)
    wanted = value_and_grads(dense_reference, config, False, *inputs)
    # The weight of a single expert is one whatever the router says.
    assert_close(found, wanted, RTOL[name], zero=["router"] * (config.experts_per_token == 1))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("router", ROUTERS)
def test_corner_cases_match_every_expert_on_every_token(router, mask):
    inputs = (*layer_inputs(LAYER, router), MASKS[mask])
    found = value_and_grads(moe.mixture_of_experts, LAYER, False, *inputs)
    assert_close(found, value_and_grads(dense_reference, LAYER, False, *inputs), RTOL["plain"])


@pytest.mark.parametrize("router", ["ties", "last_takes_all", "empty_expert"])
def test_corner_cases_are_what_they_say(router):
    params, x = layer_inputs(LAYER, router)
    _, ids = moe.route(params["router"], x, None, LAYER)
    counts = np.bincount(np.ravel(ids), minlength=LAYER.experts)
    wanted = {
        "ties": [TOKENS, TOKENS, 0, 0, 0, 0],
        "last_takes_all": [TOKENS, 0, 0, 0, 0, TOKENS],
    }
    if router in wanted:
        assert counts.tolist() == wanted[router]
    else:
        assert counts[1] == 0
        assert np.count_nonzero(counts) == LAYER.experts - 1


def test_masked_tokens_have_id_minus_one_and_weight_zero():
    params, x = layer_inputs(LAYER)
    weights, ids = moe.route(params["router"], x, MASKS["half"], LAYER)
    np.testing.assert_array_equal(np.asarray(ids)[1::2], -1)
    np.testing.assert_array_equal(np.asarray(weights)[1::2], 0)
    assert np.all(np.asarray(ids)[::2] >= 0)
    np.testing.assert_allclose(np.sum(weights, axis=-1)[::2], 1, rtol=1e-6)


def test_what_a_masked_token_holds_does_not_matter():
    params, x = layer_inputs(LAYER)
    mask = MASKS["half"]
    other = jnp.where(mask[:, None], x, 1e30)
    found, wanted = (moe.mixture_of_experts(params, v, mask, LAYER) for v in (other, x))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.asarray(found)[1::2], 0)


@pytest.mark.parametrize("mask", ["no_mask", "half", "all_padding"])
def test_the_tpu_path_computes_the_same(mask, monkeypatch):
    inputs = (*layer_inputs(LAYER), MASKS[mask])
    wanted = value_and_grads(moe.mixture_of_experts, LAYER, False, *inputs)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pltpu.force_tpu_interpret_mode():
        found = value_and_grads(moe.mixture_of_experts, LAYER, True, *inputs)
    # The kernel accumulates in float32 too, tile by tile.
    assert_close(found, wanted, RTOL["plain"])


def test_the_loss_falls_while_the_tiny_model_trains():
    losses = moe.train(TINY, moe.make_train_step(TINY), steps=12)
    assert losses[0] > 0.9 * np.log(TINY.vocab)
    assert losses[-1] < 0.2 * losses[0]


def test_the_loss_falls_with_padding_and_a_bf16_router():
    config = replace(TINY, padding=True, router_dtype=jnp.bfloat16, experts_per_token=1)
    losses = moe.train(config, moe.make_train_step(config), steps=12)
    assert losses[-1] < 0.4 * losses[0]


def test_unrolled_layers_compute_the_same():
    config = replace(TINY, layers=2, hidden=16, expert_width=8, sequence=8, batch=2)
    params = moe.init_params(jax.random.key(0), config)
    batch = moe.synthetic_batch(jax.random.key(1), config)
    wanted = moe.loss_fn(params, batch, config)
    found = moe.loss_fn(params, batch, replace(config, scan_layers=False))
    # One float32 program compiled as a loop and operation by operation: fused differently.
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def equal_lengths(batch, config):
    """With a mask of one length for all sequences: then a mean of means is the mean."""
    return {
        **batch,
        "mask": jnp.broadcast_to(jnp.arange(config.sequence) < 9, (8, config.sequence)),
    }


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"data": 4}, {}),
        ({"data": 2, "expert": 4}, {"chunks": 2, "sequence": 15, "padding": True}),
        ({"data": 1, "expert": 8}, {"chunks": 3, "buffer": 8 * 6 * 2}),
    ],
    ids=["data", "experts_odd_chunks_padding", "all_experts_roomy_buffer"],
)
def test_the_sharded_step_computes_the_same(axes, changes):
    sizes = {"layers": 1, "hidden": 16, "expert_width": 8, "sequence": 16, "batch": 8}
    config = replace(TINY, **{**sizes, **changes})
    shape = tuple(axes.values())
    mesh = jax.make_mesh(
        shape,
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: math.prod(shape)],
    )
    batch = moe.synthetic_batch(jax.random.key(1), config)
    if config.padding:
        batch = equal_lengths(batch, config)
    results = []
    for place in (None, mesh):
        state = moe.init_state(jax.random.key(0), config)
        results.append(moe.make_train_step(config, place)(state, batch))
    (wanted, loss), (found, parallel_loss) = results
    # Means of means: float32 sums in another order.
    np.testing.assert_allclose(parallel_loss, loss, rtol=1e-5)
    # AdamW's first moment is a multiple of the gradient.
    both = (jax.tree.leaves(state.optimizer[1][0].mu) for state in (found, wanted))
    for a, b in zip(*both, strict=True):
        scale = float(np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)


def test_a_buffer_drops_the_rows_that_do_not_fit():
    config = replace(TINY, layers=1, hidden=16, expert_width=8, sequence=16, buffer=8)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    batch = moe.synthetic_batch(jax.random.key(1), config)
    losses = []
    for changes in ({}, {"buffer": None}):
        state = moe.init_state(jax.random.key(0), config)
        step = moe.make_train_step(replace(config, **changes), mesh)
        state, loss = step(state, batch)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
        losses.append(float(loss))
    assert losses[0] != losses[1]


@contextmanager
def as_tpu(monkeypatch):
    device = AbstractDevice("TPU7x", 1, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with monkeypatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(jax, "default_backend", lambda: "tpu")
        yield


@pytest.mark.parametrize("padding", [False, True])
def test_the_real_size_lowers_for_tpu_without_being_allocated(padding, monkeypatch):
    config = replace(moe.REAL, padding=padding)
    before = sum(array.nbytes for array in jax.live_arrays())
    state, batch = moe.abstract_inputs(config)
    leaves = jax.tree.leaves((state, batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) > 300e9

    with as_tpu(monkeypatch):
        lowered = moe.make_train_step(config).trace(state, batch).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert text.count("tpu_custom_call") == 8
    assert "ragged_dot" not in text
    assert "tensor<81920xi32>" in text
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1 << 20


def test_the_step_with_sharded_experts_lowers_for_tpu_at_the_real_size(monkeypatch):
    device = AbstractDevice("TPU7x", 1, "tpu")
    types = (AxisType.Auto,) * 2
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=types, abstract_device=device)
    config = replace(moe.REAL, batch=16, chunks=2)
    with monkeypatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(jax, "default_backend", lambda: "tpu")
        traced = moe.make_train_step(config, mesh).trace(*moe.abstract_inputs(config))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" not in text
    # Of one device: 2 sequences in 2 chunks, gathered from 4 devices, 10 rows a token.
    assert "tensor<163840xi32>" in text
    assert "stablehlo.all_gather" in text
    assert "stablehlo.reduce_scatter" in text


def test_off_tpu_the_step_has_no_kernels():
    lowered = moe.make_train_step(TINY).lower(*moe.abstract_inputs(TINY))
    assert "tpu_custom_call" not in lowered.as_text()


def test_the_step_takes_over_the_buffers_of_its_state():
    lowered = moe.make_train_step(TINY).lower(*moe.abstract_inputs(TINY))
    state = jax.tree.leaves(moe.abstract_inputs(TINY)[0])
    assert lowered.as_text().count("tf.aliasing_output") == len(state)


def test_runs_as_a_script_from_any_directory(tmp_path):
    script = Path(moe.__file__).parent / "routed_moe_by_hand.py"  # Which runs `routed_moe.main`.
    command = [sys.executable, str(script), "--steps", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]
