"""Meshes that a program makes or holds itself: each is one line with what to do, or a note."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from relower import case
from relower.lowering.compile import StagedModule, stage_module
from relower.lowering.errors import InputError
from relower.lowering.lower import lower

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
REMEDY = "give a case whose build(mesh) makes the function on the mesh that it gets"


def host_mesh(count):
    """As a script makes it where this host shows so many devices."""
    return Mesh(np.array(jax.devices("cpu")[:count]), ("x",))


def spread(mesh, x):
    return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("x")))


def mapped(mesh, x):
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


def under(mesh, x):
    with mesh:
        return jax.lax.with_sharding_constraint(x * 2, P("x"))


@pytest.mark.parametrize("use", [mapped, under])
def test_a_mesh_of_one_host_device_that_does_not_fit(use):
    mesh = host_mesh(1)
    with pytest.raises(InputError) as caught:
        lower(lambda x: use(mesh, x), X, levels=["exact"])
    said = str(caught.value)
    assert "it holds a mesh of this host's devices (x=1), where the target's was wanted" in said
    assert said.endswith(f"{REMEDY}, as in relower.case(build, mesh={{'x': …}})")
    assert "\n" not in said


INSIDE = {
    "make_mesh": (
        lambda x: spread(jax.make_mesh((16,), ("x",)), x),
        "jax makes a mesh of this host's devices (8), where the target's were wanted",
        "mesh={'axis0': 16})",
    ),
    "Mesh": (
        lambda x: spread(Mesh(np.array(jax.devices()), ("x",)), x),
        "it makes a mesh itself while it is traced, of devices that nothing can be placed on",
        REMEDY,
    ),
    "shard_map": (
        lambda x: mapped(Mesh(np.array(jax.devices()), ("x",)), x),
        "it makes a mesh itself while it is traced, of devices that nothing can be placed on",
        "mesh={'x': 16})",
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_mesh_made_while_it_is_traced(name):
    fn, wanted, end = INSIDE[name]
    with pytest.raises(InputError) as caught:
        lower(fn, X, target="TPU7x:2x2x2", levels=["exact"])
    said = str(caught.value)
    assert wanted in said
    assert said.endswith(end)
    assert "\n" not in said


def test_an_error_that_is_not_the_mesh_s_says_nothing_of_one():
    mesh = host_mesh(1)
    with pytest.raises(InputError) as caught:
        lower(lambda x: spread(mesh, x) + jnp.ones(3), X, levels=["exact"])
    assert "host" not in str(caught.value)


@pytest.mark.parametrize(("count", "devices"), [(1, "1 device"), (8, "8 devices")])
def test_figures_of_a_program_on_its_own_mesh_say_so(count, devices, tmp_path):
    mesh = host_mesh(count)
    staged = stage_module(case(lambda x: spread(mesh, x), X), "TPU7x:2x2x1")
    (note,) = staged.notes
    assert f"this host's devices (x={count}), decides that it is one for {devices}" in note
    assert REMEDY in note
    staged.save(tmp_path)
    assert StagedModule.load(tmp_path) == staged
    assert stage_module(case(lambda x: x * 2, X), "TPU7x:2x2x1").notes == ()


def test_a_case_whose_build_takes_another_mesh_than_it_gets_is_refused():
    mine = case(lambda mesh: ((lambda x: spread(host_mesh(1), x)), (X,)), mesh={"x": 8})
    with pytest.raises(InputError, match=r"\(x=1\), where the case's was wanted \(x=8\): build"):
        lower(mine, levels=["exact"])
    assert lower(replace(mine, mesh={"x": 1}), levels=["exact"]).ops
