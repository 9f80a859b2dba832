"""The normal form on random modules: names are noise; every attribute, operand and constant counts.

Modules are drawn as lists of pieces and written out under some naming: of functions, values,
meshes and the module, numbers of channels, locations, result paths, order of functions. The
naming never changes a digest. Then, in the parsed module, one operand or one attribute of one
operation (whichever hypothesis draws, MLIR's inherent ones among them) is replaced by another:
that always does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax._src.interpreters import mlir

from relower.compat.mlir import ir
from relower.lowering import LEVELS
from relower.lowering.normalize import normalize

T = "tensor<4xf32>"
EXAMPLES = int(os.environ.get("RELOWER_EXAMPLES", "60"))

# A piece defines value OUT from A and B; NAME-like words are filled in by the naming.
PIECES = {
    "add": f"OUT = stablehlo.add A, B : {T}",
    "subtract": f"OUT = stablehlo.subtract A, B : {T}",
    "tagged": f'OUT = stablehlo.sine A {{mhlo.frontend_attributes = {{k = "K", z = "1"}}}} : {T}',
    "scalar": f"""OUTc = stablehlo.constant dense<Kf> : tensor<f32>
OUTb = stablehlo.broadcast_in_dim OUTc, dims = [] : (tensor<f32>) -> {T}
OUT = stablehlo.multiply A, OUTb : {T}""",
    "dense": f"""OUTc = stablehlo.constant dense<[1.0, 2.0, Kf, -0.0]> : {T}
OUT = stablehlo.maximum A, OUTc : {T}""",
    "compare": f"""OUTp = stablehlo.compare GT, A, B, FLOAT : ({T}, {T}) -> tensor<4xi1>
OUT = stablehlo.select OUTp, A, B : tensor<4xi1>, {T}""",
    "dot": f"""OUTr = stablehlo.reshape A : ({T}) -> tensor<2x2xf32>
OUTs = stablehlo.reshape B : ({T}) -> tensor<2x2xf32>
OUTd = stablehlo.dot_general OUTr, OUTs, contracting_dims = [1] x [0],
  precision = [HIGHEST, DEFAULT] : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
OUT = stablehlo.reshape OUTd : (tensor<2x2xf32>) -> {T}""",
    "collective": f"""OUT = "stablehlo.all_reduce"(A) <{{
  channel_handle = #stablehlo.channel_handle<handle = CHANNEL, type = 1>,
  replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids}}> ({{
  ^bb0(OUTx: tensor<f32>, OUTy: tensor<f32>):
    OUTz = stablehlo.add OUTx, OUTy : tensor<f32>
    stablehlo.return OUTz : tensor<f32>
}}) : ({T}) -> {T}""",
    "custom": f"""OUT = stablehlo.custom_call @target(A, B) {{backend_config = "K",
  has_side_effect = true, api_version = 2 : i32, operand_layouts = [dense<0> : tensor<1xindex>,
  dense<0> : tensor<1xindex>], result_layouts = [dense<0> : tensor<1xindex>]}}
  : ({T}, {T}) -> {T}""",
    "random": f"""OUTk = stablehlo.constant dense<[1, 2]> : tensor<2xui64>
OUTn, OUTm = stablehlo.rng_bit_generator OUTk, algorithm = THREE_FRY
  : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>)
OUTf = stablehlo.convert OUTm : (tensor<4xui32>) -> {T}
OUT = stablehlo.add A, OUTf : {T}""",
    "barrier": f"""OUT, OUTw = stablehlo.optimization_barrier A, B : {T}, {T}""",
    "sharded": f'OUT = sdy.sharding_constraint A <@MESH, [{{"x"}}]> : {T}',
    "sort": f"""OUT = "stablehlo.sort"(A) <{{dimension = 0 : i64, is_stable = true}}> ({{
  ^bb0(OUTx: tensor<f32>, OUTy: tensor<f32>):
    OUTp = stablehlo.compare LT, OUTx, OUTy : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return OUTp : tensor<i1>
}}) : ({T}) -> {T}""",
    "branch": f"""OUTi = stablehlo.constant dense<1> : tensor<i32>
OUT = "stablehlo.case"(OUTi) ({{
    stablehlo.return A : {T}
}}, {{
    OUTn = stablehlo.negate B : {T}
    stablehlo.return OUTn : {T}
}}) : (tensor<i32>) -> {T}""",
    "loop": f"""OUTi = stablehlo.constant dense<0> : tensor<i32>
