"""What jax emits for a TPU, construct by construct: handled, or unknown by its name.

Each construct is lowered twice, and once with one change: the two are IDENTICAL and the change is
seen at every level, or the verdict is UNKNOWN and names the construct.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from relower.lowering import LEVELS, InputError, case, lower
from relower.lowering.change import Verdict
from relower.lowering.diff import diff

S = jax.ShapeDtypeStruct
X = S((8, 16), jnp.float32)
SQUARE = S((16, 16), jnp.float32)
COUNTS = S((16,), jnp.int32)


def check(make, first, second, wanted=None):
    """``make(first)`` is itself again, and not ``make(second)``; it holds ``wanted``."""
    one, again, other = lower(make(first)), lower(make(first)), lower(make(second))
    assert one.unknowns == ()
    for name in (wanted,) if isinstance(wanted, str) else wanted or ():
        assert one.ops.get(name), sorted(one.ops)
    for level in LEVELS:
        assert diff(one, again, level).verdict is Verdict.IDENTICAL
        found = diff(one, other, level)
        assert found.verdict is Verdict.DIFFERENT
        assert found.groups
    return one


def unknown(make, construct):
    """Two programs that look alike are UNKNOWN because of ``construct``."""
    found = diff(lower(make()), lower(make()))
    assert found.verdict is Verdict.UNKNOWN
    assert any(construct in reason for reason in found.reasons), found.reasons
    return found


# Collectives


ROWS = P("data")


def mapped(body, *args, ins=ROWS, outs=ROWS):
    def build(mesh):
        fn = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return fn, args or (SQUARE,)

    return case(build, mesh={"data": 4, "model": 2})


def ragged(axis):
    def body(x, out, a, b, c, d):
        return lax.ragged_all_to_all(x, out, a, b, c, d, axis_name=axis)

    return mapped(body, SQUARE, SQUARE, *[COUNTS] * 4, ins=(P("data"),) * 6)


SHIFT = [(0, 1), (1, 2), (2, 3), (3, 0)]
COLLECTIVES = {
    "psum": (
        lambda axis: mapped(lambda x: lax.psum(x, axis)),
        ("data", "model"),
        "stablehlo.all_reduce",
    ),
    "pmax or pmin": (
        lambda op: mapped(lambda x: op(x, "data")),
        (lax.pmax, lax.pmin),
        "stablehlo.all_reduce",
    ),
    "all_gather": (
        lambda axis: mapped(lambda x: lax.all_gather(x, "data", axis=axis)[0]),
        (0, 1),
        "stablehlo.all_gather",
    ),
    "psum_scatter": (
        lambda dim: mapped(
            lambda x: lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True)
        ),
        (0, 1),
        "stablehlo.reduce_scatter",
    ),
    "all_to_all": (
        lambda split: mapped(lambda x: lax.all_to_all(x, "data", *split, tiled=True)),
        ((0, 1), (1, 0)),
        "stablehlo.all_to_all",
    ),
    "ppermute": (
        lambda pairs: mapped(lambda x: lax.ppermute(x, "data", pairs)),
        (SHIFT, [(b, a) for a, b in SHIFT]),
        "stablehlo.collective_permute",
    ),
    "axis_index": (
        lambda axis: mapped(lambda x: x + lax.axis_index(axis)),
        ("data", "model"),
        "stablehlo.partition_id",
    ),
    "ragged_all_to_all": (ragged, ("data", "model"), "stablehlo.custom_call"),
    "two axes": (
        lambda axes: mapped(lambda x: lax.psum(x, axes)),
        (("data", "model"), ("data",)),
        "stablehlo.all_reduce",
    ),
    "manual computation": (
        lambda spec: mapped(lambda x: x * 2, ins=spec),
        (P("data"), P("model")),
        "sdy.manual_computation",
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    make, (first, second), wanted = COLLECTIVES[name]
    check(make, first, second, wanted)


def test_a_manual_computation_over_some_axes():
    def make(axes):
        def build(mesh):
            fn = jax.shard_map(
                lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(),
                axis_names=axes, check_vma=False,
            )  # fmt: skip
            return jax.jit(fn), (SQUARE,)

        return case(build, mesh={"data": 4, "model": 2})

    check(make, {"data"}, {"data", "model"}, "sdy.manual_computation")


# Operations with regions, composites, and what is no StableHLO


def plain(fn, *args):
    return case(fn, *(args or (X,)))


def windows(op):
    return plain(lambda x: lax.reduce_window(x, 0.0, op, (2, 2), (1, 1), "VALID"))


def scaled(scale, version=1):
    def inner(x, *, scale):
        return jnp.sin(x) * scale

    return plain(lambda x: lax.composite(inner, "my.scaled", version=version)(x, scale=scale))


OPERATIONS = {
    "while": (
        lambda n: plain(lambda x: lax.while_loop(lambda c: c.sum() < n, lambda c: c + 1, x)),
        (3.0, 4.0),
        "stablehlo.while",
    ),
    "case": (
        lambda fs: plain(lambda x: lax.switch(x[0, 0].astype(int), fs, x)),
        ((jnp.sin, jnp.cos, jnp.tan), (jnp.sin, jnp.tan, jnp.cos)),
        "stablehlo.case",
    ),
    "sort": (
        lambda keys: plain(lambda x: lax.sort((x, -x), num_keys=keys)),
        (1, 2),
        "stablehlo.sort",
    ),
    "reduce_window": (windows, (lax.add, lax.max), "stablehlo.reduce_window"),
    "select_and_scatter": (
        lambda size: plain(
            jax.grad(
                lambda x: lax.reduce_window(
                    x, -jnp.inf, lax.max, (size, 2), (1, 1), "VALID"
                ).sum()
            )
        ),
        (2, 3),
        "stablehlo.select_and_scatter",
    ),
    "scatter": (
        lambda how: plain(lambda x: getattr(x.at[jnp.array([1, 2])], how)(1.0)),
        ("add", "max"),
        "stablehlo.scatter",
    ),
    "reduce": (lambda op: plain(lambda x: op(x)), (jnp.sum, jnp.max), "stablehlo.reduce"),
    "composite's attribute": (scaled, (2.0, 3.0), "stablehlo.composite"),
    "composite's version": (
        lambda version: scaled(2.0, version), (1, 2), "stablehlo.composite",
    ),
    "chlo": (lambda op: plain(op), (lax.erf_inv, lax.digamma), ()),
    "top_k": (lambda k: plain(lambda x: lax.top_k(x, k)), (2, 3), "chlo.top_k"),
    "approx_max_k": (
        lambda k: plain(lambda x: lax.approx_max_k(x, 2, recall_target=k)),
        (0.9, 0.95),
        "stablehlo.custom_call",
    ),
    "ragged_dot": (
        lambda dtype: plain(
            lambda x, w, n: lax.ragged_dot(x, w, n, preferred_element_type=dtype),
            S((64, 16), jnp.bfloat16), S((4, 16, 8), jnp.bfloat16), S((4,), jnp.int32),
        ),
        (jnp.float32, jnp.bfloat16),
        "chlo.ragged_dot",
    ),
    "ragged_dot, another kind": (
        lambda dims: plain(
            lambda x, w, n: lax.ragged_dot_general(x, w, n, dims),
            S((64, 16), jnp.float32), S((4, 16, 16), jnp.float32), S((4,), jnp.int32),
        ),
        tuple(
            lax.RaggedDotDimensionNumbers((((1,), (side,)), ((), ())), [0], [0])
            for side in (1, 2)
        ),
        "chlo.ragged_dot",
    ),
    "qr": (
        lambda mode: plain(lambda x: jnp.linalg.qr(x.T, mode=mode)[0]),
        ("reduced", "complete"),
        "stablehlo.custom_call",
    ),
    "fft": (lambda f: plain(f), (jnp.fft.fft, jnp.fft.ifft), "stablehlo.fft"),
    "complex constant": (
        lambda z: plain(lambda x: x * np.complex64(z)), (1 + 2j, 1 + 2.0000002j), (),
    ),
    "rng_bit_generator": (
        lambda how: plain(lambda k: lax.rng_bit_generator(k, (4,), algorithm=how)[1],
                          S((4,), jnp.uint32)),
        (lax.RandomAlgorithm.RNG_THREE_FRY, lax.RandomAlgorithm.RNG_PHILOX),
        "stablehlo.rng_bit_generator",
    ),
    "rng_uniform": (
        lambda high: plain(lambda: lax.rng_uniform(0.0, high, (4,)), *()),
        (1.0, 2.0),
        "stablehlo.rng",
    ),
    "layout constraint": (
        lambda order: plain(lambda x: with_layout_constraint(x * 2, Layout(order))),
        ((1, 0), (0, 1)),
        "stablehlo.custom_call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    make, (first, second), wanted = OPERATIONS[name]
    if name == "rng_uniform":
        make = lambda high: case(lambda: lax.rng_uniform(0.0, high, (4,)))
    check(make, first, second, wanted)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_numbers(impl):
    def make(shape):
        def fn(seed):
            return jax.random.uniform(jax.random.key(seed, impl=impl), shape)

        return case(fn, S((), jnp.int32))

    found = check(make, (4, 2), (2, 4))
    assert ("stablehlo.rng_bit_generator" in found.ops) == (impl != "threefry2x32")


def test_a_large_constant():
    values = np.arange(3000, dtype=np.float32)
    other = values.copy()
    other[2999] = np.nextafter(other[2999], np.float32(0))
    check(lambda table: plain(lambda x: x[0, 0] + table), values, other)


# Shardings


def sharded(fn, spec):
    def build(mesh):
        return fn, (S((16, 16), jnp.float32, sharding=NamedSharding(mesh, spec)),)

    return case(build, mesh={"data": 4, "model": 2})


def test_shardy_shardings():
    check(lambda spec: sharded(jnp.sin, spec), P("data"), P(("data", "model")))
    check(
        lambda spec: sharded(lambda x: lax.with_sharding_constraint(x * 2, spec), P("data")),
        P("data"),
        P("model"),
        "sdy.sharding_constraint",
    )


GSPMD = """
import jax, jax.numpy as jnp, sys
sys.path.insert(0, {folder!r})
jax.config.update("jax_use_shardy_partitioner", False)
import test_constructs as t
one = t.lower(t.sharded(jnp.sin, t.P("data")))
assert one.stamp.fields["partitioner"] == "gspmd", one.stamp
text = "".join(s.text for s in one.forms["exact"].sections)
assert "mhlo.sharding" in text and "sdy" not in text
t.check(lambda spec: t.sharded(jnp.sin, spec), t.P("data"), t.P("model"))
t.check(lambda axis: t.mapped(lambda x: t.lax.psum(x, axis)), "data", "model",
        ("stablehlo.all_reduce", "stablehlo.custom_call"))
