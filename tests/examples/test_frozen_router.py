"""The trainer with frozen routers: it trains, and freezing changes nothing that is trained."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import frozen_router as fr
import jax
import numpy as np
import pytest
from frozen_router import REAL, TINY
from jax.sharding import AxisType

from relower import Frozen, explain, optimize
from relower.compat import bodies, jaxprs

NAME = "frozen_gradient"
DECLARED = Frozen(fr.FROZEN, grads=lambda out: out[1])
SETUPS = {
    "one device": (TINY, False),
    "fsdp": (TINY, True),
    "deferred": (replace(TINY, deferred=True), True),
}
ROUTER = "layers/router/kernel"
UPDATE = jax.jit(fr.make_update(TINY))
NORM = jax.jit(lambda grads: sum((g * g).sum() for g in jax.tree.leaves(grads)))


def mesh():
    return jax.make_mesh((8,), (fr.AXIS,), axis_types=(AxisType.Auto,))


def plain(setup):
    config, sharded = SETUPS[setup]
    return fr.make_forward_backward(config, mesh() if sharded else None)


@cache
def inputs(config=TINY):
    key = jax.random.key(0)
    return fr.init_state(key, config), fr.synthetic_batch(key, config)


def differing(got, want):
    left, right = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (got, want))
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, a), (_, b) in zip(left, right, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]


def equations(fn, *args):
    def walk(body):
        for eqn in jaxprs.opened(body).eqns:
            yield eqn.primitive.name, tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
            for entered in bodies.carried(eqn).entered:
                yield from walk(entered.body)

    return Counter(walk(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize("setup", SETUPS)
def test_gradients_norms_and_trained_weights_keep_their_bits(setup):
    state, batch = inputs()
    fn = plain(setup)
    run, done = jax.jit(fn), jax.jit(optimize(fn, passes=[NAME], frozen=DECLARED))
    a = b = state
    for _ in range(2):
        got = jax.tree.map(np.asarray, (done(a.params, batch), run(b.params, batch)))
        (loss, grads), (want_loss, want) = got
        assert not np.any(grads["layers"]["router"]["kernel"])
        assert np.any(want["layers"]["router"]["kernel"])
        assert differing((loss, grads), (want_loss, want)) == [f"1/{ROUTER}"]
        assert differing(grads["layers"]["wi"], want["layers"]["wi"]) == []
        want["layers"]["router"]["kernel"] = grads["layers"]["router"]["kernel"]
        assert differing(NORM(grads), NORM(want)) == []
        a, b = UPDATE(a, grads), UPDATE(b, want)
        assert differing(a, b) == []
    assert differing(a.params["layers"]["router"], state.params["layers"]["router"]) == []
    assert differing(a.params, state.params)


@pytest.mark.parametrize("setup", SETUPS)
def test_one_product_goes_and_none_comes(setup):
    """With it, what reduces it over the devices; nothing else is added or changed in its shape."""
    state, batch = inputs()
    fn = plain(setup)
    done = optimize(fn, passes=[NAME], frozen=DECLARED)
    before, after = (equations(f, state.params, batch) for f in (fn, done))
    gone, come = before - after, after - before
    dots = {key: n for key, n in gone.items() if key[0] == "dot_general"}
    assert dots == {("dot_general", (8, 32)): 1}
    assert not [key for key in come if key[0] in ("dot_general", "psum", "reduce_scatter")]
    reductions = {key: n for key, n in gone.items() if key[0] in ("psum", "reduce_scatter")}
    assert (
        reductions
        == {
            "one device": {},
            "fsdp": {("reduce_scatter", (4, 8)): 1},
            "deferred": {("psum", (2, 32, 8)): 1},
        }[setup]
    )


def test_eager():
    state, batch = inputs()
    fn = plain("one device")
    done = optimize(fn, passes=[NAME], frozen=DECLARED)
    from relower.compat import tracing

    closed, shape = jax.make_jaxpr(fn, return_shape=True)(state.params, batch)
    flat = tracing.evaluate(closed, *jax.tree.leaves((state.params, batch)))
    want = jax.tree.unflatten(jax.tree.structure(shape), flat)
    got = done(state.params, batch)
    assert differing(got, want) == [f"1/{ROUTER}"]
    grads, wanted = got[1], want[1]
    wanted["layers"]["router"]["kernel"] = grads["layers"]["router"]["kernel"]
    assert differing(NORM(grads), NORM(wanted)) == []
    assert differing(UPDATE(state, grads), UPDATE(state, wanted)) == []


def test_the_report_is_the_users_tree():
    state, batch = fr.abstract_inputs(TINY)
    report = explain(plain("fsdp"), state.params, batch, passes=[NAME], frozen=DECLARED)
    (leaf,) = report.frozen
    rows = TINY.batch * TINY.sequence // 8
    steps = TINY.micro_batches * TINY.layers
    assert leaf.flops == steps * 2 * rows * 32 * 8
    assert leaf.collective_bytes == steps * 32 * 8 * 4
    assert leaf.accumulator_bytes == TINY.layers * 32 * 8 * 4 // 8
    assert leaf.source.startswith(fr.__file__)
    text = str(report)
    assert "\n  layers\n    router\n      kernel  f32[8,32]  declared, saves 65,536 FLOPs" in text


@pytest.mark.parametrize("config", [TINY, replace(TINY, norm_of_all=True)],
                         ids=["trained", "all"])  # fmt: skip
def test_in_one_function_the_mask_is_seen_and_the_norm_of_all_declined(config):
    state, batch = fr.abstract_inputs(config)
    (leaf,) = explain(fr.make_step(config), state, batch, passes=[NAME]).frozen
    assert leaf.path == f"state/params/{ROUTER}"
    if config.norm_of_all:
        (reason,) = leaf.reasons
        assert reason.code == "read-first"
        assert f"called at {fr.__file__}" in reason.found
        line = int(reason.found.rsplit(":", 1)[1])
        assert "global_norm" in Path(fr.__file__).read_text().splitlines()[line - 1]
    else:
        assert leaf.status.value == "applied"
        assert leaf.way == "recognised"


def test_the_real_size_lowers_with_one_product_less():
    state, batch = fr.abstract_inputs(REAL)
    fn = fr.make_forward_backward(REAL)
    done = optimize(fn, passes=[NAME], frozen=DECLARED)
    counts = [
        jax.jit(f).trace(state.params, batch).lower(lowering_platforms=("tpu",)).as_text().count(
            "stablehlo.dot_general"
        )
        for f in (fn, done)
    ]  # fmt: skip
    assert counts[0] - counts[1] == 1


@pytest.mark.parametrize("name", [
    "tiny", "real", "fsdp", "real_fsdp", "deferred", "step", "real_step", "step_with_norm",
])  # fmt: skip
def test_every_case_is_one(name):
    made = getattr(fr, name)()
    assert made.args or made.mesh == {fr.AXIS: 8}


def test_the_command_trains_and_the_loss_falls():
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    out = run([sys.executable, fr.__file__, "--steps", "11", "--optimize"]).stdout
    first, last = (float(line.split()[-1]) for line in out.splitlines())
    assert 4 < first < 6
    assert last < 0.1 * first
