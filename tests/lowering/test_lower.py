"""jax programs end to end: noise that must match, changes that must differ, bad input."""

import json
import os
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from relower import cost, optimize
from relower.lowering import LEVELS, InputError, case, load_case, lower
from relower.lowering.change import Verdict
from relower.lowering.diff import diff

S = jax.ShapeDtypeStruct
X = S((8, 16), jnp.float32)

PROGRAM = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from relower.lowering import case

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0 + 1.0

def scale(x):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

def layer(carry, w):
    with jax.named_scope("block"):
        return jnp.tanh(scale(carry) @ w), carry.sum()

@jax.jit
def inner(x):
    return jnp.where(x > 0, x, -x)

def loss(w, x):
    y, sums = jax.lax.scan(jax.checkpoint(layer), inner(x), w)
    return (inner(y) ** 2).sum() + sums.sum(), w * 2, x + 1

def main():
    w = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return case(jax.jit(loss, donate_argnums=1), w, x)
"""

RENAMES = {
    "kernel(": "other_kernel(",
    "pallas_call(kernel": "pallas_call(other_kernel",
    "layer": "stage",
    "inner": "outer",
    "loss": "objective",
    "x_ref": "source",
    '"block"': '"somewhere"',
    "carry": "state",
    "def scale": "def enlarge",
    "scale(state)": "enlarge(state)",
}


def forms(program):
    return {level: program.forms[level].digest for level in LEVELS}


def written(folder, text, name="program.py"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = written(tmp_path_factory.mktemp("base"), PROGRAM)
    return path, lower(load_case(f"{path}:main"))


def test_the_base_program_has_what_it_should(base):
    _, program = base
    assert program.unknowns == ()
    assert len(program.kernels) == 1
    assert program.kernel_calls == {name: 1 for name in program.kernels}
    assert "tf.aliasing_output = 2" in program.forms["exact"].sections[1].text
    assert [s.name for s in program.forms["inlined"].sections] == ["module", "main"]


def test_lowered_twice(base):
    path, program = base
    assert forms(lower(load_case(f"{path}:main"))) == forms(program)


def test_lines_shifted_and_file_moved(base, tmp_path):
    _, program = base
    path = written(tmp_path / "elsewhere" / "deep", "\n" * 50 + PROGRAM, "renamed.py")
    again = lower(load_case(f"{path}:main"))
    assert forms(again) == forms(program)
    assert again.kernels.keys() == program.kernels.keys()
    assert {entry.file for entry in again.locations} != {e.file for e in program.locations}


def test_names_changed(base, tmp_path):
    _, program = base
    text = PROGRAM
    for old, new in RENAMES.items():
        assert old in text, old
        text = text.replace(old, new)
    path = written(tmp_path, text)
    assert forms(lower(load_case(f"{path}:main"))) == forms(program)


def test_unrelated_traces_before(base, tmp_path):
    path, program = base
    jax.jit(lambda x: jnp.argsort(x) + jnp.where(x > 0, 1, 2)).lower(X)
    lower(lambda x: jnp.cumsum(x @ x.T), X)
    jax.clear_caches()
    assert forms(lower(load_case(f"{path}:main"))) == forms(program)


def test_same_function_traced_for_the_host_before(base):
    path, program = base
    chosen = load_case(f"{path}:main")
    jax.make_jaxpr(chosen.fn)(*chosen.args)
    assert forms(lower(chosen)) == forms(program)


@pytest.mark.parametrize("seed", ["0", "1234"])
def test_another_process_and_hash_seed(base, seed):
    path, program = base
    code = textwrap.dedent(
        f"""
        import json, os
        os.environ["JAX_PLATFORMS"] = "cpu"
        from relower.lowering import LEVELS, load_case, lower
        program = lower(load_case({str(path) + ":main"!r}))
        print(json.dumps({{level: program.forms[level].digest for level in LEVELS}}))
        """
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == forms(program)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* 2.0 + 1.0", "+ 2.0 + 1.0"),
        ("* 2.0 + 1.0", "* 2.0 + 1.5"),
        ("donate_argnums=1", "donate_argnums=0"),
        (", donate_argnums=1", ""),
        ("jnp.where(x > 0, x, -x)", "jnp.where(x > 0, -x, x)"),
        ("inner(y) ** 2", "inner(y) ** 3"),
        ("sums.sum()", "sums.max()"),
    ],
)
def test_one_change_differs_at_every_level(base, tmp_path, old, new):
    _, program = base
    assert old in PROGRAM
    path = written(tmp_path, PROGRAM.replace(old, new))
    mutant = forms(lower(load_case(f"{path}:main")))
    assert all(mutant[level] != forms(program)[level] for level in LEVELS)


def test_a_trace_for_one_target_does_not_answer_for_another():
    @jax.jit
    def per_device(x):
        return x * jax.device_count()

    def by_hand(n):
        return lambda x: x * n

    for target, count in (("TPU7x:2x2x1", 8), ("TPU7x:2x2x2", 16), ("TPU7x:2x2x1", 8)):
        program = lower(per_device, X, target=target)
        assert forms(program) == forms(lower(by_hand(count), X, target=target))
        assert f"jax.device_count() = {count}" in program.stamp.queries[0]


def test_a_second_lowering_lists_the_same_queries():
    @jax.jit
    def per_device(x):
        return x * jax.device_count()

    first = lower(lambda x: per_device(x) + 1, X)
    again = lower(lambda x: per_device(x) + 1, X)
    assert len(first.stamp.queries) == 1
    assert again.stamp.queries == first.stamp.queries
    assert forms(again) == forms(first)


def test_locations_name_the_users_line_and_scope(base):
    path, program = base
    wanted = next(i for i, line in enumerate(PROGRAM.splitlines(), 1) if "jnp.tanh" in line)
    found = {(entry.line, entry.scope) for entry in program.locations if entry.file == str(path)}
    assert any(line == wanted and "block" in (scope or "") for line, scope in found)
    for form in program.forms.values():
        for section in form.sections:
            assert len(section.text.splitlines()) == len(section.locations)
            assert all(-1 <= i < len(program.locations) for i in section.locations)


def sharded(spec=("data",), out=None):
    def build(mesh):
        def fn(x, w):
            y = x @ w
            return y if out is None else jax.lax.with_sharding_constraint(y, out)

        x = S((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        return fn, (x, S((16, 16), jnp.float32))

    return build


AXES = {"data": 4, "model": 2}


def test_mesh_programs_differ_in_sharding_and_axis_name():
    variants = [
        lower(case(sharded(), mesh=AXES)),
        lower(case(sharded(("model",)), mesh=AXES)),
        lower(case(sharded((None, "data")), mesh=AXES)),
        lower(case(sharded(out=PartitionSpec("data")), mesh=AXES)),
        lower(case(sharded(), mesh={"data": 4, "expert": 2})),
        lower(case(sharded(), mesh={"data": 8})),
    ]
    for level in LEVELS:
        assert len({v.forms[level].digest for v in variants}) == len(variants)
    assert forms(lower(case(sharded(), mesh=AXES))) == forms(variants[0])


def test_a_renamed_mesh_axis_is_different_and_located():
    base = lower(case(sharded(), mesh=AXES))

    def renamed(mesh):
        return sharded(("rows",))(mesh)

    other = lower(case(renamed, mesh={"rows": 4, "model": 2}))
    for level in LEVELS:
        found = diff(base, other, level)
        assert found.verdict is Verdict.DIFFERENT
        said = {(c.section_kind, c.detail) for group in found.groups for c in group.changes}
        assert any(kind == "function" and "sharding" in detail for kind, detail in said), said
        assert any(kind == "module" for kind, _ in said), said


def test_an_axis_name_that_the_program_does_not_hold_is_no_difference():
    base = lower(case(lambda mesh: (jnp.sin, (X,)), mesh={"data": 4}))
    other = lower(case(lambda mesh: (jnp.sin, (X,)), mesh={"rows": 4}))
    assert diff(base, other).verdict is Verdict.IDENTICAL
    wider = lower(case(lambda mesh: (jnp.sin, (X,)), mesh={"data": 8}))
    found = diff(base, wider)
    assert found.verdict is Verdict.UNKNOWN
    assert found.reasons == ("stamp: mesh is 4 in a and 8 in b",)


def test_collectives_lower_under_shard_map():
    def build(mesh):
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
        def fn(x):
            return jax.lax.psum(x, "data")

        return fn, (X,)

    program = lower(case(build, mesh={"data": 8}))
    assert program.ops["stablehlo.all_reduce"] == 1
    assert program.ledger["channel-id"] == 1
    assert program.unknowns == ()


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_axis_types_reach_trace_and_stamp(axis_types):
    seen = []

    def fn(x):
        seen.append(jax.sharding.get_abstract_mesh().axis_types)
        return x * 2

    program = lower(case(lambda mesh: (fn, (X,)), mesh={"data": 2}), axis_types=axis_types)
    assert program.stamp.fields["axis_types"] == axis_types
    assert [kind.name for kind in seen[0]] == [axis_types.capitalize()]


def test_stamp_states_the_environment():
    fields = lower(lambda x: x + 1, X).stamp.fields
    assert fields["jax"] == jax.__version__
    assert fields["target"] == "TPU7x:2x2x1"
    assert fields["route"] == "abstract"
    assert fields["mesh"] == "1"
    assert fields["mosaic"].isdigit()
    assert fields["x64"] == "False"


def test_a_flag_that_changes_lowering_shows_in_the_stamp():
    before = lower(lambda x: x @ x.T, X)
    with jax.default_matmul_precision("highest"):
        after = lower(lambda x: x @ x.T, X)
    assert before.stamp.fields["flags"] != after.stamp.fields["flags"]
    assert forms(before) != forms(after)


HOISTED = """
import json
import jax, jax.numpy as jnp
from relower.lowering import LEVELS, lower