OUTe, OUT = stablehlo.while(OUTj = OUTi, OUTx = A) : tensor<i32>, {T} cond {{
    OUTn = stablehlo.constant dense<7> : tensor<i32>
    OUTp = stablehlo.compare LT, OUTj, OUTn : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return OUTp : tensor<i1>
}} do {{
    OUTo = stablehlo.constant dense<1> : tensor<i32>
    OUTq = stablehlo.add OUTj, OUTo : tensor<i32>
    OUTy = stablehlo.add OUTx, B : {T}
    stablehlo.return OUTq, OUTy : tensor<i32>, {T}
}}""",
    "gather": f"""OUTi = stablehlo.constant dense<[[3], [1], [0], [2]]> : tensor<4x1xi32>
OUT = "stablehlo.gather"(A, OUTi) <{{dimension_numbers = #stablehlo.gather<
  collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
  slice_sizes = array<i64: 1>, indices_are_sorted = false}}> : ({T}, tensor<4x1xi32>) -> {T}""",
    "composite": f"""OUT = stablehlo.composite "my.op" A {{composite_attributes = {{n = 3 : i64}},
  decomposition = @FUNCTION0, version = 2 : i32}} : ({T}) -> {T}""",
    "call": f"OUT = func.call @FUNCTION1(A, B) : ({T}, {T}) -> {T}",
}


@dataclass(frozen=True)
class Naming:
    """How a module is written out; none of it means anything."""

    module: str = "m"
    mesh: str = "mesh"
    functions: tuple[str, str] = ("unary", "binary")
    value: str = "%v"
    channel: int = 1
    step: int = 1
    path: str = "result"
    located: bool = False
    reversed: bool = False


identifiers = st.from_regex(r"[a-z][a-z_]{3,8}", fullmatch=True)


@st.composite
def namings(draw):
    one, two = draw(st.lists(identifiers, min_size=2, max_size=2, unique=True))
    return Naming(
        draw(identifiers), draw(identifiers), (f"f_{one}", f"g_{two}"), f"%{draw(identifiers)}_",
        draw(st.integers(1, 50)), draw(st.integers(1, 3)), draw(identifiers),
        draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


@st.composite
def modules(draw):
    """Pieces with their operands and a constant: ``(name, a, b, k)``."""
    pieces = []
    for index in range(draw(st.integers(2, 7))):
        name = draw(st.sampled_from(sorted(PIECES)))
        a, b = (draw(st.integers(0, index + 1)) for _ in range(2))
        pieces.append((name, a, b, draw(st.integers(1, 9))))
    return pieces


def text(pieces, naming=None) -> str:
    naming = naming or Naming()
    lines = []
    for index, (name, a, b, k) in enumerate(pieces):
        piece = PIECES[name]
        for word, value in {
            "CHANNEL": str(naming.channel + index * naming.step),
            "FUNCTION0": naming.functions[0],
            "FUNCTION1": naming.functions[1],
            "MESH": naming.mesh,
            "Kf": f"{k}.5",
            '"K"': f'"{k}"',
            "OUT": f"{naming.value}{index + 2}",
        }.items():
            piece = piece.replace(word, value)
        piece = piece.replace(" A", f" {naming.value}{a}").replace("(A", f"({naming.value}{a}")
        piece = piece.replace(" B", f" {naming.value}{b}")
        lines.append(piece)
    functions = [
        f"""func.func private @{naming.functions[0]}(%a: {T}) -> {T} {{
  %r = stablehlo.cosine %a : {T}
  return %r : {T}
}}""",
        f"""func.func private @{naming.functions[1]}(%a: {T}, %b: {T}) -> {T} {{
  %r = stablehlo.power %a, %b : {T}
  return %r : {T}
}}""",
    ]
    # Both are used, so that neither is dropped at inlined, and on two values.
    value = naming.value
    lines.append(
        f"%used = func.call @{naming.functions[1]}({value}{len(pieces) + 1}, {value}0) "
        f": ({T}, {T}) -> {T}"
    )
    lines.append(
        f'%last = stablehlo.composite "my.end" %used '
        f"{{decomposition = @{naming.functions[0]}}} : ({T}) -> {T}"
    )
    sharding = f'sdy.sharding = #sdy.sharding<@{naming.mesh}, [{{"x"}}]>'
    main = "\n".join(
        [
            f"func.func public @main({naming.value}0: {T} {{jax.buffer_donor = true}}, "
            f"{naming.value}1: {T} {{{sharding}}}) -> ({T} {{jax.result_info = "
            f'"{naming.path}"}}) {{',
            *lines,
            f"return %last : {T}",
            "}",
        ]
    )
    if naming.located:
        main = main.replace(f"return %last : {T}", f'return %last : {T} loc("f.py":3:4)')
    order = [main, *functions]
    return "\n".join(
        [
            f"module @{naming.module} attributes {{mhlo.num_partitions = 4 : i32}} {{",
            f'sdy.mesh @{naming.mesh} = <["x"=4]>',
            *(reversed(order) if naming.reversed else order),
            "}",
        ]
    )


@pytest.fixture(scope="module")
def context():
    return mlir.make_ir_context()


def digests(module) -> dict[str, str]:
    normal = normalize(module, mosaic_version="0")
    assert normal.unknowns == ()
    return {level: form.digest for level, form in normal.forms.items()}


@settings(max_examples=EXAMPLES, deadline=None)
@given(pieces=modules(), naming=namings())
def test_names_numbers_and_locations_are_noise(pieces, naming, context):
    with context:
        one, other = (digests(ir.Module.parse(text(pieces, n))) for n in (None, naming))
    assert one == other


@settings(max_examples=EXAMPLES, deadline=None)
@given(pieces=modules(), data=st.data())
def test_another_piece_operand_or_constant_is_a_difference(pieces, data, context):
    index = data.draw(st.integers(0, len(pieces) - 1))
    name, a, b, k = pieces[index]
    what = data.draw(st.sampled_from("nabk"))
    changed = {
        "n": (data.draw(st.sampled_from(sorted(PIECES))), a, b, k),
        "a": (name, data.draw(st.integers(0, index + 1)), b, k),
        "b": (name, a, data.draw(st.integers(0, index + 1)), k),
        "k": (name, a, b, data.draw(st.integers(1, 9))),
    }[what]
    others = [*pieces[:index], changed, *pieces[index + 1 :]]
    assume(text(others) != text(pieces))
    with context:
        one, other = (digests(ir.Module.parse(text(p))) for p in (pieces, others))
    assert all(one[level] != other[level] for level in ("exact", "inlined"))


# Any attribute, any operand

NOISE = frozenset({"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs"})
"""Of functions and meshes: their names are noise, and the rest has its own tests below."""


def operations(root):
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from operations(view.operation)


def parsed(pieces):
    module = ir.Module.parse(text(pieces))
    return module, list(operations(module.operation))


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(pieces=modules(), data=st.data())
def test_any_attribute_of_any_operation_counts(pieces, data, context):
    with context, ir.Location.unknown():
        module, ops = parsed(pieces)
        before = digests(module)
        sites = [
            (i, name)
            for i, op in enumerate(ops)
            for name in op.attributes
            if op.name not in ("func.func", "func.return", "sdy.mesh")
            and name not in NOISE
            # A channel's number alone is noise; another callee takes other operands.
            and name not in ("channel_handle", "callee")
        ]
        index, name = data.draw(st.sampled_from(sites))
        op = ops[index]
        old = op.attributes[name]
        new = another(old)
        assume(new is not None)
        op.attributes[name] = new
        assume(name not in op.attributes or op.attributes[name] != old)
        after = digests(module)
    assert all(before[level] != after[level] for level in ("exact", "inlined")), (op.name, name)


def another(old):
    """An attribute of the same kind with another value."""
    kind = type(old).__name__
    if kind == "BoolAttr":
        return ir.BoolAttr.get(not old.value)
    if kind == "IntegerAttr":
        return ir.IntegerAttr.get(old.type, old.value + 1)
    if kind == "StringAttr":
        return ir.StringAttr.get(old.value + "x")
    if kind == "UnitAttr":
        return ir.BoolAttr.get(False)
    if kind == "FlatSymbolRefAttr":
        names = {"unary": "binary", "binary": "unary"}
        return ir.FlatSymbolRefAttr.get(names.get(old.value, old.value + "x"))
    if kind == "DictAttr":
        return ir.DictAttr.get({**{e.name: e.attr for e in old}, "more": ir.UnitAttr.get()})
    if kind == "ArrayAttr":
        return ir.ArrayAttr.get([*old, *old] or [ir.UnitAttr.get()])
    if kind == "DenseI64ArrayAttr":
        return ir.DenseI64ArrayAttr.get([*old, 1])
    text = str(old)
    for one, two in (
        ("GT", "LE"), ("LT", "GE"), ("FLOAT", "TOTALORDER"), ("SIGNED", "UNSIGNED"),
        ("HIGHEST", "HIGH"), ("THREE_FRY", "PHILOX"), ("dimensions = [1]", "dimensions = [0]"),
        ("index_vector_dim = 1", "index_vector_dim = 0"), ('"x"', "?"), ("[[0, 1]", "[[3, 1]"),
        ("5", "6"), ("dense<[1,", "dense<[9,"), ("dense<1>", "dense<2>"), ("dense<0>", "dense<3>"),
        ("dense<7>", "dense<8>"), ("[3]", "[2]"), ("type = 1", "type = 2"),
    ):  # fmt: skip
        if one in text:
            return ir.Attribute.parse(text.replace(one, two, 1))
    return None


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(pieces=modules(), data=st.data())
def test_any_operand_of_any_operation_counts(pieces, data, context):
    with context, ir.Location.unknown():
        module, ops = parsed(pieces)
        before = digests(module)
        sites = [(i, n) for i, op in enumerate(ops) for n in range(len(op.operands))]
        index, number = data.draw(st.sampled_from(sites))
        op = ops[index]
        block = op.block
        earlier = list(block.arguments)
        for view in block.operations:
            if view.operation == op:
                break
            earlier.extend(view.operation.results)
        old = op.operands[number]
        fitting = [v for v in earlier if v.type == old.type and v != old]
        assume(fitting)
        op.operands[number] = data.draw(st.sampled_from(fitting))
        after = digests(module)
    assert all(before[level] != after[level] for level in ("exact", "inlined"))


@settings(max_examples=EXAMPLES, deadline=None)
@given(pieces=modules(), data=st.data())
def test_what_stands_at_the_entry_counts(pieces, data, context):
    original = text(pieces)
    old, new = data.draw(
        st.sampled_from(
            [
                (" {jax.buffer_donor = true}", ""),
                ("{jax.buffer_donor = true}", "{tf.aliasing_output = 0 : i32}"),
                ("{jax.buffer_donor = true}", '{jax.buffer_donor = true, mhlo.memory_kind = "h"}'),
                ("num_partitions = 4", "num_partitions = 8"),
                ('["x"=4]', '["x"=8]'),
                ('sdy.sharding<@mesh, [{"x"}]>', "sdy.sharding<@mesh, [{}]>"),
                ("%v1: ", "%v9999: "),
                ("jax.result_info", "jax.other_info"),
            ]
        )
    )
    assert old in original
    if old == "%v1: ":  # the entry's two parameters permuted
        assume(any({a, b} & {0, 1} for _, a, b, _ in pieces))
        changed = original.replace("%v0: ", "%tmp: ").replace("%v1: ", "%v0: ")
        changed = changed.replace("%tmp: ", "%v1: ")
    else:
        changed = original.replace(old, new)
    with context:
        one, other = digests(ir.Module.parse(original)), digests(ir.Module.parse(changed))
    assert all(one[level] != other[level] for level in LEVELS)


@settings(max_examples=EXAMPLES, deadline=None)
@given(pieces=modules(), data=st.data())
def test_channels_count_up_to_a_renumbering(pieces, data, context):
    count = data.draw(st.integers(2, 4))
    pieces = [*pieces, *[("collective", 0, 0, 1)] * count]
    total = sum(name == "collective" for name, *_ in pieces)
    numbers = data.draw(st.lists(st.integers(1, 3), min_size=total, max_size=total))
    others = data.draw(st.lists(st.integers(1, 3), min_size=total, max_size=total))

    def with_numbers(wanted):
        module, ops = parsed(pieces)
        reduces = [op for op in ops if op.name == "stablehlo.all_reduce"]
        for op, number in zip(reduces, wanted, strict=True):
            handle = f"#stablehlo.channel_handle<handle = {number}, type = 1>"
            op.attributes["channel_handle"] = ir.Attribute.parse(handle)
        return digests(module)

    def pattern(wanted):
        return [wanted.index(number) for number in wanted]

    with context:
        one, other = with_numbers(numbers), with_numbers(others)
    assert (one == other) == (pattern(numbers) == pattern(others))
