"""The comparison on programs written by hand: verdicts, what changed, and where."""

from dataclasses import replace

import pytest

from relower.lowering.artifact_index import form_digest
from relower.lowering.change import Verdict
from relower.lowering.diff import diff
from relower.lowering.errors import InputError
from relower.lowering.program import Form, Location, Program, Section, Stamp, Unknown, digest_of

MODULE = "module mhlo.num_partitions = 1 : i32\nmodule mhlo.num_replicas = 1 : i32\n"
T = "tensor<8xf32>"
MAIN = f"""\
func.func public
  arg %0: {T} {{jax.buffer_donor = true}}
  arg %1: {T}
  result 0: {T}
  %2 = "stablehlo.constant"() {{value = dense<2.0> : {T}}} : () -> ({T})
  %3 = "stablehlo.multiply"(%0, %2) : ({T}, {T}) -> ({T})
  %4 = "stablehlo.subtract"(%3, %1) : ({T}, {T}) -> ({T})
  %5 = "stablehlo.while"(%4) : ({T}) -> ({T}) ({{
  ^0(%6: {T}):
    "stablehlo.return"(%6) : ({T}) -> ()
  }}, {{
  ^0(%7: {T}):
    %8 = "func.call"(%7) @f1 : ({T}) -> ({T})
    "stablehlo.return"(%8) : ({T}) -> ()
  }})
  "func.return"(%5) : ({T}) -> ()
"""
INNER = f"""\
func.func private
  arg %0: {T}
  result 0: {T}
  %1 = "stablehlo.sine"(%0) : ({T}) -> ({T})
  "func.return"(%1) : ({T}) -> ()
"""


