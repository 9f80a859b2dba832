"""Modules made by hand: what must differ, what must match, and what must be UNKNOWN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relower.lowering import LEVELS, lower
from relower.lowering.change import Verdict
from relower.lowering.diff import diff
from relower.lowering.errors import InputError

BASE = """
module @jit_step attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(
      %arg0: tensor<8x4xf32> {jax.buffer_donor = true},
      %arg1: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %arg2: tensor<8x4xf32>)
      -> (tensor<8x4xf32> {jax.result_info = "result[0]"},
          tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>}) {
    %c = stablehlo.constant dense<1.500000e+00> : tensor<f32>
    %d = stablehlo.constant dense<[[1.0, 2.0], [3.0, 4.0]]> : tensor<2x2xf32>
    %s = stablehlo.constant dense<7.000000e+00> : tensor<8x4xf32>
    %0 = stablehlo.subtract %arg0, %arg1 : tensor<8x4xf32>
    %1 = stablehlo.compare LT, %0, %arg2, FLOAT
      : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xi1>
    %2 = stablehlo.select %1, %0, %s : tensor<8x4xi1>, tensor<8x4xf32>
    %3 = func.call @scale(%2, %c) : (tensor<8x4xf32>, tensor<f32>) -> tensor<8x4xf32>
    %4 = stablehlo.dot_general %3, %d_wide, contracting_dims = [1] x [1],
      precision = [DEFAULT, DEFAULT] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
    %5 = stablehlo.optimization_barrier %4 : tensor<8x4xf32>
    %6 = "stablehlo.all_reduce"(%5) <{
        channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>,
        replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>,
        use_global_device_ids}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %x = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %x : tensor<f32>
    }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %7 = "stablehlo.all_reduce"(%6) <{
        channel_handle = #stablehlo.channel_handle<handle = 4, type = 1>,
        replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>,
        use_global_device_ids}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %x = stablehlo.maximum %a, %b : tensor<f32>
        stablehlo.return %x : tensor<f32>
    }) : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %8 = stablehlo.custom_call @tpu_custom_call(%7) {
      backend_config = "{\\22a\\22: 1, \\22b\\22: 2}", has_side_effect = true
    } : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %9 = stablehlo.exponential %8 {mhlo.frontend_attributes = {group = "1"}} : tensor<8x4xf32>
    %k = stablehlo.constant dense<0> : tensor<2xui64>
    %10, %11 = stablehlo.rng_bit_generator %k, algorithm = THREE_FRY
      : (tensor<2xui64>) -> (tensor<2xui64>, tensor<8x4xui32>)
    %12 = stablehlo.convert %11 : (tensor<8x4xui32>) -> tensor<8x4xf32>
    %13 = stablehlo.add %9, %12 : tensor<8x4xf32>
    return %13, %7 : tensor<8x4xf32>, tensor<8x4xf32>
  }
  func.func private @scale(%arg0: tensor<8x4xf32>, %arg1: tensor<f32>) -> tensor<8x4xf32> {
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
    %1 = stablehlo.multiply %arg0, %0 : tensor<8x4xf32>
    return %1 : tensor<8x4xf32>
  }
}
""".replace("%d_wide", "%dd").replace(
    "    %0 = stablehlo.subtract",
    """    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %dd = stablehlo.pad %d, %z, low = [0, 0], high = [2, 2], interior = [0, 0]
      : (tensor<2x2xf32>, tensor<f32>) -> tensor<4x4xf32>
    %0 = stablehlo.subtract""",
)

DIFFER = {
    "subtract operands swapped": ("subtract %arg0, %arg1", "subtract %arg1, %arg0"),
    "compare direction": ("compare LT", "compare GT"),
    "compare type": ("FLOAT", "TOTALORDER"),
    "scalar constant": ("dense<1.500000e+00>", "dense<1.500001e+00>"),
    "splat constant": ("dense<7.000000e+00>", "dense<7.000001e+00>"),
    "dense constant": ("[3.0, 4.0]", "[3.0, 4.000001]"),
    "zero's sign": ("dense<0.0>", "dense<-0.0>"),
    "donation dropped": (" {jax.buffer_donor = true}", ""),
    "donation added": (
        "%arg2: tensor<8x4xf32>)",
        "%arg2: tensor<8x4xf32> {jax.buffer_donor = true})",
    ),
    "aliasing": ("jax.buffer_donor = true", "tf.aliasing_output = 0 : i32"),
    "argument sharding": ('[{"data"}, {}]', '[{}, {"data"}]'),
    "result sharding": ('[{"model"}, {}]', '[{}, {"model"}]'),
    "mesh axis name": ('"model"', '"expert"'),
    "mesh extents": ('"data"=4, "model"=2', '"data"=2, "model"=4'),
    "replica groups": ("[[0, 2, 4, 6], [1, 3, 5, 7]]", "[[0, 1, 2, 3], [4, 5, 6, 7]]"),
    "channels merged": ("handle = 4", "handle = 3"),
    "channel type": ("handle = 4, type = 1", "handle = 4, type = 0"),
    "global ids": (",\n        use_global_device_ids", ""),
    "reducer": ("stablehlo.maximum %a", "stablehlo.minimum %a"),
    "precision": ("precision = [DEFAULT, DEFAULT]", "precision = [HIGHEST, DEFAULT]"),
    "side effect dropped": ("has_side_effect = true", "has_side_effect = false"),
    "backend config": ("\\22b\\22: 2", "\\22b\\22: 3"),
    "custom call's target": ("@tpu_custom_call", "@other"),
    "barrier removed": (
        "%5 = stablehlo.optimization_barrier %4 : tensor<8x4xf32>",
        "%5 = stablehlo.reshape %4 : (tensor<8x4xf32>) -> tensor<8x4xf32>",
    ),
    "frontend attribute": ('group = "1"', 'group = "2"'),
    "frontend attribute dropped": (' {mhlo.frontend_attributes = {group = "1"}}', ""),
    "rng algorithm": ("THREE_FRY", "PHILOX"),
    "partitions": ("num_partitions = 8", "num_partitions = 4"),
    "results permuted": ("return %13, %7", "return %7, %13"),
    "callee's body": ("stablehlo.multiply %arg0, %0", "stablehlo.add %arg0, %0"),
    "callee's operands": ("stablehlo.multiply %arg0, %0", "stablehlo.multiply %0, %arg0"),
    "entry parameters permuted": (
        '%arg1: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},\n'
        "      %arg2: tensor<8x4xf32>)",
        '%arg2: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},\n'
        "      %arg1: tensor<8x4xf32>)",
    ),
    "layout mode": ("{jax.buffer_donor = true}", '{mhlo.layout_mode = "{1,0}"}'),
    "memory kind": ("{jax.buffer_donor = true}", '{mhlo.memory_kind = "pinned_host"}'),
}

MATCH = {
    "module name": ("@jit_step", "@jit_other"),
    "private function's name": ("@scale", "@another"),
    "mesh name": ("@mesh", "@grid"),
    "value names": ("%arg2", "%weights"),
    "result info": ("result[0]", "out['loss']"),
    "channels renumbered": ("handle = 4", "handle = 17"),
    "key order": ("\\22a\\22: 1, \\22b\\22: 2", "\\22b\\22: 2, \\22a\\22: 1"),
    "blank lines": ("    %9 =", "\n\n    %9 ="),
}


def changed(change: tuple[str, str]) -> str:
    old, new = change
    assert old in BASE
    return BASE.replace(old, new)


@pytest.mark.parametrize("name", DIFFER)
def test_differs_at_every_level(name, digests):
    base, mutant = digests(BASE), digests(changed(DIFFER[name]))
    assert {level for level in LEVELS if base[level] != mutant[level]} == set(LEVELS)


@pytest.mark.parametrize("name", MATCH)
def test_matches_at_every_level(name, digests):
    assert digests(BASE) == digests(changed(MATCH[name]))


def test_every_section_is_covered_by_the_digest(normal):
    base = normal(BASE).forms["exact"]
    mutant = normal(changed(DIFFER["callee's body"])).forms["exact"]
    assert [s.name for s in base.sections] == ["module", "main", "f1"]
    changed_sections = [
        a.name for a, b in zip(base.sections, mutant.sections, strict=True) if a.digest != b.digest
    ]
    assert changed_sections == ["f1"]
    assert base.digest != mutant.digest


def test_one_line_per_operation_each_with_a_location_slot(normal):
    for form in normal(BASE).forms.values():
        for section in form.sections:
            assert len(section.text.splitlines()) == len(section.locations)
            assert section.text == "" or section.text.endswith("\n")


def test_ledger_counts_what_was_set_aside(normal):
    ledger = normal(BASE).ledger
    assert ledger["mesh-name"] == 1
    assert ledger["channel-id"] == 2
    assert ledger["result-info"] == 1
    assert ledger["function-name"] == 1
    assert ledger["call-inlined"] == 1
    assert "json-key-order" not in ledger
    reordered = normal(changed(MATCH["key order"])).ledger
    assert reordered["json-key-order"] == 1


def test_clean_module_has_no_unknowns(normal):
    assert normal(BASE).unknowns == ()


def test_ops_are_counted_through_the_call_graph(normal):
    twice = BASE.replace(
        "%4 = stablehlo.dot_general %3",
        "%again = func.call @scale(%3, %c) : (tensor<8x4xf32>, tensor<f32>) -> tensor<8x4xf32>\n"
        "    %4 = stablehlo.dot_general %again",
    )
    assert normal(BASE).ops["stablehlo.multiply"] == 1
    assert normal(twice).ops["stablehlo.multiply"] == 2
    assert normal(twice).ops["stablehlo.dot_general"] == 1


WRAP = """
module {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    {body}
    return %0 : tensor<4xf32>
  }}
}}
"""

UNKNOWN = {
    "custom call xla_ffi_python_cpu_callback": (
        "%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%arg0) "
        "{mhlo.backend_config = {index = 0 : ui64}, api_version = 4 : i32} "
        ": (tensor<4xf32>) -> tensor<4xf32>"
    ),
    "custom call thing": (
        "%0 = stablehlo.custom_call @thing(%arg0) "
        '{backend_config = "94390376338928"} : (tensor<4xf32>) -> tensor<4xf32>'
    ),
    "custom call long": (
        "%0 = stablehlo.custom_call @long(%arg0) "
        '{backend_config = "' + "x" * 3000 + ' 94390376338928"} : (tensor<4xf32>) -> tensor<4xf32>'
    ),
    "stablehlo.send": (
        "%t = stablehlo.create_token : !stablehlo.token\n"
        '%s = "stablehlo.send"(%arg0, %t) <{channel_handle = '
        "#stablehlo.channel_handle<handle = 1, type = 2>, is_host_transfer = true}> "
        ": (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token\n"
        "%0 = stablehlo.negate %arg0 : tensor<4xf32>"
    ),
    "dense_resource": (
        "%c = stablehlo.constant dense_resource<blob> : tensor<4xf32>\n"
        "%0 = stablehlo.add %arg0, %c : tensor<4xf32>"
    ),
    "arith.negf": "%0 = arith.negf %arg0 : tensor<4xf32>",
}


@pytest.mark.parametrize("construct", UNKNOWN)
def test_what_no_rule_knows_is_unknown_by_name(construct, normal):
    text = WRAP.format(body=UNKNOWN[construct])
    if construct == "dense_resource":
        text += '{-# dialect_resources: { builtin: { blob: "0x04000000" } } #-}'.replace(
            "0x04000000", "0x04000000" + "00" * 16
        )
    assert [unknown.construct for unknown in normal(text).unknowns] == [construct]


def test_strings_cannot_pass_for_names(digests):
    body = '%0 = stablehlo.negate %arg0 {{mhlo.frontend_attributes = {{a = "{}"}}}} : tensor<4xf32>'
    texts = ["@main", "dense_resource<x>", r"\00func\00main\00", r"@\22\01mesh 0\22"]
    forms = [digests(WRAP.format(body=body.format(text))) for text in texts]
    assert len({form["exact"] for form in forms}) == len(texts)


def test_names_of_attributes_cannot_pass_for_others(digests):
    body = "%0 = stablehlo.negate %arg0 {{mhlo.frontend_attributes = {{{}}}}} : tensor<4xf32>"
    two, one = (
        digests(WRAP.format(body=body.format(text)))
        for text in ('a = "1", b = "2"', '"a = \\"1\\", b" = "2"')
    )
    assert two["exact"] != one["exact"]


def test_large_constants_are_compared_whole(digests):
    values = ", ".join(f"{i}.0" for i in range(1000))
    text = WRAP.format(
        body=f"%c = stablehlo.constant dense<[{values}]> : tensor<1000xf32>\n"
        "%1 = stablehlo.slice %c [996:1000] : (tensor<1000xf32>) -> tensor<4xf32>\n"
        "%0 = stablehlo.add %arg0, %1 : tensor<4xf32>"
    )
    assert digests(text) == digests(text)
    assert digests(text)["exact"] != digests(text.replace("501.0", "501.5"))["exact"]


def test_equal_meshes_are_merged_from_inlined_on(digests):
    two = BASE.replace(
        'sdy.mesh @mesh = <["data"=4, "model"=2]>',
        'sdy.mesh @mesh = <["data"=4, "model"=2]>\n  sdy.mesh @mesh_0 = <["data"=4, "model"=2]>',
    ).replace('#sdy.sharding<@mesh, [{"model"}, {}]>', '#sdy.sharding<@mesh_0, [{"model"}, {}]>')
    one, both = digests(BASE), digests(two)
    assert one["exact"] != both["exact"]
    assert one["inlined"] == both["inlined"]
    assert one["dataflow"] == both["dataflow"]


def module_of(*functions):
    body = "\n".join(
        f"func.func {kind} @{name}(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
        + "".join(
            f"%{i + 1} = func.call @{op[1:]}(%{i or 'x'}) : (tensor<4xf32>) -> tensor<4xf32>\n"
            if op.startswith("@")
            else f"%{i + 1} = stablehlo.{op} %{i or 'x'} : tensor<4xf32>\n"
            for i, op in enumerate(ops)
        )
        + f"return %{len(ops)} : tensor<4xf32>\n}}"
        for kind, name, *ops in functions
    )
    return f"module {{\n{body}\n}}"


def test_a_public_functions_name_is_never_taken_for_a_private_ones(digests):
    """A caller may know it by its name, whatever it is, and wherever it is called first."""
    rest = [("public", "f1", "sine"), ("private", "g", "abs")]
    one = module_of(("public", "main", "@g", "tanh"), *rest, ("public", "h", "@g", "@g"))
    two = module_of(("public", "main", "@g", "tanh"), *rest, ("public", "h", "@g", "@f1"))
    assert all(a != b for a, b in zip(digests(one).values(), digests(two).values(), strict=True))


@pytest.mark.parametrize("name", ["z", '"k k"', '"k\\0Ak"', '"module"', '"\\C3\\A9"'])
def test_a_public_functions_name_is_compared(digests, name):
    one, two = (
        module_of(("public", "main", "@g", f"@{k}"), ("private", "g", "abs"), ("public", k, "sine"))
        for k in ("k", name)
    )
    found, wanted = digests(two), digests(one)
    assert found == digests(two)
    assert set(found.values()).isdisjoint(wanted.values())


def test_frontend_attributes_that_are_no_dictionary_are_compared(digests):
    text = """module { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = "stablehlo.custom_call"(%x) {call_target_name = "t", mhlo.frontend_attributes = "x"}
        : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32> } }"""
    changed = text.replace('= "x"', '= "y"')
    assert set(digests(text).values()).isdisjoint(digests(changed).values())


def test_a_name_with_the_mark_of_references_is_refused(normal):
    text = module_of(("public", "main", '@"a\\00b"'), ("private", '"a\\00b"', "abs"))
    with pytest.raises(InputError, match="holds a NUL character"):
        normal(text)


def test_a_call_of_a_function_with_an_empty_name_is_unknown():
    """MLIR prints its symbol as no symbol, so which function is called can't be read."""
    programs = []
    for op in (jnp.tanh, jnp.sin):

        def called(x, op=op):
            return op(x)

        called.__name__ = called.__qualname__ = ""
        programs.append(lower(lambda x, f=called: jax.jit(f)(x) + 1, np.ones(4, np.float32)))
    for level in LEVELS:
        found = diff(*programs, level=level)
        assert found.verdict is not Verdict.IDENTICAL
        assert diff(programs[0], programs[0], level=level).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("one", "two"),
    [("1e400", "1e500"), ("0.1", "0.10000000000000000001"), ("[" * 3000, "[" * 3001)],
    ids=["overflow", "digits", "depth"],
)
def test_a_config_is_compared_to_the_last_digit(digests, one, two):
    def module(value):
        return f"""module {{ func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
          %0 = stablehlo.custom_call @tpu_custom_call(%x) {{
            backend_config = "{{\\22a\\22: {value}}}" }} : (tensor<4xf32>) -> tensor<4xf32>
          return %0 : tensor<4xf32> }} }}"""

    assert set(digests(module(one)).values()).isdisjoint(digests(module(two)).values())
    assert digests(module("0.25")) == digests(module("0.25"))


