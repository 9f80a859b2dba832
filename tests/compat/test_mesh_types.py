"""Types told apart in words."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from relower.compat.mesh_types import told_apart


def test_different_texts_are_enough():
    a, b = (jax.typeof(jnp.zeros(3, t)) for t in (jnp.int32, jnp.float32))
    assert told_apart(a, b) == ("int32[3]", "float32[3]")


def test_weak_types():
    weak, strong = jax.typeof(jnp.asarray(1)), jax.typeof(jnp.int32(1))
    found, wanted = told_apart(weak.update(weak_type=True), strong)
    assert found.endswith("with weak_type True")
    assert wanted.endswith("with weak_type False")


def test_meshes():
    kinds = []

    def body(x):
        kinds.append(jax.typeof(x))
        return x

    mesh = jax.sharding.AbstractMesh((2,), ("e",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.make_jaxpr(sharded)(jnp.zeros(3))
    inside, outside = kinds[-1], jax.typeof(jnp.zeros(3))
    found, wanted = told_apart(inside, outside)
    assert "with mesh" in found
    assert "with mesh" in wanted
    assert found != wanted
