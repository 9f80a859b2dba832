"""What a program asks about its platform while it is traced."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax import default_backend, local_device_count
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from relower.lowering import case, load_case, lower
from relower.lowering.as_target import as_target
from relower.lowering.targets import parse_target

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
DEVICES = parse_target("TPU7x:2x2x1").devices()


def test_queries_answer_for_the_target_and_are_recorded():
    answers = {}

    def fn(x):
        answers["backend"] = jax.default_backend()
        answers["kind"] = jax.devices()[0].device_kind
        answers["platform"] = jax.local_devices()[-1].platform
        answers["counts"] = (jax.device_count(), jax.local_device_count())
        answers["process"] = (jax.process_count(), jax.process_index())
        return x

    program = lower(fn, X)
    assert answers == {
        "backend": "tpu",
        "kind": "TPU7x",
        "platform": "tpu",
        "counts": (8, 8),
        "process": (1, 0),
    }
    assert len(program.stamp.queries) == 7
    assert all("test_as_target.py:" in query for query in program.stamp.queries)
    assert program.unknowns == ()


def test_names_bound_early_are_reached():
    seen = []
    lower(lambda x: seen.append((default_backend(), local_device_count())) or x, X)
    assert seen == [("tpu", 8)]
    assert (default_backend(), local_device_count()) == ("cpu", 8)


def test_a_path_taken_by_platform_is_the_targets():
    def fn(x):
        return jnp.sin(x) if jax.default_backend() == "tpu" else jnp.cos(x)

    assert "stablehlo.sine" in lower(fn, X).ops


def test_inner_jit_traced_for_the_host_before_is_traced_anew():
    @jax.jit
    def inner(x):
        return jnp.sin(x) if jax.default_backend() == "tpu" else jnp.cos(x)

    inner.lower(X)
    jax.make_jaxpr(lambda x: inner(x))(X)
    assert "stablehlo.sine" in lower(lambda x: inner(x), X).ops
    assert "stablehlo.cosine" not in lower(lambda x: inner(x), X).ops
    assert "cos" in str(jax.make_jaxpr(lambda x: inner(x))(X))


def test_build_asks_about_the_target_too():
    def build(mesh):
        on_tpu = jax.default_backend() == "tpu"
        return (lambda x: jnp.sin(x) if on_tpu else x), (X,)

    assert "stablehlo.sine" in lower(case(build, mesh={"data": 2})).ops


def test_pallas_knows_the_chip():
    def kernel(x_ref, o_ref):
        assert "7" in str(pltpu.get_tpu_info().chip_version)
        o_ref[...] = x_ref[...]

    def fn(x):
        return pl.pallas_call(kernel, out_shape=X)(x)

    assert list(lower(fn, X).kernel_calls.values()) == [1]


def test_a_question_about_another_backend_is_the_hosts():
    with as_target(DEVICES) as seen:
        assert jax.devices("cpu")[0].platform == "cpu"
        assert jax.devices("tpu")[0].device_kind == "TPU7x"
    assert len(seen) == 2


def test_modules_imported_inside_get_the_hosts_functions_back():
    host = jax.devices
    with as_target(DEVICES):
        late = types.ModuleType("late_module")
        late.devices = jax.devices
        sys.modules["late_module"] = late
        assert late.devices is not host
    del sys.modules["late_module"]
    assert late.devices is host


def test_functions_are_put_back_after_an_error():
    host = jax.default_backend

    def failing():
        with as_target(DEVICES):
            assert jax.default_backend() == "tpu"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert jax.default_backend is host


def test_a_query_while_the_file_loads_is_unknown(tmp_path):
    path = tmp_path / "early.py"
    path.write_text(
        "import jax\nON_TPU = jax.default_backend() == 'tpu'\n"
        "def fn(x):\n    return x + 1 if ON_TPU else x\n"
    )
    chosen = load_case(f"{path}:fn", ["f32[8]"])
    assert len(chosen.host_queries) == 1
    [unknown] = lower(chosen).unknowns
    assert "jax.default_backend() = 'cpu'" in unknown.construct
    assert f"{path}:2" in unknown.construct