def program(value):
    big = jnp.arange(1000.0).at[500].set(value)
    made = lower(lambda x: x[0, 0] + big, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert "jax.const" in made.forms["exact"].sections[1].text
    return [made.forms[level].digest for level in LEVELS]

print(json.dumps([program(1.0), program(1.0), program(2.0)]))
"""


def test_hoisted_constants_are_compared():
    # jax reads this setting when it is imported.
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    command = [sys.executable, "-c", HOISTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    one, same, other = json.loads(done.stdout)
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_global_state_is_as_it_was():
    before = (jax.default_backend(), jax.devices(), jax.sharding.get_abstract_mesh())
    functions = (jax.devices, jax.default_backend, jax.local_devices)
    lower(lambda x: x + len(jax.devices()), X)
    with pytest.raises(InputError):
        lower(lambda x: x + undefined_name, X)  # noqa: F821
    assert (jax.devices, jax.default_backend, jax.local_devices) == functions
    after = (jax.default_backend(), jax.devices(), jax.sharding.get_abstract_mesh())
    assert after == before


def test_concrete_arguments_and_keywords_lower_like_their_shapes():
    def fn(x, *, scale):
        return x * scale

    concrete = lower(fn, jnp.ones((8, 16)), scale=jnp.ones(()))
    abstract = lower(fn, X, scale=S((), jnp.float32))
    assert forms(concrete) == forms(abstract)


def test_static_arguments_and_donation_of_a_jitted_function_are_kept():
    fn = jax.jit(lambda x, n: x * n, static_argnums=1, donate_argnums=0)
    text = lower(fn, X, 3).forms["exact"].sections[1].text
    assert "dense<3.000000e+00>" in text
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_levels_can_be_chosen():
    assert set(lower(lambda x: x, X, levels=["exact"]).forms) == {"exact"}
    assert set(lower(lambda x: x, X, levels=["dataflow"]).forms) == {"dataflow"}


def fails(x):
    return x @ jnp.ones((3, 3))


BAD = {
    "fails to trace": (lambda: lower(fails, X), r"fails can't be traced: TypeError: .*test_lower"),
    "wrong count": (lambda: lower(fails), r"fails can't be traced: TypeError"),
    "bad target": (lambda: lower(fails, X, target="v5"), r"target 'v5': wanted KIND:AxBxC"),
    "unknown kind": (lambda: lower(fails, X, target="GPU:2x2"), r"no such kind 'GPU'"),
    "bad level": (lambda: lower(fails, X, levels=["best"]), r"level 'best': wanted one of exact"),
    "bad route": (lambda: lower(fails, X, route="fast"), r"route 'fast': wanted"),
    "bad axis types": (lambda: lower(fails, X, axis_types="manual"), r"axis types 'manual'"),
    "mesh too large": (
        lambda: lower(case(sharded(), mesh={"data": 16})),
        r"mesh data=16 needs 16 devices, target TPU7x:2x2x1 has 8",
    ),
    "build fails": (
        lambda: lower(case(lambda mesh: 1 / 0, mesh=AXES)),
        r"build\(mesh\) failed: ZeroDivisionError",
    ),
    "build returns something else": (
        lambda: lower(case(lambda mesh: 3, mesh=AXES)),
        r"build\(mesh\) returned a int, wanted \(fn, args\)",
    ),
    "a case with arguments": (lambda: lower(case(fails, X), X), r"a case has its own arguments"),
    "no function": (lambda: lower(3), r"wanted a function first, found a int"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name):
    attempt, wanted = BAD[name]
    with pytest.raises(InputError, match=wanted) as caught:
        attempt()
    assert "\n" not in str(caught.value)


def test_an_argument_spread_over_host_devices_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(InputError, match="sharded over devices of the host"):
        lower(lambda x: x, x)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def on_own_mesh(types):
    """A function that closes over a mesh of the host's devices, as scripts make at their top."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    spec = PartitionSpec("data")
    return jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
@pytest.mark.parametrize("entry", [lower, cost])
def test_a_mesh_of_its_own_is_named_with_what_to_do(types, entry, monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr("relower.lowering.cost.ladder.compile_staged", pytest.fail)
    fn = on_own_mesh(types)
    with pytest.raises(InputError) as caught:
        entry(lambda x: fn(x), jnp.ones(64))
    said = str(caught.value)
    assert "\n" not in said
    assert "it holds a mesh of this host's devices (data=8), where the target's was wanted" in said
    assert said.endswith("as in relower.case(build, mesh={'data': 8})")
    with pytest.raises(InputError, match=r"wanted: build the function on the mesh that build"):
        entry(case(lambda _: (fn, (jnp.ones(64),)), mesh={"data": 8}))


def test_a_mesh_of_its_own_that_the_target_can_hold_is_in_the_stamp():
    """jax lowers such a function as it is: for as many devices as its mesh has."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
    spread = NamedSharding(mesh, PartitionSpec("data"))

    def fn(x):
        return jax.lax.with_sharding_constraint(x * 2, spread).sum()

    assert lower(fn, jnp.ones(64), levels=["exact"]).stamp.fields["mesh"] == "8, the function's own"
    with pytest.raises(
        InputError, match=r"a mesh of its own, of 8 devices, and target TPU7x:1x1x1"
    ):
        lower(fn, jnp.ones(64), target="TPU7x:1x1x1")


def print_inside(x):
    jax.debug.print("{}", x)
    return x


def call_back(x):
    return jax.pure_callback(lambda a: a, X, x)


@pytest.mark.parametrize("fn", [print_inside, call_back])
def test_a_host_callback_is_unknown_with_its_line(fn):
    found = lower(fn, X)
    assert {u.construct for u in found.unknowns} <= {"stablehlo.send", "stablehlo.recv"}
    assert {(u.where.file, u.where.line) for u in found.unknowns} == {
        (__file__, fn.__code__.co_firstlineno + 1)
    }


def test_keys_numbers_and_static_objects_are_arguments_as_they_are():
    def fn(key, x, scale, options):
        return jax.random.normal(key, x.shape) * x * scale + options["shift"]

    key, other = jax.random.key(0), jax.random.key(1)
    one = lower(fn, key, X, 2.0, {"shift": jnp.zeros(16)})
    assert forms(one) == forms(lower(fn, other, X, 3.0, {"shift": jnp.ones(16)}))
    assert one.unknowns == ()


def test_mutable_state_keeps_its_order():
    def writes(first, second):
        def fn(x):
            ref = jax.new_ref(x)
            ref[0] = first(ref[0])
            ref[0] = second(ref[0])
            return ref[...]

        return lower(fn, X)

    one, other = writes(jnp.sin, jnp.cos), writes(jnp.cos, jnp.sin)
    assert all(forms(one)[level] != forms(other)[level] for level in LEVELS)


FACTOR = 2.0


def _scale_kernel(x, out):
    out[...] = x[...] * FACTOR


@jax.custom_vjp
def _scaled(x):
    return x * FACTOR


_scaled.defvjp(lambda x: (x * FACTOR, None), lambda _, g: (g * FACTOR,))
_INNER = jax.jit(lambda x: x * FACTOR)
READS_A_GLOBAL = {
    "function": lambda x: x * FACTOR,
    "jitted": jax.jit(lambda x: x * FACTOR),
    "jit inside": lambda x: _INNER(x) + 1,
    "scan": lambda x: jax.lax.scan(lambda c, _: (c * FACTOR, None), x, length=3)[0],
    "remat": jax.checkpoint(lambda x: x * FACTOR),
    "custom_vjp": jax.grad(lambda x: _scaled(x).sum()),
    "kernel": lambda x: pl.pallas_call(_scale_kernel, out_shape=x)(x),
    "optimized": optimize(lambda x: x * FACTOR),
}


@pytest.mark.parametrize("name", READS_A_GLOBAL)
def test_what_a_function_reads_while_it_is_traced_is_read_again(monkeypatch, name):
    """jax keeps traces by function and types; a flag that changed in between must be seen."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    before, again = (lower(READS_A_GLOBAL[name], x, levels=("exact",)) for _ in range(2))
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    after = lower(READS_A_GLOBAL[name], x, levels=("exact",))
    assert diff(before, again).verdict is Verdict.IDENTICAL
    assert diff(before, after).verdict is Verdict.DIFFERENT


def test_what_was_traced_outside_stays_traced():
    traces = []
    fn = jax.jit(lambda x: (traces.append(1), x * 2)[1])
    fn(1.0)
    lower(fn, jax.ShapeDtypeStruct((), jnp.float32), levels=("exact",))
    fn(1.0)
    assert len(traces) == 2
