"""Kernel bodies: decoded on every version, compared op by op, counted by call."""

import contextlib
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm

from relower.gates.budget import measured
from relower.lowering import LEVELS, lower

staging = importlib.import_module("relower.lowering.lower")
S = jax.ShapeDtypeStruct
X = S((256, 128), jnp.float32)


def barrier(count):
    semaphore = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(semaphore, count)
    pl.semaphore_wait(semaphore, count)


def program(
    op=jnp.multiply,
    constant=2.0,
    rounds=3,
    semantics="parallel",
    index_map=lambda i: (i, 0),
    block=(128, 128),
    scratch=(128, 128),
    vmem=None,
    side_effect=False,
    name=None,
    out_dtype=jnp.float32,
    collective_id=None,
    fusion=None,
    calls=1,
):
    def body(x_ref, o_ref, tmp_ref):
        tmp_ref[: block[0], : block[1]] = x_ref[...]
        value = jax.lax.fori_loop(
            0, rounds, lambda i, v: op(v, constant), tmp_ref[: block[0], : block[1]]
        )
        o_ref[...] = value.astype(out_dtype)
        if collective_id is not None:
            barrier(1)

    params = pltpu.CompilerParams(
        dimension_semantics=(semantics,),
        vmem_limit_bytes=vmem,
        has_side_effects=side_effect,
        collective_id=collective_id,
        allow_input_fusion=fusion,
    )
    spec = pl.BlockSpec(block, index_map)
    call = pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[spec],
        out_specs=pl.BlockSpec(block, index_map),
        out_shape=S((256, 128), out_dtype),
        scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=params,
        name=name,
    )

    def fn(x):
        return sum(call(x).astype(jnp.float32) for _ in range(calls))

    return lower(fn, X)


def digests(found):
    return {level: found.forms[level].digest for level in LEVELS}


@pytest.fixture(scope="module")
def base():
    return program()


