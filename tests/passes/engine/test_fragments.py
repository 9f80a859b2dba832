"""Sites cut out of their programs: what goes with them, what comes in, and how they are staged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import relower
from relower.lowering.errors import InputError
from relower.lowering.fragment import Fragment, Port, stage_fragment
from relower.passes import registry
from relower.passes.base import Match, Reason, Replacement
from relower.passes.engine.fragments import Uncut, cut
from relower.passes.engine.rewrite import rewrite

TARGET = "TPU7x:2x2x1"
IDS = np.random.RandomState(0).randint(0, 8, 32).astype(np.int32)


def ways_of(p, match):
    if p.alternatives is None:
        return {"rewrite": p.replace(match)}
    return {n: w for n, w in p.alternatives(match).items() if isinstance(w, Replacement)}


@pytest.fixture
def regions(engine):
    """The regions of a pass's sites in a function, or why one can't be cut, in order."""
    from dataclasses import replace

    def collect(fn, *args, name=None, p=None):
        p = p or registry.by_name(name)
        found = []

        def profitable(match):
            try:
                found.append(cut(match, ways_of(p, match)))
            except Uncut as why:
                found.append(str(why))
            return p.profitable(match)

        rewrite(engine.trace(fn, *args), [replace(p, profitable=profitable)])
        return found

    return collect


def names(part):
    return [eqn.primitive.name for eqn in part.eqns]


def run(region, part, *values):
    return [np.asarray(v) for v in region.fragment(part).fn(*map(jnp.asarray, values))]


def argsort(ids):
    return jnp.argsort(relower.assume_range(ids, 0, 7))


def test_an_iota_inside_the_call_is_made_anew(regions):
    (region,) = regions(argsort, IDS, name="argsort_packed_key")
    assert names(region.before) == ["iota", "sort"]
    assert len(region.before.inputs) == len(region.before.outputs) == 1
    after = region.after["rewrite"]
    assert [len(e.invars) for e in after.eqns if e.primitive.name == "sort"] == [1]
    assert region.runs == 1
    for part in (region.before, after):
        (order,) = run(region, part, IDS)
        np.testing.assert_array_equal(order, np.argsort(IDS, kind="stable"))


def test_an_iota_that_comes_into_a_loop_stays_an_input(regions):
    def steps(ids):
        positions = lax.iota(jnp.int32, 32)

        def step(_, row):
            row = relower.assume_range(row, 0, 7)
            return None, lax.sort((row, positions), num_keys=1)[1]

        return lax.scan(step, None, ids)[1]

    (region,) = regions(steps, np.stack([IDS] * 3), name="argsort_packed_key")
    assert names(region.before) == ["sort"]
    assert len(region.before.inputs) == 2
    assert region.runs == 3


def test_what_is_needed_elsewhere_stays_outside(regions):
    def ranks(ids):
        order = argsort(ids)
        return order, jnp.argsort(order)

    found = regions(ranks, IDS, name="inverse_permutation")
    counted = next(r for r in found if "counting" in r.after)
    assert names(counted.before) == ["jit"]
    order = np.argsort(IDS, kind="stable").astype(np.int32)
    inverse = np.argsort(order)
    for part, value in ((counted.before, order), (counted.after["counting"], IDS)):
        np.testing.assert_array_equal(run(counted, part, value)[0], inverse)


def test_what_only_the_site_needed_goes_with_it(regions):
    def take(p):
        of_slot = jnp.repeat(jnp.arange(8), 4)
        return of_slot[relower.assume_range(p, 0, 31)]

    found = [r for r in regions(take, IDS % 32, name="affine_gather") if not isinstance(r, str)]
    region = found[-1]
    assert "gather" in names(region.before)
    assert "gather" not in names(region.after["rewrite"])
    for part in (region.before, region.after["rewrite"]):
        assert len(part.inputs) == 1
    got = [run(region, part, IDS)[0] for part in (region.before, region.after["rewrite"])]
    np.testing.assert_array_equal(*got)


def test_what_one_way_removes_is_part_of_all(engine, regions):
    """``near`` needs the cosine still, ``far`` doesn't: its cost is a cost of ``near`` too."""

    def find(scope, index):
        return Match(scope, index, {})

    def near(match):
        return Replacement(tuple(match.eqn.invars), tuple(match.eqn.outvars), lambda x: [x], "n")

    def far(match):
        made = match.scope.eqns[match.scope.definition(match.eqn.invars[0])[0]]
        return Replacement(tuple(made.invars), tuple(match.eqn.outvars), lambda x: [x + x], "f")

    from dataclasses import replace

    p = engine.make_pass("two", "sin_p", find, near)
    p = replace(p, alternatives=lambda m: {"near": near(m), "far": far(m)}, ways=("near", "far"))
    region = regions(lambda x: jnp.sin(jnp.cos(x)), np.ones(3, np.float32), p=p)[0]
    assert names(region.before) == ["cos", "sin"]
    assert names(region.after["near"]) == ["cos"]
    assert names(region.after["far"]) == ["add"]


