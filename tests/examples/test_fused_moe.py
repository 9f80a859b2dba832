"""The example with fused weights trains, lowers at the real size, and its structure changes as the
passes say: nothing more, nothing less."""

import math
from collections import Counter
from dataclasses import replace

import fused_moe as moe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_moe import REAL, TINY

from relower import explain, optimize
from relower.lowering.case import case
from relower.lowering.lower import lower

WEIGHTS = ("concat_cotangents", "split_fused_wi")
ROUTER = "router_grad_from_wo_input"
BACKWARD = "gmm_dswiglu"
# In float32 the router's pass asks for experts wider than the model.
DROPS = replace(TINY, buffer=16, width=128)


@pytest.fixture(scope="module")
def mesh():
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((moe.DEVICES,), (moe.AXIS,), axis_types=kinds)


def test_it_trains(mesh):
    losses = moe.train(TINY, jax.jit(moe.make_step(TINY, mesh), donate_argnums=0), 15)
    assert losses[0] == pytest.approx(math.log(TINY.vocab), rel=0.4)
    assert losses[-1] < 0.3


def inputs(config):
    params = moe.init_params(jax.random.key(0), config)
    return params, moe.synthetic_tokens(jax.random.key(1), config)


@pytest.fixture(scope="module")
def plain(mesh):
    """With rows dropped, the loss and its gradients as they are."""
    gradient = moe.make_gradient(DROPS, mesh)
    args = inputs(DROPS)
    return gradient, args, jax.jit(gradient)(*args)


def test_loss_and_gradients_keep_their_bits_with_the_weights_whole(plain):
    gradient, args, want = plain
    got = jax.jit(optimize(gradient, passes=WEIGHTS))(*args)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.any(b), path
        # No zero has the other sign here: the padded halves held none of their own.
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_gradients_by_the_other_product_agree(plain):
    gradient, args, want = plain
    assert explain(gradient, *args, passes=[ROUTER]).counts() == {ROUTER: TINY.chunks}
    got = jax.jit(optimize(gradient, passes=[ROUTER]))(*args)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        size = float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * size, err_msg=str(path))


# --- structure ------------------------------------------------------------------------------------

WHOLE_WI = {  # forward, recomputed, backward: one where there were two in each
    "stablehlo.all_gather": -2,
    "stablehlo.all_reduce": -2,  # the scales' largest of all devices
    "stablehlo.reduce_scatter": -1,
    "stablehlo.optimization_barrier": -3,
    "stablehlo.concatenate": -2,  # the backward's, made of the pads, is gone again
    "stablehlo.pad": -2,
}
QUANTISED = ("stablehlo.abs", "stablehlo.maximum", "stablehlo.divide", "stablehlo.reduce",
             "stablehlo.multiply", "stablehlo.convert", "stablehlo.compare",
             "stablehlo.select")  # fmt: skip
"""What a fake quantisation is made of."""
LAID_OUT = ("stablehlo.slice", "stablehlo.broadcast_in_dim", "stablehlo.constant", "stablehlo.add")
"""Cuts, numbers spread, and the sum of the pads."""
CALLS = ("func.call", "func.return", "stablehlo.return")
FLOAT8 = "f8E4M3FN"


def lowered(config, passes=None, contract=None):
    state, tokens = moe.abstract_inputs(config)

    def build(mesh):
        gradient = moe.make_gradient(config, mesh)
        if passes or contract:
            gradient = optimize(gradient, passes=passes, contract=contract)
        return gradient, (state.params, tokens)

    program = lower(case(build, mesh={moe.AXIS: moe.DEVICES}), levels=("inlined",))
    assert not program.unknowns
    return program


@pytest.fixture(scope="module")
def before():
    return {"tiny": lowered(TINY), "real": lowered(REAL)}


CONFIGS = {"tiny": TINY, "real": REAL}


def difference(a, b):
    """How many more operations of each kind ``b`` has."""
    return {k: b.ops.get(k, 0) - a.ops.get(k, 0) for k in {*a.ops, *b.ops}
            if b.ops.get(k, 0) != a.ops.get(k, 0)}  # fmt: skip