MUTANTS = {
    "add for multiply": {"op": jnp.add},
    "subtract": {"op": jnp.subtract},
    "constant": {"constant": 2.000001},
    "loop bound": {"rounds": 4},
    "dimension semantics": {"semantics": "arbitrary"},
    "index map": {"index_map": lambda i: (1 - i, 0)},
    "scratch shape": {"scratch": (256, 128)},
    "vmem limit": {"vmem": 32 * 1024 * 1024},
    "side effect": {"side_effect": True},
    "output dtype": {"out_dtype": jnp.bfloat16},
    "collective id": {"collective_id": 3},
    "input fusion": {"fusion": [True]},
    "called twice": {"calls": 2},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_kernel_mutants_differ(base, name):
    mutant = program(**MUTANTS[name])
    assert all(digests(mutant)[level] != digests(base)[level] for level in LEVELS)
    assert mutant.unknowns == ()


def test_a_kernels_name_is_noise(base):
    named = program(name="something_else")
    assert digests(named) == digests(base)
    assert named.ledger["kernel-name"] == 1
    [section] = named.kernels.values()
    assert section.label == "something_else"


def test_collective_ids_are_numbered_by_use():
    assert digests(program(collective_id=3)) == digests(program(collective_id=9))


def test_two_kernels_sharing_a_collective_id_differ_from_two_with_one_each():
    def pair(first, second):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1.0
            barrier(1)

        def call(x, collective_id):
            params = pltpu.CompilerParams(collective_id=collective_id)
            out = S(x.shape, x.dtype)
            return pl.pallas_call(kernel, out_shape=out, compiler_params=params)(x)

        return digests(lower(lambda x: call(call(x, first), second), X))

    assert pair(1, 1) == pair(4, 4)
    assert pair(1, 2) == pair(7, 3)
    assert pair(1, 1) != pair(1, 2)


def test_calls_are_counted_and_bodies_are_distinct():
    found = program(calls=3)
    assert list(found.kernel_calls.values()) == [3]
    assert len(found.kernels) == 1


def test_the_body_is_readable_and_named_by_its_digest(base):
    [(name, section)] = base.kernels.items()
    assert name == f"kernel:{section.digest[:12]}"
    assert '"arith.mulf"' in section.text
    assert "stable_mosaic" not in section.text
    main = base.forms["exact"].sections[1].text
    assert f"kernel:{section.digest}" in main
    assert "debug_locations" not in main
    assert base.ledger["kernel-encoding"] == 1
    assert base.ledger["mosaic-version"] == 1


def test_lines_of_a_kernel_are_the_users(base):
    [section] = base.kernels.values()
    lines = section.text.splitlines()
    source = Path(__file__).read_text().splitlines()
    [store] = [i for i, line in enumerate(lines) if "arith.mulf" in line]
    found = base.locations[section.locations[store]]
    assert found.file == __file__
    assert "op(v, constant)" in source[found.line - 1]


def test_an_undecodable_body_is_unknown_and_still_compared(normal):
    def text(body):
        config = f"{{\\22custom_call_config\\22: {{\\22body\\22: \\22{body}\\22}}}}"
        return f"""
module {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.custom_call @tpu_custom_call(%arg0) {{backend_config = "{config}",
      kernel_name = "broken"}} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}"""

    first, second = normal(text("AAAA")), normal(text("AAAB"))
    assert [u.construct for u in first.unknowns] == ["kernel broken"]
    assert first.forms["exact"].digest != second.forms["exact"].digest


def grouped(tiling):
    def fn(lhs, rhs, sizes):
        out = gmm(lhs, rhs, sizes, preferred_element_type=jnp.float32, tiling=tiling)
        return (out**2).sum()

    shapes = (S((256, 256), jnp.bfloat16), S((4, 256, 256), jnp.bfloat16), S((4,), jnp.int32))
    return lower(jax.grad(fn, (0, 1)), *shapes)


def test_megablox_takes_its_tpu_path_and_decodes():
    found = grouped((128, 128, 128))
    assert found.unknowns == ()
    assert sum(found.kernel_calls.values()) == 3
    assert any("megablox" in query for query in found.stamp.queries)
    assert digests(found) == digests(grouped((128, 128, 128)))
    other = grouped((128, 128, 256))
    assert all(digests(other)[level] != digests(found)[level] for level in LEVELS)


def attention(block):
    sizes = BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)
    q = S((1, 2, 256, 128), jnp.bfloat16)
    return lower(lambda q, k, v: flash_attention(q, k, v, block_sizes=sizes), q, q, q)


def test_flash_attention_decodes():
    found = attention(128)
    assert found.unknowns == ()
    assert list(found.kernel_calls.values()) == [1]
    assert digests(found) == digests(attention(128))
    assert digests(found) != digests(attention(256))


def test_where_a_kernels_locations_stand_is_noise(base, monkeypatch):
    monkeypatch.setattr(staging, "kernel_locations", contextlib.nullcontext)
    beside = program()
    assert digests(beside) == digests(base)
    moved = hasattr(jax._src.config, "jax_mosaic_unzip_debug_locations")
    assert beside.ledger.get("kernel-location", 0) == int(moved)
    assert "kernel-location" not in base.ledger


def test_a_kernel_that_is_called_by_several_names_has_them_all():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def fn(x):
        for name in ("first", "second", "third", "third"):
            x = pl.pallas_call(body, out_shape=X, name=name)(x)
        return x

    found = lower(fn, X)
    names = [name for kernel in found.kernels.values() for name in kernel.names]
    assert sorted(names) == ["first", "second", "third"]
    (shared,) = [k for k in found.kernels.values() if {"second", "third"} <= set(k.names)]
    assert found.kernel_calls[shared.name] >= 3
    assert measured(found, "kernels") == measured(found, "kernels.*") == 4
    assert measured(found, "kernels.third") is None
    assert measured(found, "kernels.fourth") == 0