def test_loops_within_loops_multiply_and_a_while_is_unknown(regions):
    def inner(ids):
        return lax.scan(lambda c, _: (c, argsort(c)), ids, None, length=5)[1]

    def outer(ids):
        return lax.scan(lambda c, _: (c, inner(c)), ids, None, length=3)[1]

    (region,) = regions(outer, IDS, name="argsort_packed_key")
    assert region.runs == 15

    def until(ids):
        return lax.while_loop(lambda c: c[0] < 3, argsort, ids)

    (region,) = regions(until, IDS, name="argsort_packed_key")
    assert region.runs is None


def sharded(mesh, check_vma=True):
    def routing(weights, ids):
        every = lax.all_gather(weights, "expert", tiled=True)
        return every, lax.all_gather(ids, "expert", tiled=True)

    specs = {"in_specs": P("expert"), "out_specs": P(None, "expert"), "check_vma": check_vma}
    return jax.shard_map(routing, mesh=mesh, **specs)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_shard_map_a_fragment_is_one_devices_part(regions, check_vma, kind):
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(kind,))
    split = jax.NamedSharding(mesh, P("expert"))
    args = [jax.device_put(jnp.zeros((64, 2), d), split) for d in (jnp.float32, jnp.int32)]
    with jax.set_mesh(mesh):
        (region, *_) = regions(sharded(mesh, check_vma), *args, name="packed_all_gather")
        assert region.manual == ("expert",)
        staged = []
        for part in (region.before, region.after["rewrite"]):
            fragment = region.fragment(part)
            assert [p.shape for p in fragment.inputs] == [(16, 2), (16, 2)]
            assert {p.varying for p in fragment.inputs} == {("expert",)}
            staged.append(stage_fragment(fragment, TARGET, "f"))
    assert {s.settings["partitions"] for s in staged} == {4}
    assert len({s.module for s in staged}) == 2


def test_what_cannot_be_cut_says_why(engine, regions):
    sin = engine.make_pass("sin", "sin_p", engine.every, engine.whole(lambda x: [x]))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        (why, *_) = regions(jnp.sin, x, p=sin)
    assert why == "f32[8@data] is sharded over an Explicit mesh"

    def printing(x):
        jax.debug.print("{}", x)
        return x + 1

    from dataclasses import replace

    body = engine.make_pass("call", "jit_p", engine.every, engine.whole(lambda x: [x]))
    body = replace(body, profitable=lambda m: Reason("never", "", "", ""))
    (why, *_) = regions(lambda x: jax.jit(printing)(x), np.ones(3, np.float32), p=body)
    assert why == "jit has effects"


def test_a_kernels_body_is_not_cut(engine, regions):
    from jax.experimental import pallas as pl

    def kernel(x, out):
        out[...] = jnp.sin(x[...])

    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), interpret=True
    )
    sin = engine.make_pass("sin", "sin_p", engine.every, engine.whole(lambda x: [x]))
    (why, *_) = regions(call, np.ones((8, 128), np.float32), p=sin)
    assert why == "it stands in a kernel's body"


def fragment_of(fn, *shapes):
    ports = tuple(Port(shape, jnp.float32) for shape in shapes)
    return Fragment(fn, ports, ports)


def test_equal_fragments_are_equal_bytes_wherever_they_are_staged():
    one = fragment_of(lambda x: [jnp.sin(x)], (8,))
    other = fragment_of(lambda x: [lax.sin(x)], (8,))
    first = stage_fragment(one, TARGET, "f")
    assert first.module == stage_fragment(other, TARGET, "f").module
    assert first.module != stage_fragment(fragment_of(one.fn, (9,)), TARGET, "f").module
    inside = []

    def step(x):
        inside.append(stage_fragment(one, TARGET, "f"))
        return x

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    jax.make_jaxpr(jax.grad(lambda x: jax.vmap(step)(x).sum()))(jnp.ones((2, 3)))
    jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(
        jnp.ones(4)
    )
    assert {s.module for s in inside} == {first.module}


def test_a_fragment_that_cannot_be_lowered_is_one_line():
    def fails(x):
        raise TypeError("no")

    with pytest.raises(InputError, match=r"f can't be lowered alone: .*no"):
        stage_fragment(fragment_of(fails, (8,)), TARGET, "f")


def test_numbers_and_wide_types(x64):
    fragment = Fragment(
        lambda x, n: [x * n],
        (Port((4,), np.dtype("int64"), ("a",)), Port((), np.dtype("int64"), ("a",))),
        (Port((4,), np.dtype("int64"), ("a",)),),
        AbstractMesh((2,), ("a",)),
        ("a",),
        wide=True,
    )
    assert stage_fragment(fragment, TARGET, "f").settings["partitions"] == 2