def program(*functions, kernels=(), unknowns=(), stamp=None, module=MODULE, scope="jit(step)"):
    """A program at level ``exact``; line n of function k comes from ``model.py:100k+n``."""
    table = [
        Location("model.py", 100 * k + n, f"{scope}/f{k}") for k in range(9) for n in range(99)
    ]
    index = {(w.line // 100, w.line % 100): i for i, w in enumerate(table)}

    def section(name, kind, text, k, label):
        lines = tuple(index[k, n] for n in range(text.count("\n")))
        return Section(name, kind, text, label, lines)

    names = ["main", *(f"f{i}" for i in range(1, len(functions)))]
    sections = (
        Section("module", "module", module),
        *(
            section(n, "function", t, k, f"my_{n}")
            for k, (n, t) in enumerate(zip(names, functions, strict=True))
        ),
    )
    bodies = {}
    for k, text in enumerate(kernels, 5):
        name = f"kernel:{digest_of(text)[:12]}"
        bodies[name] = section(name, "kernel", text, k, f"kernel_{k}")
    form = Form("exact", sections, form_digest(sections))
    fields = stamp or {"jax": "0.12.0", "target": "TPU7x:2x2x1"}
    return Program(
        {"exact": form}, bodies, {}, {}, {}, Stamp(fields), tuple(unknowns), tuple(table)
    )  # fmt: skip


BASE = program(MAIN, INNER)


def only(found):
    assert found.verdict is Verdict.DIFFERENT
    assert len(found.changes) == 1, found.changes
    return found.changes[0]


def edited(old, new, text=MAIN):
    assert text.count(old) == 1
    return text.replace(old, new)


def test_same_text_is_identical():
    found = diff(BASE, program(MAIN, INNER))
    assert found.verdict is Verdict.IDENTICAL
    assert not found.changes
    assert found.digests[0] == found.digests[1]


def test_a_constant():
    found = only(diff(BASE, program(edited("dense<2.0>", "dense<3.0>"), INNER)))
    assert (found.kind, found.op, found.detail) == ("attribute", "stablehlo.constant", "value")
    assert "2.0" in found.a
    assert "3.0" in found.b
    assert (found.where_a.file, found.where_a.line) == ("model.py", 4)


def test_the_digit_that_differs_in_a_large_constant_is_shown():
    long = ", ".join(str(i) for i in range(500))
    a = edited("dense<2.0>", f"dense<[{long}]>")
    b = edited("dense<2.0>", f"dense<[{long.replace(' 400,', ' 777,')}]>")
    found = only(diff(program(a, INNER), program(b, INNER)))
    assert "400" in found.a
    assert "777" in found.b
    assert len(found.a) < 100


def test_swapped_subtract():
    found = only(diff(BASE, program(edited('subtract"(%3, %1)', 'subtract"(%1, %3)'), INNER)))
    assert (found.op, found.detail) == ("stablehlo.subtract", "operands swapped")
    assert (found.a, found.b) == (
        "stablehlo.multiply, argument 1",
        "argument 1, stablehlo.multiply",
    )
    assert found.where_b.line == 6


def test_a_dropped_donation():
    found = only(diff(BASE, program(edited(" {jax.buffer_donor = true}", ""), INNER)))
    assert (found.op, found.detail, found.path) == (
        "argument", "jax.buffer_donor", ("argument 0",),
    )  # fmt: skip
    assert (found.a, found.b) == ("true", "(absent)")


def test_an_operation_replaced_in_a_called_function_in_a_loop():
    found = only(diff(BASE, program(MAIN, edited("sine", "cosine", INNER))))
    assert (found.kind, found.a, found.b) == ("operation", "stablehlo.sine", "stablehlo.cosine")
    assert found.section == "my_f1"
    assert found.where_a.line == 103


def test_an_operation_inserted_shifts_no_other():
    extra = f'  %9 = "stablehlo.negate"(%3) : ({T}) -> ({T})\n  %4 = '
    found = diff(BASE, program(edited("  %4 = ", extra), INNER))
    change = only(found)
    assert (change.kind, change.op) == ("added", "stablehlo.negate")
    assert found.touched().scopes == {"jit(step)/f0"}


def test_a_use_of_a_replaced_value_is_placed_at_its_producers():
    a = edited("  %4 = ", f'  %9 = "stablehlo.negate"(%3) : ({T}) -> ({T})\n  %4 = ')
    a = edited('subtract"(%3, %1)', 'subtract"(%9, %1)', a)
    found = diff(program(a, INNER), BASE)
    kinds = {change.kind: change for change in found.changes}
    assert set(kinds) == {"removed", "operands"}
    assert [p.line for p in kinds["operands"].places] == [6]


def test_a_use_of_another_constant():
    two = edited(
        "  %3 = ",
        f'  %9 = "stablehlo.constant"() {{value = dense<7.0> : {T}}} : () -> ({T})\n  %3 = ',
    )
    found = only(diff(program(two, INNER), program(two.replace("(%0, %2)", "(%0, %9)"), INNER)))
    assert (found.op, found.detail) == ("stablehlo.multiply", "operand 1")
    assert (found.a, found.b) == ("stablehlo.constant", "another stablehlo.constant")


def test_moved_operations_are_paired_by_what_reads_them():
    def text(constant, order):
        lines = {
            "x": f'  %12 = "a.sine"(%10) : ({T}) -> ({T})\n',
            "y": f'  %13 = "a.sine"(%11) : ({T}) -> ({T})\n',
            "-": "".join(f'  "a.effect{i}"() : () -> ()\n' for i in range(4)),
        }
        return (
            f"func.func public\n  arg %0: {T}\n  arg %1: {T}\n"
            f'  %2 = "stablehlo.constant"() {{value = {constant}}} : () -> ({T})\n'
            f'  %10 = "a.multiply"(%0, %2) : ({T}, {T}) -> ({T})\n'
            f'  %11 = "a.multiply"(%1, %2) : ({T}, {T}) -> ({T})\n'
            + "".join(lines[which] for which in order)
            + f'  "func.return"(%12, %13) : ({T}, {T}) -> ()\n'
        )

    found = diff(program(text("1.0", "xy-")), program(text("2.0", "-yx")))
    assert sorted(c.kind for c in found.changes) == ["attribute", "moved", "moved"]


def test_a_loop_that_carries_one_value_less():
    def text(carried, returned):
        count = len(carried.split(", "))
        types = ", ".join([T] * count)
        args = ", ".join(f"%{20 + i}: {T}" for i in range(count))
        x, y = (20 + count - 2, 20 + count - 1)
        return (
            f"func.func public\n  arg %0: {T}\n  arg %1: {T}\n"
            f'  %2 = "stablehlo.constant"() {{value = 1.0}} : () -> ({T})\n'
            f'  %3:{count} = "stablehlo.while"({carried}) : ({types}) -> ({types}) ({{\n'
            f"  ^0({args}):\n"
            f'    %30 = "a.subtract"(%{x}, %{y}) : ({T}, {T}) -> ({T})\n'
            f'    "stablehlo.return"({returned}%{x}, %30) : ({types}) -> ()\n'
            "  })\n"
            f'  "func.return"(%3#{count - 2}, %3#{count - 1}) : ({T}, {T}) -> ()\n'
        )

    found = diff(program(text("%2, %0, %1", "%20, ")), program(text("%0, %1", "")))
    assert {c.op for c in found.changes} == {"stablehlo.while", "stablehlo.return"}


def test_two_effects_in_another_order():
    one = '  "stablehlo.custom_call"() {call_target_name = "one"} : () -> ()\n'
    two = '  "stablehlo.custom_call"() {call_target_name = "two"} : () -> ()\n'
    a = edited("  %4 = ", one + two + "  %4 = ")
    b = edited("  %4 = ", two + one + "  %4 = ")
    found = diff(program(a, INNER), program(b, INNER))
    assert [c.kind for c in found.changes] == ["moved"]


def test_calls_of_two_functions_swapped():
    two = edited("  %4 = ", f'  %9 = "func.call"(%3) @f2 : ({T}) -> ({T})\n  %4 = ')
    swapped = two.replace("@f1", "@x").replace("@f2", "@f1").replace("@x", "@f2")
    other = edited("sine", "cosine", INNER)
    found = diff(program(two, INNER, other), program(swapped, INNER, other))
    assert found.verdict is Verdict.DIFFERENT
    assert {c.section for c in found.changes} & {"my_main", "my_f1", "my_f2"}
    # the same with the bodies swapped as well is only a renumbering: text differs, meaning doesn't
    same = diff(program(two, INNER, other), program(swapped, other, INNER))
    assert same.verdict is Verdict.DIFFERENT
    assert "found no difference" in same.reasons[0]
    assert not same.changes


def test_a_function_duplicated():
    found = only(diff(BASE, program(MAIN, INNER, INNER)))
    assert (found.kind, found.op, found.section) == ("added", "function", "my_f2")


def test_a_module_attribute():
    found = only(
        diff(BASE, program(MAIN, INNER, module=MODULE.replace("partitions = 1", "partitions = 2")))
    )
    assert (found.kind, found.section_kind) == ("text", "module")


def test_alike_differences_are_grouped():
    calls = "".join(f'  %{10 + i} = "func.call"(%0) @f{i} : ({T}) -> ({T})\n' for i in range(1, 4))
    main = edited("  %4 = ", calls + "  %4 = ")
    ins = [INNER + "// " + str(i) + "\n" for i in range(3)]
    outs = [edited("sine", "cosine", text) for text in ins]
    found = diff(program(main, *ins), program(main, *outs))
    assert len(found.groups) == 1
    assert len(found.groups[0].changes) == 3
    assert found.groups[0].sections == ("my_f1", "my_f2", "my_f3")


KERNEL = """\
module stable.x = 1
@s1
func.func private
  arg %0: memref<8x128xf32>
  %1 = "arith.constant"() {value = 1.0 : f32} : () -> (f32)
  %2 = "scf.for"(%1) : (f32) -> (f32) ({
  ^0(%3: f32):
    %4 = "arith.addf"(%3, %1) : (f32, f32) -> (f32)
    "scf.yield"(%4) : (f32) -> ()
  })
  "func.return"() : () -> ()
@s2
func.func private
  arg %0: i32
  result 0: i32
  "func.return"(%0) : (i32) -> ()
"""


def calling(kernel, config=""):
    body = f'json {{"custom_call_config": {{"body": "kernel:{digest_of(kernel)}"{config}}}}}'
    call = f'  %9 = "stablehlo.custom_call"(%3) {{backend_config = {body}}} : ({T}) -> ({T})\n'
    return edited("  %4 = ", call + "  %4 = ")


def test_an_operation_in_a_kernel():
    other = edited("arith.addf", "arith.mulf", KERNEL)
    a = program(calling(KERNEL), INNER, kernels=[KERNEL])
    b = program(calling(other), INNER, kernels=[other])
    found = diff(a, b)
    change = only(found)
    assert (change.a, change.b, change.path) == ("arith.addf", "arith.mulf", ("scf.for",))
    assert change.section == "kernel_5"
    assert change.where_a.line == 507
    assert found.touched().kernels == {"kernel_5"}
    assert [p.line for p in change.places] == [6]  # the call that the kernel belongs to


def test_a_field_of_a_kernel_call():
    b = program(calling(KERNEL, ', "vmem_limit": 7'), INNER, kernels=[KERNEL])
    change = only(diff(program(calling(KERNEL), INNER, kernels=[KERNEL]), b))
    assert change.detail == "backend_config.custom_call_config.vmem_limit"
    assert (change.a, change.b) == ("(absent)", "7")


def test_a_kernel_that_is_not_there_is_unknown():
    a = program(calling(KERNEL), INNER)
    found = diff(a, a)
    assert found.verdict is Verdict.UNKNOWN
    assert "whose body" in found.reasons[0]


def test_equal_digests_with_other_text_are_not_identical():
    forged = program(edited("dense<2.0>", "dense<3.0>"), INNER)
    form = replace(forged.forms["exact"], digest=BASE.forms["exact"].digest)
    found = diff(BASE, replace(forged, forms={"exact": form}))
    assert found.verdict is Verdict.DIFFERENT


def test_a_long_field_of_a_stamp_names_what_differs_in_it():
    a, b = (program(MAIN, stamp={"flags": f"x=1, y={y}, z=3"}) for y in (2, 5))
    assert diff(a, b).reasons == ("stamp: flags is y=2 in a and y=5 in b",)
    a, b = (program(MAIN, stamp={"flags": flags}) for flags in ("x=1, y=2", "y=2, x=1"))
    assert diff(a, b).reasons == ("stamp: flags is x=1, y=2 in a and y=2, x=1 in b",)


def test_a_stamp_that_differs_is_unknown_until_allowed():
    b = program(MAIN, INNER, stamp={"jax": "0.12.1", "target": "TPU7x:2x2x1"})
    found = diff(BASE, b)
    assert found.verdict is Verdict.UNKNOWN
    assert found.reasons == ("stamp: jax is 0.12.0 in a and 0.12.1 in b",)
    allowed = diff(BASE, b, allow=["jax"])
    assert allowed.verdict is Verdict.IDENTICAL
    assert allowed.allowed == ("jax",)
    with pytest.raises(InputError, match="did you mean 'target'"):
        diff(BASE, b, allow=["targt"])


def test_an_unknown_is_never_identical():
    odd = Unknown("custom call xla_python_cpu_callback", "a pointer")
    a = program(MAIN, INNER, unknowns=[odd])
    assert diff(a, a).verdict is Verdict.UNKNOWN
    assert diff(a, BASE).verdict is Verdict.UNKNOWN
    assert "a pointer" in diff(a, BASE).reasons[0]


def test_an_unknown_does_not_hide_a_difference_elsewhere():
    odd = Unknown("stablehlo.sine", "unheard of", Location("model.py", 103, "s"))
    a = program(MAIN, INNER, unknowns=[odd])
    b = program(edited("dense<2.0>", "dense<3.0>"), INNER)
    assert diff(a, b).verdict is Verdict.DIFFERENT
    assert diff(a, b).unknowns


def test_a_difference_in_an_unknown_construct_only_is_unknown():
    odd = Unknown("stablehlo.sine", "unheard of")
    a = program(MAIN, INNER, unknowns=[odd])
    found = diff(a, program(MAIN, edited("sine", "cosine", INNER)))
    assert found.verdict is Verdict.UNKNOWN
    assert "may be noise" in found.reasons[0]
    assert found.changes


def test_an_unknown_in_a_called_function_is_met_by_its_line():
    odd = Unknown("custom call x", "a pointer", Location("model.py", 103, "f1"))
    a = program(MAIN, INNER, unknowns=[odd])
    found = diff(a, program(MAIN, edited("sine", "cosine", INNER)))
    assert found.changes[0].where_a.scope == "jit(step)/f0/jit(step)/f1"
    assert found.verdict is Verdict.UNKNOWN


def test_a_change_in_a_function_is_placed_at_every_call():
    two = edited("  %4 = ", f'  %9 = "func.call"(%3) @f1 : ({T}) -> ({T})\n  %4 = ')
    found = only(diff(program(two, INNER), program(two, edited("sine", "cosine", INNER))))
    assert {p.scope for p in found.places} == {"jit(step)/f0/jit(step)/f1"}
    unplaced = program(two, INNER, scope="")
    assert diff(unplaced, unplaced).verdict is Verdict.IDENTICAL


def test_calls_nested_deeper_than_any_stack():
    def chain(last):
        link = 'func.func {}\n  %0 = "func.call"() @f{} : () -> (f32)\n'
        texts = [link.format("public", 1), *(link.format("private", n) for n in range(2, 3000))]
        texts.append(f'func.func private\n  %0 = "{last}"() : () -> (f32)\n')
        names = ["main", *(f"f{n}" for n in range(1, 3000))]
        sections = tuple(Section(n, "function", t) for n, t in zip(names, texts, strict=True))
        form = Form("exact", sections, form_digest(sections))
        return Program({"exact": form}, {}, {}, {}, {}, Stamp({}))

    found = only(diff(chain("a.b"), chain("a.c")))
    assert (found.a, found.b) == ("a.b", "a.c")


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "}) })\n}, {\n", '"a.b"(', '"' * 99, "({" * 500, '"a.b"() ({\n' * 900,
        "^0(%1: f32):\n", "  ^0(", "func.func public\nfunc.func public\n", "@s1\n@s2\n",
        '%0:70000 = "a.b"() : ()\n', '"a"(%0, %0#1, %x) <{a = "\\"}> {b} : (', "module\n",
        '  %1 = "a.b"(%1) : f32\n', "\ttext \x00 \x1b[31m\n", '"a"() {a = <<<((({{{[[[} : ',
    ],
)  # fmt: skip
def test_any_text_is_compared(text):
    other = 'func.func public\n  "a.b"() : () -> ()\n'
    assert diff(program_text(text), program_text(text)).verdict is Verdict.IDENTICAL
    for a, b in ((text, other), (other, text), (text, text + "x"), (text, "y" + text)):
        found = diff(program_text(a), program_text(b))
        assert found.verdict is Verdict.DIFFERENT
        assert found.changes or found.reasons


