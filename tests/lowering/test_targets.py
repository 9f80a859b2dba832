"""Targets and meshes."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relower.lowering import InputError, case, lower
from relower.lowering.targets import make_mesh, parse_target


def test_a_chip_of_tpu7x_is_two_devices():
    target = parse_target("TPU7x:2x2x1")
    assert target.device_count == 8
    devices = target.devices()
    assert [d.id for d in devices] == list(range(8))
    assert [d.coords for d in devices[:4]] == [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)]
    assert [d.core_on_chip for d in devices[:4]] == [0, 1, 0, 1]
    assert str(target) == "TPU7x:2x2x1"


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("TPU7x", "wanted KIND:AxBxC"),
        ("TPU7x:2x", "wanted KIND:AxBxC"),
        ("TPU7x:2x2", "found 2 extents, wanted 3, as TPU7x is a grid of three .*: TPU7x:2x2x1$"),
        ("TPU7x:4", "found 1 extent, wanted 3, .*: TPU7x:4x1x1$"),
        ("TPU7x:2x2x1x1", "found 4 extents, wanted 3, as TPU7x is a grid of three dimensions$"),
        ("TPU7x:0x1x1", "at least 1"),
        ("TPU7x:2x2x1000000", "'TPU7x:2x2x1000000': wanted at most 65,536 devices"),
        ("TPU7x:1x" + "9" * 5000, "9…': wanted at most 65,536 devices"),
        ("H100:2x2", "no such kind 'H100'"),
    ],
)
def test_bad_targets(spec, wanted):
    with pytest.raises(InputError, match=wanted):
        parse_target(spec)


def test_axis_types_are_stated():
    target = parse_target("TPU7x:2x2x1")
    mesh = make_mesh(target, {"data": 4, "model": 2}, "auto", "abstract")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.abstract_device.device_kind == "TPU7x"
    mesh = make_mesh(target, {"data": 4}, "explicit", "abstract")
    assert mesh.axis_types == (AxisType.Explicit,)


def test_no_mesh_is_one_device():
    assert make_mesh(parse_target("TPU7x:1x1x1"), None, "auto", "abstract").size == 1


@pytest.mark.parametrize("extent", [0, -1, "4", 2.0])
def test_bad_extents(extent):
    with pytest.raises(InputError, match="wanted a positive number"):
        make_mesh(parse_target("TPU7x:2x2x1"), {"data": extent}, "auto", "abstract")


def test_too_few_devices():
    with pytest.raises(InputError, match="needs 4 devices, target TPU7x:1x1x1 has 2"):
        make_mesh(parse_target("TPU7x:1x1x1"), {"data": 4}, "auto", "abstract")


def test_the_topology_route_gives_the_same_program_or_says_what_it_needs():
    def build(mesh):
        spec = NamedSharding(mesh, PartitionSpec("data"))

        def fn(x):
            return jax.shard_map(
                lambda part: jax.lax.psum(part @ part.T, "data"),
                mesh=mesh,
                in_specs=PartitionSpec("data"),
                out_specs=PartitionSpec(),
            )(x)

        return fn, (jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=spec),)

    chosen = case(build, mesh={"data": 4})
    abstract = lower(chosen)
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(InputError, match="route 'topology' needs libtpu") as caught:
            lower(chosen, route="topology")
        assert "\n" not in str(caught.value)
        return
    topology = lower(chosen, route="topology")
    for level, form in abstract.forms.items():
        assert topology.forms[level].digest == form.digest
    assert topology.stamp.fields["route"] == "topology"
