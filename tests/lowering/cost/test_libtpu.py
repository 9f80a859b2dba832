"""With the real compiler, where it is installed: small programs, a few seconds each."""

import importlib.util
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import relower

pytestmark = [
    pytest.mark.libtpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu isn't installed, so nothing is compiled: install relower[tpu]",
    ),
]


def stable(ids):
    return jnp.argsort(ids & 511)


IDS = jax.ShapeDtypeStruct((8192,), jnp.int32)


@pytest.fixture(scope="module")
def sort():
    return relower.cost(stable, IDS)


def test_a_sort_is_profiled_whole(sort):
    assert sort.rung == "profile"
    assert sort.sorts == {2: 1}
    total = sort.total()
    assert total.complete
    # 12,900 with libtpu 0.0.52 and 12,903 with 0.0.42.1; a later one may differ a little more.
    assert total.estimate == pytest.approx(12_900, rel=0.02)
    (op,) = [op for op in sort.ops if op.kind == "sort of 2"]
    assert op.source.startswith(__file__)
    assert op.scope.endswith("jit(argsort)/sort")
    assert sort.memory.arguments == 4 * 8192
    assert sort.memory.peak > 0


def test_a_rewrite_is_cheaper_and_the_saving_is_at_the_users_line(sort):
    from relower.lowering.cost.compare import compare

    after = relower.cost(relower.optimize(stable, passes=["argsort_packed_key"]), IDS)
    found = compare(sort, after)
    assert after.sorts == {1: 1}
    assert found.worse is False
    # Little at this size, where a sort of pairs is cheap too; five times at 81,920.
    assert found.before > found.after
    assert found.groups[0].place.startswith(__file__)
    assert found.groups[0].kinds_after == ("fusion or", "sort of 1", "fusion convert")


def test_a_program_whose_analysis_aborts_still_has_a_report():
    """And no logs are left behind, of which libtpu would write gigabytes."""
    logs = lambda: set(Path(tempfile.gettempdir()).glob("tpu_*"))
    before = logs()
    cost = relower.cost(jax.nn.silu, jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16))
    assert cost.rung in ("salvaged", "bundles")
    assert cost.notes[0].startswith("no profile of the whole program: the TPU compiler died")
    assert cost.counts["fusion"] == 1
    assert cost.memory.arguments == 2 * 8192 * 4096
    (op,) = cost.ops
    assert op.bundles > 0
    assert logs() == before


def test_a_loop_runs_as_often_as_its_condition_says_or_is_marked():
    def steps(x):
        y = lax.scan(lambda c, _: (c, jnp.sort(c + 1.0)[0]), x, None, length=7)[1]
        halve = lambda c: c * 0.5
        return y, lax.while_loop(lambda c: c.max() > 1.0, halve, jnp.cumsum(x))

    cost = relower.cost(steps, jax.ShapeDtypeStruct((4096,), jnp.float32))
    (op,) = [op for op in cost.ops if op.kind.startswith("sort")]
    assert op.times == 7
    line = steps.__code__.co_firstlineno
    assert op.source == f"{__file__}:{line + 1}"
    unknown = {op.source for op in cost.ops if op.times is None} - {None}
    assert f"{__file__}:{line + 2}" in unknown
    assert unknown <= {f"{__file__}:{line + 2}", f"{__file__}:{line + 3}"}
    (note,) = [note for note in cost.notes if "unknown number of times" in note]
    assert f"({__file__}:{line + 3}): left out of totals" in note
    # jax lowers a cumulative sum without a line; that of its call stands for it.
    (sums,) = {op.source for op in cost.ops if (op.scope or "").endswith("reduce_window_sum")}
    assert sums == f"{__file__}:{line + 3}"


def test_a_limit_ends_the_compiler():
    from relower.lowering.errors import InputError

    with pytest.raises(InputError, match=r"stopped after 0\.3 s; raise the limit"):
        relower.cost(stable, IDS, limit=0.3)


