"""Level exact against MLIR's own text: what is edited, what isn't, and where each line is from."""

import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from relower.lowering.exact import ExactPrinter
from relower.lowering.ir import Function
from relower.lowering.ledger import Ledger
from relower.lowering.locations import LocationTable
from relower.lowering.printed import Printed
from relower.lowering.printer import PREFIXES, Names
from relower.lowering.read import PROGRAM_DIALECTS
from relower.lowering.session import Session
from relower.lowering.tails import Tails

T = "tensor<4xf32>"
NESTED = (
    f"""
module {{
  func.func public @main(%x: {T}, %p: tensor<i1>) -> {T} {{
    %k = stablehlo.negate %x : {T} loc(#before)
    %r:2 = "stablehlo.while"(%k, %p) ({{
      ^bb0(%a: {T}, %b: tensor<i1>):
        stablehlo.return %b : tensor<i1> loc(#cond)
    }}, {{
      ^bb0(%a: {T}, %b: tensor<i1>):
        %c = "stablehlo.case"(%i) ({{
          %s = stablehlo.sine %a : {T} loc(#branch)
          stablehlo.return %s : {T} loc(#branch)
        }}, {{
          stablehlo.return %a : {T} loc(#branch)
        }}) : (tensor<i32>) -> {T} loc(#case)
        stablehlo.return %c, %b : {T}, tensor<i1> loc(#body)
    }}) {{mhlo.frontend_attributes = {{a = "1"}}}} : ({T}, tensor<i1>) -> ({T}, tensor<i1>)
      loc(#loop)
    return %r#0 : {T} loc(#after)
  }}
}}
""".replace("%p: tensor<i1>) ->", "%p: tensor<i1>, %i: tensor<i32>) ->")
    + "\n".join(
        f'#{name} = loc("jit(f)/{name}/op"("f"("model.py":{line}:1)))'
        for line, name in enumerate(("before", "cond", "branch", "case", "body", "loop", "after"))
    )
)


def test_every_line_has_the_location_of_its_operation(normal):
    found = normal(NESTED)
    section = found.forms["exact"].sections[1]
    scopes = {}
    for line, index in zip(section.text.splitlines(), section.locations, strict=True):
        scope = found.locations[index].scope if index >= 0 else None
        scopes.setdefault(scope, []).append(line.strip())
    names = {scope: [line.split('"')[1] for line in lines if '"' in line]
             for scope, lines in scopes.items() if scope}  # fmt: skip
    assert names == {
        "jit(f)/before/op": ["stablehlo.negate"],
        "jit(f)/loop/op": ["stablehlo.while", "1"],
        "jit(f)/cond/op": ["stablehlo.return"],
        "jit(f)/case/op": ["stablehlo.case"],
        "jit(f)/branch/op": ["stablehlo.sine", "stablehlo.return", "stablehlo.return"],
        "jit(f)/body/op": ["stablehlo.return"],
        "jit(f)/after/op": ["func.return"],
    }
    assert [line[:3] for line in scopes["jit(f)/loop/op"]] == ["%1:", "}, ", "}) "]
    assert all(line.startswith(("func", "arg", "result", "^")) for line in scopes[None])


def test_lines_without_noise_are_mlirs_own(normal):
    text = NESTED.replace(' {mhlo.frontend_attributes = {a = "1"}}', "")
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        [function] = module.body.operations
        printed = function.operation.get_asm(print_generic_op_form=True, use_local_scope=True)
    body = printed.splitlines()[2:-1]
    assert normal(text).forms["exact"].sections[1].text.splitlines()[5:] == body


def test_frontend_attributes_of_an_operation_with_regions(normal):
    lines = normal(NESTED).forms["exact"].sections[1].text.splitlines()
    [line] = [line for line in lines if "frontend" in line]
    assert line.startswith('  }) frontend {a = "1"} : (')


@pytest.mark.parametrize("padding", range(0, 1100, 50))
def test_a_long_attribute_is_found_wherever_it_stands(padding, normal):
    long = ", ".join(["1.0"] * 300)
    before = f'{{a.b = "{"x" * padding}"}}'
    text = f"""
    func.func public @main(%x: {T}) -> {T} {{
      %0 = stablehlo.negate %x {before} : {T}
      %c = stablehlo.constant dense<[{long}, 2.0]> : tensor<301xf32>
      return %0 : {T}
    }}"""
    form = normal(text).forms["exact"].sections[1].text
    assert "= sha256<" in form
    assert " characters> : tensor<301xf32>" in form
    assert "x" * padding in form


def test_a_function_without_a_body_shows_its_arguments(normal):
    text = f"""
    module {{
      func.func public @main(%x: {T}) -> {T} {{
        %0 = call @far(%x) : ({T}) -> {T}
        return %0 : {T}
      }}
      func.func private @far({T} {{a.b = 1 : i32}}) -> {T}
    }}"""
    for form in normal(text).forms.values():
        assert [s.name for s in form.sections] == ["module", "main", "f1"]
    far = normal(text).forms["exact"].sections[2].text
    assert far == f"func.func private\n  arg %arg0: {T} {{a.b = 1 : i32}}\n  result 0: {T}\n"


@pytest.mark.parametrize(
    "body",
    [
        "  something else\n",
        '  %0 = "stablehlo.negate"(%arg0) : (t) -> t\n  and more\n',
        '  %0 = "stablehlo.negate"(%arg0) : (t) -> t\n  %1 = "stablehlo.negate"(%0) : (t) -> t\n',
    ],
)
def test_text_of_another_form_is_unknown(body):
    """As a jaxlib might print that none has yet."""
    session = Session(Ledger(), LocationTable(), {})
    printer = ExactPrinter(session, Tails(session, {}), Names(PREFIXES, {}), PROGRAM_DIALECTS)
    header = Function("main", True, {}, [], [], [], [], -1)
    section, _ = printer.section(Printed(header, [], body, [-1]), "main", keep=False)
    assert [unknown.construct for unknown in session.unknowns.values()] == ["function main"]
    assert section.text == "func.func public\n" + body
    assert len(section.locations) == len(section.text.splitlines())


def test_a_tail_of_another_form_is_unknown():
    session = Session(Ledger(), LocationTable(), {})
    Tails(session, {}).of("stablehlo.custom_call", " <{a = 1}> surprise : () -> ()", -1)
    assert ("stablehlo.custom_call", "its printed form can't be read") in session.unknowns
