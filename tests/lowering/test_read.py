"""The reader leaves nothing of an operation out: compared with MLIR's own generic text."""

import re

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from relower.compat.mlir import PassManager, ir, mosaic_context
from relower.lowering.case import case
from relower.lowering.ir import walk
from relower.lowering.ledger import Ledger
from relower.lowering.locations import LocationTable
from relower.lowering.lower import stage
from relower.lowering.mosaic import KernelTable
from relower.lowering.read import PROGRAM_DIALECTS, Reader, Session
from relower.lowering.targets import make_mesh, parse_target

S = jax.ShapeDtypeStruct


def module():
    def fn(lhs, rhs, sizes):
        out = gmm(lhs, rhs, sizes, preferred_element_type=jnp.float32)
        order = jnp.argsort(sizes)
        carried, _ = jax.lax.scan(lambda c, x: (c + x, None), jnp.int32(0), sizes[order])
        return out.sum() + jnp.where(carried > 0, 1.0, 2.0)

    shapes = (S((256, 256), jnp.bfloat16), S((4, 256, 256), jnp.bfloat16), S((4,), jnp.int32))
    target = parse_target("TPU7x:2x2x1")
    mesh = make_mesh(target, None, "auto", "abstract")
    lowered, _ = stage(case(jax.grad(fn, (0, 1)), *shapes), target, mesh, "abstract")
    return lowered.compiler_ir("stablehlo")


def mlir_walk(operation):
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                yield view.operation
                yield from mlir_walk(view.operation)


def left_over(operation):
    """What MLIR prints of one operation beside its name, values, types and known attributes."""
    text = operation.get_asm(print_generic_op_form=True, use_local_scope=True)
    text = re.sub(r'^(%\S+ = )?"[\w.]+"\([^)]*\)', "", text).rsplit(" : (", 1)[0]
    known = {name: str(operation.attributes[name]) for name in operation.attributes}
    for name, value in sorted(known.items(), key=lambda item: -len(item[1])):
        unit = name if value == "unit" else f"{name} = {value}"
        assert unit in text, (unit, text)
        text = text.replace(unit, "", 1)
    return text.strip("<{}>, \n")


def check(operation, read):
    mine = [op for op in walk(read)]
    theirs = list(mlir_walk(operation))
    assert sorted(op.name for op in mine) == sorted(
        op.name for op in theirs if op.name != "func.func"
    )
    assert sum(len(op.operands) for op in mine) == sum(
        len(op.operands) for op in theirs if op.name != "func.func"
    )
    return theirs


def test_every_operation_operand_and_attribute_is_read():
    program = module()
    session = Session(Ledger(), LocationTable(), {})
    kernels = KernelTable(session, "none")
    with program.context:
        read = Reader(session, PROGRAM_DIALECTS, kernels.token).read(program)
        blocks = [block for function in read.functions.values() for block in function.blocks]
        theirs = check(program.operation, blocks)
        for operation in theirs:
            if not list(operation.regions):
                assert left_over(operation) == ""


def test_properties_of_kernel_operations_are_attributes():
    context = mosaic_context()
    text = """
    module {
      func.func @k(%x: memref<8x128xf32>, %v: vector<8x128xf32>) {
        %c = arith.constant 0 : index
        %y = arith.addf %v, %v fastmath<fast> : vector<8x128xf32>
        tpu.vector_store %x[%c, %c], %y {strides = array<i32>}
          : memref<8x128xf32>, vector<8x128xf32>,
        return
      }
    }"""
    with context:
        parsed = ir.Module.parse(text)
        PassManager.parse("builtin.module()").run(parsed.operation)
        session = Session(Ledger(), LocationTable(), {})
        read = Reader(session, frozenset({"arith", "func", "tpu"})).read(parsed)
    ops = {op.name: op for op in read.functions["k"].blocks[0].ops}
    assert ops["arith.addf"].attrs == {"fastmath": "#arith.fastmath<fast>"}
    assert set(ops["tpu.vector_store"].attrs) >= {"operandSegmentSizes", "strides"}
    assert session.unknowns == {}


def test_main_is_public_where_it_does_not_say(digests):
    """Public is MLIR's default; a private main would be dropped at inlined."""
    text = """
    func.func @main(%a: tensor<f32>) -> tensor<f32> {{
      %0 = stablehlo.{op} %a, %a : tensor<f32>
      return %0 : tensor<f32>
    }}"""
    add, multiply = (digests(text.format(op=op)) for op in ("add", "multiply"))
    assert all(add[level] != multiply[level] for level in add)


def test_the_config_of_another_backend_is_compared_as_it_is(digests):
    """Only of a kernel is it known that names and the order of keys carry no meaning."""
    text = """
    func.func public @main(%a: tensor<f32>) -> tensor<f32> {{
      %0 = stablehlo.custom_call @foo(%a) {{{attrs}}} : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32>
    }}"""
    config = r'backend_config = "{{\22a\22: {}}}"'.format
    pairs = [
        ('kernel_name = "a"', 'kernel_name = "b"'),
        (config("1e400"), config("1e500")),
        (config("0.1"), config("0.10000000000000001")),
    ]
    for left, right in pairs:
        a, b = (digests(text.format(attrs=attrs)) for attrs in (left, right))
        assert all(a[level] != b[level] for level in a), left