def test_several_devices():
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def build(mesh):
        x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        return lambda x: x.sum(0), (x,)

    cost = relower.cost(relower.case(build, mesh={"data": 8}))
    (reduce,) = cost.collectives
    assert reduce.kind == "all-reduce"
    assert reduce.bytes == 2 * 4096 * 7 // 8
    assert cost.memory.arguments == 4 * 4096 * 1024 // 8


def _sharded(shape, mesh, spec):
    from jax.sharding import NamedSharding

    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def _fsdp(mesh):
    """Gradients of two products, the weights gathered before them and the sums scattered after."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def gradients(x, w1, w2):
        def loss(w):
            return ((jnp.maximum(x @ w[0], 0) @ w[1]).astype(jnp.float32) ** 2).mean()

        split = NamedSharding(mesh, P("data"))
        return lax.with_sharding_constraint(jax.grad(loss)((w1, w2)), (split, split))

    shapes = ((8192, 2048), (2048, 8192), (8192, 2048))
    return gradients, tuple(_sharded(shape, mesh, P("data")) for shape in shapes)


def test_fsdp_products_whose_analysis_aborts_still_have_a_report():
    cost = relower.cost(relower.case(_fsdp, mesh={"data": 8}))
    assert cost.rung in ("salvaged", "bundles")
    assert cost.notes[0].startswith("no profile of the whole program: the TPU compiler died")
    assert {c.kind for c in cost.collectives} == {"all-gather", "reduce-scatter"}
    # Each device sends 7/8 of both gathered weights, 32 MiB each, and as much of the sums.
    assert all(c.bytes == 2 * 2048 * 8192 * 2 * 7 // 8 for c in cost.collectives)
    assert cost.memory.arguments == 2 * 3 * 2048 * 8192 // 8
    assert not cost.total().complete


def test_a_program_mapped_by_hand():
    from jax.sharding import PartitionSpec as P

    def build(mesh):
        def part(x, w):
            y = x @ lax.all_gather(w, "data", tiled=True)
            return lax.psum_scatter(x.T @ y, "data", tiled=True)

        fn = jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        shapes = ((8192, 2048), (2048, 2048))
        return fn, tuple(_sharded(shape, mesh, P("data")) for shape in shapes)

    cost = relower.cost(relower.case(build, mesh={"data": 8}))
    assert {c.kind: c.bytes for c in cost.collectives} == dict.fromkeys(
        ("all-gather", "reduce-scatter"), 2 * 2048 * 2048 * 7 // 8
    )
    assert cost.memory.arguments == 2 * (1024 + 256) * 2048


@pytest.mark.parametrize("target", ["TPU7x:2x2x2", "TPU7x:4x4x4"])
def test_other_topologies(target):
    from jax.sharding import PartitionSpec as P

    count = 16 if target == "TPU7x:2x2x2" else 128

    def build(mesh):
        def part(x):
            return lax.psum(x, "data")

        fn = jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P())
        return fn, (jax.ShapeDtypeStruct((256 * count, 128), jnp.float32),)

    cost = relower.cost(relower.case(build, mesh={"data": count}), target=target)
    assert cost.target == target
    assert cost.memory.arguments == 4 * 256 * 128
    assert [c.bytes for c in cost.collectives] == [2 * 4 * 256 * 128 * (count - 1) // count]


def test_a_topology_that_the_compiler_does_not_know_is_one_line():
    from relower.lowering.errors import InputError

    with pytest.raises(InputError, match="no devices for target TPU7x:3x5x7") as caught:
        relower.cost(stable, IDS, target="TPU7x:3x5x7")
    assert "\n" not in str(caught.value)


def test_a_kernel_has_its_line_and_scope_cycles_and_bundles():
    from jax.experimental import pallas as pl

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def fn(x):
        with jax.named_scope("doubling"):
            return pl.pallas_call(body, out_shape=x)(x)

    cost = relower.cost(fn, jax.ShapeDtypeStruct((512, 512), jnp.float32), bundles=True)
    (kernel,) = cost.kernels
    assert kernel.source.startswith(__file__)
    assert "doubling" in kernel.scope
    assert cost.within("doubling").kernels == (kernel,)
    assert kernel.estimate > 0
    assert kernel.bundles > 0
