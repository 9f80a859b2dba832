"""The main job from end to end: the example optimized, lowered for TPU7x, and compared."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import relower
from relower.lowering.program import Location

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import routed_moe as plain  # noqa: E402
import routed_moe_by_hand as twin  # noqa: E402

SORTS = ["argsort_packed_key", "argsort_unique_pairs"]
SMALL = replace(plain.TINY, vocab=17, hidden=16, head_dim=8, expert_width=8, batch=2, sequence=16)
CONFIGS = {
    "plain": SMALL,
    "padding": replace(SMALL, padding=True),
    "bf16_router": replace(SMALL, router_dtype=jnp.bfloat16),
    "one_expert_each": replace(SMALL, experts_per_token=1, padding=True),
}
ROUTERS = {
    "random": lambda router: router,
    "ties": jnp.zeros_like,
    "one_takes_all": lambda router: router.at[..., 3].add(100.0),
}

OTHERS = ["nonnegative_index", "inverse_permutation", "top_k_by_argmax", "counting_scatter"]
"""Not part of what the twin writes by hand."""


def loss_and_grads(params: Any, batch: Any, config: plain.Config) -> Any:
    return jax.value_and_grad(plain.loss_fn)(params, batch, config)


def grads_of_optimized(params: Any, batch: Any, config: plain.Config) -> Any:
    loss = relower.optimize(partial(plain.loss_fn, config=config))
    return jax.value_and_grad(loss)(params, batch)


def optimized_grads(params: Any, batch: Any, config: plain.Config) -> Any:
    return relower.optimize(partial(loss_and_grads, config=config))(params, batch)


def assert_same_bits(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def inputs(config: plain.Config, router: str) -> tuple[Any, Any]:
    params = plain.init_params(jax.random.key(0), config)
    params["layers"]["router"] = ROUTERS[router](params["layers"]["router"])
    return params, plain.synthetic_batch(jax.random.key(1), config)


plain_jitted = jax.jit(loss_and_grads, static_argnums=2)
jitted = [jax.jit(f, static_argnums=2) for f in (grads_of_optimized, optimized_grads)]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_every_gradient_have_the_same_bits(name: str, router: str) -> None:
    config = CONFIGS[name]
    params, batch = inputs(config, router)
    wanted = plain_jitted(params, batch, config)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(wanted[1]["layers"]["gate"]))
    for optimized in jitted:
        assert_same_bits(optimized(params, batch, config), wanted)


def staged(fn: Any) -> Any:
    """``fn`` as jax evaluates it from its jaxpr, which is where every rewrite starts.

    On jax 0.12 that alone may sum a cotangent in another order than ``fn`` called eagerly does.
    """

    def evaluate(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = jax.extend.core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return evaluate


def test_loss_and_every_gradient_have_the_same_bits_without_jit() -> None:
    config = CONFIGS["padding"]
    args = inputs(config, "random")
    loss = staged(partial(plain.loss_fn, config=config))
    assert_same_bits(grads_of_optimized(*args, config), jax.value_and_grad(loss)(*args))
    wanted = staged(partial(loss_and_grads, config=config))(*args)
    assert_same_bits(optimized_grads(*args, config), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_argsort_of_expert_ids_is_found(name: str) -> None:
    """Two argsorts a layer, in the forward scan and again in the rematerialised backward."""
    config = CONFIGS[name]
    state, batch = plain.abstract_inputs(config)
    loss = partial(loss_and_grads, config=config)
    report = relower.assert_applied(loss, (state.params, batch), {
        "argsort_packed_key": 2, "inverse_permutation": 2,
    })  # fmt: skip
    assert {s.scope.rpartition("/")[2] for s in report.applied if s.primitive == "sort"} == {
        "jit(argsort)"
    }
    orders = [s for s in report.declined if s.primitive == "sort"]
    assert [s.pass_name for s in orders] == ["inverse_permutation"] * 2  # they invert nothing
    lines = {s.source for s in report.applied if s.primitive == "sort"}
    assert all(line is not None and "routed_moe.py:" in line for line in lines)
    assert len(lines) == 2


class Programs:
    """The programs of one config, each lowered once."""

    def __init__(self, config: plain.Config) -> None:
        by_hand = twin.by_hand(config)
        state, batch = plain.abstract_inputs(config)

        def grads(config: plain.Config, *, optimize: bool) -> relower.Program:
            loss = partial(plain.loss_fn, config=config)
            loss = relower.optimize(loss, disable=OTHERS) if optimize else loss
            return relower.lower(jax.jit(jax.value_and_grad(loss)), state.params, batch)

        def step(config: plain.Config, *, optimize: bool) -> relower.Program:
            train = plain.make_train_step(config)
            train = relower.optimize(train, disable=OTHERS) if optimize else train
            return relower.lower(train, state, batch)

        self.grads = {
            "plain": grads(config, optimize=False),
            "optimized": grads(config, optimize=True),
            "by hand": grads(by_hand, optimize=False),
        }
        self.steps = {
            "plain": step(config, optimize=False),
            "optimized": step(config, optimize=True),
            "by hand": step(by_hand, optimize=False),
        }


@pytest.fixture(scope="module", params=[False, True], ids=["full", "padding"])
def programs(request: pytest.FixtureRequest) -> Programs:
    return Programs(replace(plain.TINY, padding=request.param))


def test_grad_of_the_optimized_loss_is_the_hand_written_program(programs: Programs) -> None:
    found = relower.diff(programs.grads["optimized"], programs.grads["by hand"], level="inlined")
    assert found.verdict.name == "IDENTICAL", str(found)


def test_the_optimized_step_is_the_hand_written_program(programs: Programs) -> None:
    found = relower.diff(programs.steps["optimized"], programs.steps["by hand"], level="dataflow")
    assert found.verdict.name == "IDENTICAL", str(found)


@pytest.mark.parametrize("version", ["optimized", "by hand"])
def test_both_differ_from_plain_in_the_routing_only(programs: Programs, version: str) -> None:
    for pair in (programs.grads, programs.steps):
        found = relower.diff(pair["plain"], pair[version], level="dataflow")
        assert found.verdict.name == "DIFFERENT"
        touched = found.touched()
        assert not touched.kernels
        assert not touched.unplaced
        assert touched.scopes
        assert any(in_routing(place) for change in found.changes for place in change.places)
        # Operations without operands have no place of their own: equal ones are merged at this
        # level, an iota of the kernels with the argsort's, and literals take their loop's line.
        outside = [
            change
            for change in found.changes
            if not all(in_routing(place) for place in change.places)
            and not {"stablehlo.iota", "stablehlo.constant"} & {change.op, change.a}
        ]
        assert outside == []


def in_routing(place: Location | None) -> bool:
    """Whether an operation comes from either version's sorting of rows."""
    if place is None or place.file is None or place.line is None:
        return False
    file = Path(place.file).name
    lines, start = inspect.getsourcelines(plain.sort_by_expert)
    return file == "routed_moe_by_hand.py" or (
        file == "routed_moe.py" and start <= place.line < start + len(lines)
    )


def test_the_steps_hold_kernels_and_donation(programs: Programs) -> None:
    """What the comparisons above would otherwise be missing without anybody noticing."""
    step = programs.steps["optimized"]
    assert sum(step.kernel_calls.values()) >= 12
    (main,) = (s.text for s in step.forms["exact"].sections if s.name == "main")
    assert "tf.aliasing_output" in main or "jax.buffer_donor" in main
    assert step.ops["stablehlo.sort"] == 4