CALLS = """
module @jit_step {{
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = func.call @"{name}"(%a) : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
  func.func private @"{name}"(%a: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = stablehlo.sine %a : tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
"""


def test_the_names_that_shardy_knows_functions_by_mean_something(digests):
    """After its round trip, `xla.sdy.manual_computation_body` is no function like any other."""
    plain, other = (digests(CALLS.format(name=name)) for name in ("body", "scale"))
    assert plain == other
    names = ("xla.sdy.manual_computation_body", "xla.sdy.inlinable_manual_computation_body")
    one, two = (digests(CALLS.format(name=name)) for name in names)
    again = digests(CALLS.format(name=f"{names[0]}_7"))  # the number says nothing
    for level in LEVELS:
        assert len({plain[level], one[level], two[level]}) == 3
        assert again[level] == one[level]


KERNEL_CALL = """
module @jit_step {{
  func.func public @main(%a: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {{
    %0 = stablehlo.custom_call @tpu_custom_call(%a) {{
      backend_config = "{{\\22custom_call_config\\22: {{\\22body\\22: \\22AA==\\22, \\22collective_id\\22: {0}}}}}"
    }} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = stablehlo.custom_call @tpu_custom_call(%0) {{
      backend_config = "{{\\22custom_call_config\\22: {{\\22body\\22: \\22AA==\\22, \\22collective_id\\22: {1}}}}}"
    }} : (tensor<4xf32>) -> tensor<4xf32>
    return %0, %1 : tensor<4xf32>, tensor<4xf32>
  }}
}}
"""  # noqa: E501


def test_only_numbers_are_collective_ids(digests):
    assert digests(KERNEL_CALL.format(1, 2)) == digests(KERNEL_CALL.format(7, 3))
    texts = [(1, 2), (1, 1), ("true", 2), (-1, 2), (-2, 2), ("null", 2), ("\\22x\\22", 2)]
    found = [digests(KERNEL_CALL.format(*ids)) for ids in texts]
    for level in LEVELS:
        assert len({each[level] for each in found}) == len(texts)