t.check(lambda spec: t.mapped(lambda x: x * 2, ins=spec), t.P("data"), t.P("model"))
renamed = t.case(lambda mesh: (jnp.sin, (t.S((16, 16), jnp.float32, sharding=t.NamedSharding(
    mesh, t.P("rows"))),)), mesh={{"rows": 4, "model": 2}})
assert t.diff(one, t.lower(renamed)).verdict is t.Verdict.IDENTICAL  # no name is in the program
print("done")
"""


def test_gspmd_shardings():
    code = GSPMD.format(folder=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr


# Layouts


def formatted(order):
    def build(mesh):
        form = Format(Layout(order), NamedSharding(mesh, P("data")))
        return lambda x: x * 2, (S((16, 16), jnp.float32, sharding=form),)

    return case(build, mesh={"data": 4})


def test_layouts_of_arguments():
    found = check(formatted, (1, 0), (0, 1))
    assert 'mhlo.layout_mode = "{0,1}"' in found.forms["exact"].sections[1].text


def test_layouts_stated_to_jit():
    def make(which):
        def build(mesh):
            form = Format(Layout((1, 0)), NamedSharding(mesh, P("data")))
            return jax.jit(lambda x: x * 2, **{which: form}), (SQUARE,)

        return case(build, mesh={"data": 4})

    check(make, "in_shardings", "out_shardings")


def test_a_layout_that_the_compiler_chooses():
    def make(form):
        return case(jax.jit(lambda x: x * 2, in_shardings=form), SQUARE)

    check(make, Format(Layout.AUTO), None)


# Custom partitioning and callbacks


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)


def test_custom_partitioning_on_one_device_is_its_function():
    found = lower(partitioned, X)
    assert found.unknowns == ()
    assert found.ops["stablehlo.sine"] == 1


def test_custom_partitioning_over_devices_is_refused():
    with pytest.raises(InputError, match="custom_partitioning over several devices") as caught:
        lower(sharded(partitioned, P("data")))
    assert "--route topology" in str(caught.value)
    assert "\n" not in str(caught.value)


def printing(x):
    jax.debug.print("{}", x)
    return x


CALLBACKS = {
    "debug.print": printing,
    "debug.callback": lambda x: (jax.debug.callback(lambda a: None, x), x)[1],
    "pure_callback": lambda x: jax.pure_callback(lambda a: a, X, x),
    "io_callback": lambda x: io_callback(lambda a: a, X, x),
    "io_callback, ordered": lambda x: io_callback(lambda a: a, X, x, ordered=True),
    "without arguments": lambda x: (io_callback(lambda: None, None), x)[1],
    "in a loop": lambda x: lax.scan(lambda c, r: (printing(c) + r.sum(), None), 0.0, x)[0],
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, printing, lambda x: x, x),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_are_unknown_by_name(name):
    unknown(lambda: case(CALLBACKS[name], X), "stablehlo.send")


def test_a_callback_in_a_mapped_body():
    unknown(lambda: mapped(printing), "stablehlo.send")


def test_a_difference_beside_a_callback_is_a_difference():
    found = diff(lower(lambda x: printing(x) + 1, X), lower(lambda x: printing(x) + 2, X))
    assert found.verdict is Verdict.DIFFERENT


def test_an_unknown_callback_has_its_line():
    [send, *_] = [u for u in lower(printing, X).unknowns if u.construct == "stablehlo.send"]
    assert send.where.file == __file__
    assert send.where.line == printing.__code__.co_firstlineno + 1


# Kernels


def vector_kernel(add):
    def body(x_ref, o_ref, block):
        start = lax.axis_index("lane") * 8
        pltpu.sync_copy(x_ref.at[pl.ds(start, 8)], block)
        block[...] = block[...] + add
        pltpu.sync_copy(block, o_ref.at[pl.ds(start, 8)])

    return on_sparse_core(
        body,
        lambda: plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="lane"),
        [pltpu.VMEM((8,), jnp.float32)],
    )


def scalar_kernel(times):
    def body(x_ref, o_ref):
        for _ in range(times):
            pltpu.sync_copy(x_ref, o_ref)

    return on_sparse_core(body, lambda: plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1), [])


def on_sparse_core(body, mesh, scratch):
    def fn(x):
        # jax renamed these two between the versions.
        out, scratches = jax.ShapeDtypeStruct(x.shape, x.dtype), {}
        new = "out_type" in pl.kernel.__code__.co_varnames
        if scratch:
            scratches = {"scratch_types" if new else "scratch_shapes": scratch}
        return pl.kernel(body, **{"out_type" if new else "out_shape": out}, mesh=mesh(),
                         **scratches)(x)  # fmt: skip

    return case(fn, S((256,), jnp.float32))


@pytest.mark.filterwarnings("ignore:Destination semaphore is ignored")
@pytest.mark.parametrize(("make", "first", "second"), [(vector_kernel, 1.0, 2.0),
                                                       (scalar_kernel, 1, 2)])  # fmt: skip
def test_sparse_core_kernels(make, first, second):
    found = check(make, first, second, "stablehlo.custom_call")
    [section] = found.kernels.values()
    assert "sc_vector_subcore" in section.text or "sc_scalar_subcore" in section.text
    assert "DEVICE_TYPE_SPARSECORE" in found.forms["exact"].sections[1].text


def test_what_pallas_asks_about_the_chip_is_listed():
    def fn(x):
        return x * pltpu.get_tpu_info().num_lanes

    queries = lower(fn, X).stamp.queries
    line = fn.__code__.co_firstlineno + 1
    assert f"pallas get_device_kind() = 'TPU7x' at {__file__}:{line}" in queries


# Calls of other backends

FOREIGN = """
module {{
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.custom_call @{target}(%a) {{{attrs}}} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
"""


def foreign(normal, attrs, target="cublas_lt"):
    from relower.lowering.program import Program, Stamp

    made = normal(FOREIGN.format(target=target, attrs=attrs))
    fields = {name: getattr(made, name) for name in type(made).__dataclass_fields__}
    return Program(stamp=Stamp({}), **fields)


@pytest.mark.parametrize(
    "config",
    [
        'backend_config = "\\08\\01{}"',
        "mhlo.backend_config = {{algorithm = {} : i64}}, api_version = 4 : i32",
        'backend_config = {{algorithm = "{}"}}, api_version = 4 : i32',
    ],
)
def test_other_backends_calls_are_compared_as_bytes_and_said_so(normal, config):
    one, other = (foreign(normal, config.format(n)) for n in (1, 2))
    again = foreign(normal, config.format(1))
    assert one.unknowns == ()
    for level in LEVELS:
        same, changed = diff(one, again, level), diff(one, other, level)
        assert same.verdict is Verdict.IDENTICAL
        assert changed.verdict is Verdict.DIFFERENT
        for found in (same, changed):
            assert found.notes == (
                "the configuration of these custom calls was compared byte by byte: cublas_lt",
            )


def test_a_call_without_a_configuration_needs_no_note(normal):
    one = foreign(normal, 'backend_config = ""', "Sharding")
    assert diff(one, one).notes == ()


def test_a_partitioner_in_python_is_unknown_whatever_its_address(normal):
    found = foreign(normal, 'backend_config = "1234"', "CustomSPMDPartitioning")
    assert [u.construct for u in found.unknowns] == ["custom call CustomSPMDPartitioning"]
    assert diff(found, found).verdict is Verdict.UNKNOWN


# By the other route, where libtpu is installed


def test_the_other_route_gives_the_same_kernels_and_names_what_it_does_not_know():
    pytest.importorskip("libtpu")
    one, other = (lower(vector_kernel(1.0), route=r) for r in ("abstract", "topology"))
    assert set(one.kernels) == set(other.kernels)
    found = lower(sharded(partitioned, P("data")), route="topology")
    assert [u.construct for u in found.unknowns] == ["custom call CustomSPMDPartitioning"]
    found = lower(sharded(printing, P("data")), route="topology")
    assert {u.construct for u in found.unknowns} == {"stablehlo.send", "stablehlo.recv"}