def conversions(program, shape):
    """Conversions to float8, by the shape of the result."""
    text = "\n".join(s.text for s in program.forms["inlined"].sections)
    lines = [line for line in text.splitlines() if "stablehlo.convert" in line and FLOAT8 in line]
    return sum(f"-> tensor<{shape}x{FLOAT8}>" in line for line in lines)


@pytest.mark.parametrize("size", CONFIGS)
def test_the_weights_are_quantised_and_gathered_whole(before, size):
    config = CONFIGS[size]
    after = lowered(config, passes=WEIGHTS)
    found = difference(before[size], after)
    assert {k: n for k, n in found.items() if k in WHOLE_WI} == WHOLE_WI
    rest = set(found) - set(WHOLE_WI) - set(QUANTISED) - set(LAID_OUT) - set(CALLS)
    assert not rest, {k: found[k] for k in rest}
    assert all(n < 0 for n in found.values()), found
    rows = config.hidden // moe.DEVICES
    half, whole = (f"{config.experts}x{rows}x{n}" for n in (config.width, 2 * config.width))
    count = lambda program: (conversions(program, half), conversions(program, whole))
    assert (count(before[size]), count(after)) == ((4, 0), (0, 2))
    assert before[size].ops["stablehlo.pad"] == 2
    assert "stablehlo.pad" not in after.ops


def test_the_backward_has_one_product_fewer_for_each_chunk(before):
    after = lowered(REAL, passes=[ROUTER])
    found = Counter(difference(before["real"], after))
    assert found.pop("chlo.ragged_dot") == -REAL.chunks
    # For each chunk the weights are spread once more, and there is one product of rows more: of
    # w · h, w · u and u · h where w · g and y · g were.
    assert found.pop("stablehlo.multiply") == REAL.chunks
    assert found.pop("stablehlo.broadcast_in_dim") == REAL.chunks
    assert found.pop("stablehlo.convert") > 0  # these are worked out in float32
    assert not found


def kernels(program):
    """How many calls there are of each kernel."""
    found = Counter()
    for digest, calls in program.kernel_calls.items():
        found[program.kernels[digest].label] += calls
    return found


def test_all_passes_together_at_the_real_size(before):
    after = lowered(REAL, contract="rounding")
    for name in ("stablehlo.optimization_barrier", "stablehlo.all_gather"):
        assert after.ops[name] - before["real"].ops[name] == WHOLE_WI[name], name
    assert "stablehlo.pad" not in after.ops
    # One fused kernel for each chunk's gate and up, in the forward pass and recomputed. That of the
    # backward would have to hand its cotangent to the routing weights' gradient, too.
    assert not before["real"].kernels
    assert kernels(after) == {"grouped_swiglu": 2 * REAL.chunks}
    products = after.ops["chlo.ragged_dot"] + 2 * REAL.chunks
    assert products == before["real"].ops["chlo.ragged_dot"] - REAL.chunks


def test_one_fused_kernel_for_each_chunk_forward_and_one_backward(before):
    """No product is added: each kernel's was one."""
    after = lowered(REAL, passes=("gmm_swiglu", BACKWARD))
    assert kernels(after) == {"grouped_swiglu": 2 * REAL.chunks, "grouped_dswiglu": REAL.chunks}
    products = after.ops["chlo.ragged_dot"] + 3 * REAL.chunks
    assert products == before["real"].ops["chlo.ragged_dot"]


def test_the_backward_kernel_is_declined_where_the_router_s_gradient_reads_its_cotangent(mesh):
    gradient, args = moe.make_gradient(REAL, mesh), moe.abstract_inputs(REAL)
    report = explain(gradient, args[0].params, args[1], passes=[ROUTER, BACKWARD])
    assert report.counts() == {ROUTER: REAL.chunks}
    codes = [r.code for s in report.declined if s.pass_name == BACKWARD for r in s.reasons]
    assert codes == ["narrowing-cast", "weighted", "other-reader"] * REAL.chunks