def test_a_level_that_is_not_there():
    assert diff(BASE, BASE, level="inlined").verdict is Verdict.UNKNOWN
    with pytest.raises(InputError, match="wanted one of exact, inlined, dataflow"):
        diff(BASE, BASE, level="loose")


def test_a_long_program_stays_in_bounds():
    lines = "".join(
        f'  %{n} = "op.{n % 7}"(%{max(0, n - 3)}) : ({T}) -> ({T})\n' for n in range(2, 20000)
    )
    head = f"func.func public\n  arg %0: {T}\n  arg %1: {T}\n"
    a = program_text(head + lines)
    b = program_text(head + edited('"op.4"(%9997)', '"op.x"(%9997)', lines))
    change = only(diff(a, b))
    assert (change.a, change.b) == ("op.4", "op.x")


def program_text(text):
    sections = (Section("main", "function", text),)
    form = Form("exact", sections, form_digest(sections))
    return Program({"exact": form}, {}, {}, {}, {}, Stamp({}))


def test_unrelated_texts_are_different_and_bounded():
    lines = "".join(f'  "a.{n * n % 1009}"() : () -> ()\n' for n in range(6000))
    other = "".join(f'  "a.{n * n * n % 1013}"() : () -> ()\n' for n in range(6000))
    found = diff(program_text(lines), program_text(other))
    assert found.verdict is Verdict.DIFFERENT
    assert found.notes


def test_json_is_plain():
    import json

    found = diff(BASE, program(edited("dense<2.0>", "dense<3.0>"), INNER)).to_json()
    assert json.loads(json.dumps(found))["groups"][0]["where_a"]["line"] == 4
