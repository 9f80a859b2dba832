"""A program with a `jax.shard_map`, run whole on devices of this host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from relower.gates.verify.evaluate import Unrunnable
from relower.gates.verify.whole import WholeProgram, run
from relower.passes import registry
from relower.passes.frozen import Request

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="devices have to talk")


def program(axes=("d",), names=frozenset()):
    """Micro-batches of a sum over devices, and what each device keeps."""
    shape = (2, *([1] * (len(axes) - 1)))
    devices = np.array(jax.devices()[:2]).reshape(shape)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))

    def step(w, x):
        def one(carry, row):
            y = lax.psum(jnp.tanh(row @ w), "d")
            return carry + y, y * lax.axis_index("d").astype(jnp.float32)

        return lax.scan(one, jnp.zeros(3), x)

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=(P(), P("d")),
                         check_vma=False, axis_names=names)  # fmt: skip


W, X = (np.random.default_rng(i).standard_normal(s).astype(np.float32)
        for i, s in enumerate(((4, 3), (5, 8))))  # fmt: skip


def test_it_makes_what_jax_makes():
    fn = program()
    found = run(jax.make_jaxpr(fn)(W, X), [W, X])
    for a, b in zip(found, jax.jit(fn)(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_wrong_rewrite_of_one_device_is_seen():
    body = jax.make_jaxpr(program())(W, X)
    wrong = jax.make_jaxpr(lambda w, x: program()(w, x.at[0, 7].add(1e-3)))(W, X)
    frozen = registry.by_name("frozen_gradient")
    whole = WholeProgram(frozen, body, Request())
    results = [run(b, [W, X]) for b in (body, body, wrong)]
    assert whole.differs(results[0], results[1]) is None
    assert whole.differs(results[0], results[2]) is not None


def test_an_axis_that_the_compiler_splits_is_named():
    fn = program(("d", "c"), frozenset({"d"}))
    with pytest.raises(Unrunnable, match="leaves the mesh axis c to the compiler"):
        run(jax.make_jaxpr(fn)(W, X), [W, X])
