"""The hybrid decoder trains on eight devices, and no pass changes what it learns.

One compiled run of each kind is shared by the tests of this file: as it is, with the passes of the
default contract, and with all that the rounding contract admits.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_hybrid import trainer
from qwen_hybrid.config import TINY as WHOLE
from qwen_hybrid.model import layer_shapes

import relower

STEPS = 3
TINY = replace(WHOLE, blocks=1)  # each layer of a run has some hundred collectives of eight threads


@pytest.fixture(scope="module")
def mesh():
    return trainer.make_mesh()


@pytest.fixture(scope="module")
def start(mesh):
    """A fresh state on the mesh, and a batch for each step."""
    state = jax.jit(trainer.init_state, static_argnums=1)(jax.random.key(0), TINY)
    make_batch = jax.jit(trainer.synthetic_batch, static_argnums=1)
    batches = [make_batch(jax.random.key(1 + i), TINY) for i in range(STEPS)]
    return jax.device_put(state, trainer.shardings(state, mesh)), batches


@pytest.fixture(scope="module")
def update(start, mesh):
    where = trainer.shardings(start[0], mesh)
    return jax.jit(trainer.make_update(TINY), out_shardings=where)


def steps(forward_backward, start, update):
    """Loss, gradients and the state after each step."""
    state, batches = start
    run, made = jax.jit(forward_backward), []
    for batch in batches:
        loss, grads = run(state.params, batch)
        state = update(state, grads)
        made.append((loss, grads, state))
    return made


@pytest.fixture(scope="module")
def forward_backward(mesh):
    return trainer.make_forward_backward(TINY, mesh)


@pytest.fixture(scope="module")
def plain(forward_backward, start, update):
    return steps(forward_backward, start, update)


@pytest.fixture(scope="module")
def recommended(forward_backward, start):
    better = relower.optimize(forward_backward, contract="rounding")
    return jax.jit(better)(start[0].params, start[1][0])


def differing(found, wanted):
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    return [
        jax.tree_util.keystr(path)
        for path, (a, b) in ((path, (a, b)) for (path, a), b in pairs)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]


def test_it_learns(plain):
    losses = [float(loss) for loss, _, _ in plain]
    assert losses[0] == pytest.approx(math.log(TINY.vocab), rel=0.3)
    assert losses[2] < losses[1] < losses[0] - 0.2


def test_every_parameter_has_a_gradient_and_routers_stay(plain, start):
    _, grads, state = plain[0]
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.any(grad), path
    for kind in ("attention", "delta"):
        before, after = start[0].params[kind], state.params[kind]
        assert np.array_equal(before["router"], after["router"])
        moved = {name for name in before if not np.array_equal(before[name], after[name])}
        assert moved == set(layer_shapes(TINY, kind)) - {"router"}


def test_default_passes_keep_every_bit_of_three_steps(forward_backward, start, update, plain):
    better = steps(relower.optimize(forward_backward), start, update)
    assert differing(better, plain) == []


def test_all_passes_agree_with_the_plain_model(plain, recommended):
    """The contract of each is tested with its pass; here, that nothing is missing or swapped."""
    wanted = plain[0][:2]
    assert differing(recommended, wanted) != []  # another program: roundings do differ
    pairs = zip(jax.tree.leaves_with_path(recommended), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        size = float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * size, err_msg=str(path))
