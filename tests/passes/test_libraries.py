"""Modules of flax and Equinox as arguments: what they hold beside arrays, what is assigned to."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import relower
from relower.lowering.errors import InputError

EXPERTS, WIDTH = 8, 16
X = jax.random.normal(jax.random.key(1), (64, WIDTH))
APPLIED = {"argsort_packed_key": 1, "inverse_permutation": 1, "counting_scatter": 1}


def routed(x: Any, router: Any, experts: Any) -> Any:
    expert = jnp.argmax(router(x), axis=-1)
    order = jnp.argsort(expert)
    rows = jax.lax.ragged_dot(x[order], experts, jnp.bincount(expert, length=EXPERTS))
    return rows[jnp.argsort(order)]


def same(a: Any, b: Any) -> bool:
    def bits(leaf: Any) -> bytes:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return [*map(bits, jax.tree.leaves(a))] == [*map(bits, jax.tree.leaves(b))]


# flax NNX


@pytest.fixture(scope="module")
def nnx() -> Any:
    return pytest.importorskip("flax.nnx", reason="flax comes with the extra `recipes`")


@pytest.fixture(scope="module")
def new(nnx: Any) -> Any:
    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
            self.tied = self.router  # a part that is there twice
            self.experts = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, WIDTH)))
            self.rows = nnx.Variable(jnp.zeros((), jnp.int32))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            self.rows[...] += x.shape[0]
            return self.drop(routed(x, self.router, self.experts[...])) + self.tied(x).sum()

    def make() -> tuple[Any, Any]:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return make


@pytest.fixture(scope="module")
def step(nnx: Any) -> Any:
    def train_step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - x)))(model)
        optimizer.update(model, grads)
        return loss

    return train_step


@pytest.fixture(scope="module")
def wanted(nnx: Any, new: Any, step: Any) -> Any:
    return trained(nnx, new, nnx.jit(step))


def trained(nnx: Any, new: Any, step: Any) -> Any:
    objects = new()
    losses = [step(*objects, X) for _ in range(2)]
    assert int(objects[0].rows[...]) == 2 * len(X)
    assert objects[0].tied is objects[0].router
    return losses, nnx.state(objects)


@pytest.mark.parametrize("outside", [True, False])
def test_what_is_assigned_stays_assigned(
    nnx: Any, new: Any, step: Any, wanted: Any, outside: bool
) -> None:
    """Without this a step would return its losses and train nothing."""
    optimized = nnx.jit(relower.optimize(step)) if outside else relower.optimize(nnx.jit(step))
    assert same(trained(nnx, new, optimized), wanted)


def test_without_jit_it_is_traced_once(nnx: Any, new: Any, step: Any) -> None:
    traced = []
    optimized = relower.optimize(lambda *args: (traced.append(1), step(*args))[1])
    trained(nnx, new, optimized)
    assert len(traced) == 1


def test_updates_are_part_of_the_program(nnx: Any, new: Any, step: Any) -> None:
    """As functions of their state, by hand: no gradient goes unread."""
    objects = new()
    graph, state = nnx.split(objects)

    def by_hand(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = step(model, optimizer, x)
        return loss, nnx.state((model, optimizer))

    program = relower.lower(by_hand, state, X)
    for fn in (step, nnx.jit(step)):
        relower.assert_applied(fn, (*objects, X), {**APPLIED, "frozen_gradient": 0})
        found = relower.lower(fn, *objects, X)
        assert found.ops == program.ops


def test_donation_stays(nnx: Any, new: Any, step: Any) -> None:
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    for fn in (jitted, relower.optimize(jitted)):
        (main,) = (
            s.text for s in relower.lower(fn, *new(), X).forms["exact"].sections if s.name == "main"
        )
        assert main.count("tf.aliasing_output") + main.count("jax.buffer_donor") > 5


def test_a_frozen_part(nnx: Any, new: Any) -> None:
    def grads(model: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - x)))(model)
        return loss, grads

    frozen = relower.Frozen(r"experts", grads=lambda out: out[1])
    model, _ = new()
    _, found = nnx.jit(relower.optimize(grads, frozen=frozen))(model, X)
    assert int(model.rows[...]) == len(X)
    assert not np.any(found["experts"][...])
    assert np.any(found["router"]["kernel"][...])


def test_jits_of_jax_are_refused(new: Any, step: Any) -> None:
    with pytest.raises(InputError, match=r"drops what it assigns .* take nnx\.jit"):
        relower.lower(jax.jit(step), *new(), X)


def test_what_nnx_jit_hides_is_refused(nnx: Any, step: Any) -> None:
    jitted = nnx.jit(step, graph=False)
    if type(jitted) is type(nnx.jit(step)):
        pytest.skip("this flax knows one kind of nnx.jit")
    with pytest.raises(TypeError, match=r"wanted the jit outside: nnx\.jit\(relower\.optimize"):
        relower.optimize(jitted)


# Equinox


@pytest.fixture(scope="module")
def eqx() -> Any:
    return pytest.importorskip("equinox", reason="equinox comes with the extra `recipes`")


@pytest.fixture(scope="module")
def module(eqx: Any) -> Any:
    class Model(eqx.Module):  # type: ignore[misc]
        router: Any
        experts: Any
        activation: Any
        name: str = "moe"

        def __call__(self, x: Any) -> Any:
            return self.activation(routed(x, jax.vmap(self.router), self.experts))

    keys = jax.random.split(jax.random.key(0))
    experts = jax.random.normal(keys[0], (EXPERTS, WIDTH, WIDTH))
    router = eqx.nn.Linear(WIDTH, EXPERTS, use_bias=False, key=keys[1])
    return Model(router, experts, jax.nn.silu)


@pytest.fixture(scope="module")
def eqx_step(eqx: Any) -> Any:
    def train_step(model: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jnp.square(m(x) - x)))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return train_step


@pytest.mark.parametrize("outside", [True, False])
def test_a_module_comes_back_whole(eqx: Any, module: Any, eqx_step: Any, outside: bool) -> None:
    jit = eqx.filter_jit
    optimized = jit(relower.optimize(eqx_step)) if outside else relower.optimize(jit(eqx_step))
    found, loss = optimized(module, X)
    wanted, wanted_loss = jit(eqx_step)(module, X)
    arrays = [eqx.filter(out, eqx.is_array) for out in ((found, loss), (wanted, wanted_loss))]
    assert same(*arrays)
    assert (found.activation, found.name) == (jax.nn.silu, "moe")


def test_another_activation_is_another_call(module: Any, eqx_step: Any) -> None:
    """The cache of eager calls: the same arrays, and another function among the leaves."""
    optimized = relower.optimize(eqx_step)
    _, silu = optimized(module, X)
    other, relu = optimized(dataclasses.replace(module, activation=jax.nn.relu), X)
    assert other.activation is jax.nn.relu
    assert float(silu) != float(relu)


def test_explained_and_lowered(eqx: Any, module: Any, eqx_step: Any) -> None:
    relower.assert_applied(eqx_step, (module, X), APPLIED)
    params, static = eqx.partition(module, eqx.is_array)

    def by_hand(params: Any, x: Any) -> Any:
        after, loss = eqx_step(eqx.combine(params, static), x)
        return eqx.filter(after, eqx.is_array), loss

    found, wanted = relower.lower(eqx_step, module, X), relower.lower(by_hand, params, X)
    assert found.forms["exact"].digest == wanted.forms["exact"].digest


def test_what_is_made_inside_is_refused() -> None:
    with pytest.raises(TypeError, match=r"result\[1\]; wanted an array .* or a leaf"):
        relower.optimize(lambda x: (x, "made inside"))(X)
